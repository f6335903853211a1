"""Where does the time of the fused loss go on a GPU?

    python benchmarks/kernel_profile.py --items 1000000 --dtype bfloat16

Prints how long a call takes (forward and backward; as it is, and recorded as a CUDA graph), its
memory beyond inputs and gradients, how long the GPU is busy in it, how many kernels it launches,
and the kernels that keep it busy the longest. All of it is kept as a row too, one for each size.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from loss_gpu import forward_peak, median_ms, warm_graph
from rows import keep, parser_of, provenance
from sce.losses import ScalableCrossEntropy

# What makes a row another one: with the same it is replaced.
SIZES = ("items", "states", "dim", "bucket_size_y", "alpha", "dtype", "sparse_grad")


def main() -> None:
    sizes = {"items": 1_000_000, "states": 25_600, "dim": 64, "bucket_size_y": 256}
    parser = parser_of(__doc__, "kernel_profile", **sizes, alpha=2.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--sparse-grad", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernel_profile: there is no CUDA device here")
    dtype = getattr(torch, options.dtype)
    loss = ScalableCrossEntropy(
        bucket_size_y=options.bucket_size_y, alpha=options.alpha, sparse_grad=options.sparse_grad
    )
    states = torch.randn(options.states, options.dim, device="cuda", dtype=dtype)
    catalogue = torch.randn(options.items, options.dim, device="cuda", dtype=dtype)
    inputs = (states.requires_grad_(), catalogue.requires_grad_())
    targets = torch.randint(options.items, (options.states,), device="cuda")

    def forward() -> Tensor:
        value: Tensor = loss(*inputs, targets)
        return value

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs)

    eager = settled_ms(step)
    extra = extra_mib(forward, step)
    recorded = settled_ms(warm_graph(step)())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        step()
        torch.cuda.synchronize()
    # Kernels alone: operators repeat the time of the kernels they launch.
    kernels = [
        event
        for event in watched.key_averages()
        if event.device_type.name == "CUDA" and event.self_device_time_total
    ]
    busy = sum(event.self_device_time_total for event in kernels)
    launches = sum(event.count for event in kernels)
    print(f"{options.items:,} items, {options.dtype}:")
    print(f"{eager:.2f} ms a call, {recorded:.2f} ms as a graph,")
    print(f"{extra:.1f} MiB; GPU busy {busy / 1000:.2f} ms in {launches} kernels; the longest:")
    kernels.sort(key=lambda event: -event.self_device_time_total)
    longest = [(round(e.self_device_time_total, 1), e.count, e.key[:70]) for e in kernels]
    for microseconds, count, name in longest[:12]:
        print(f"{microseconds:9.0f} us {count:4d} x {name}")
    row = {size: getattr(options, size) for size in SIZES}
    row |= {"ms": round(eager, 3), "graph ms": round(recorded, 3), "extra MiB": round(extra, 1)}
    row |= {"busy ms": round(busy / 1000, 3), "us, times, kernel": longest}
    keep("kernel_profile", [row | provenance("torch", "triton")], to=options.out, beside=SIZES)


def settled_ms(call: Callable[[], object]) -> float:
    """How long a call takes, once kernels are compiled and the GPU is warm."""
    for _ in range(8):
        call()
    torch.cuda.synchronize()
    return median_ms(call, 20)


def extra_mib(forward: Callable[[], Tensor], step: Callable[[], tuple[Tensor, ...]]) -> float:
    """What a call takes at most: forward, and beyond the gradients that it returns."""
    highest, before = forward_peak(forward), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    values = [grad._values() if grad.is_sparse else grad for grad in step()]
    peak = torch.cuda.max_memory_allocated() - before
    peak -= sum(value.numel() * value.element_size() for value in values)
    return max(highest, peak) / 2**20


if __name__ == "__main__":
    main()
