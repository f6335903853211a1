"""How much time and memory does each loss take on a GPU, over catalogue sizes?

    python benchmarks/loss_gpu.py --list
    python benchmarks/loss_gpu.py
    python benchmarks/loss_gpu.py --items 1000000 --dtype bfloat16 --only SCE "SCE, CUDA graph"
    python benchmarks/loss_gpu.py --exact --missing any
    python benchmarks/loss_gpu.py --cross --dim 256 --items 100000 --only SCE CE --dtype float32

Each cell runs in a process of its own, alone: forward and backward of a batch of 128 sequences of
200 states of 64 dimensions, and some of other shapes. "extra MiB" is the peak of allocated memory
beyond the inputs and the two gradients: what a GPU must have that holds those. "forward MiB" is the
peak of the forward pass by itself, when there are no gradients yet (unless the loss computes them
there). Milliseconds are the median of the repeats, measured with events. The errors are those of
the two gradients of a full cross-entropy against float64, relative to their lengths.

--only, --items and --dtype choose from the grid; with --cross they are combined, also to cells that
the grid leaves out. What is chosen replaces its own rows in the results, and leaves the others.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cells import Row, measure_cells
from contenders import contenders, is_exact
from rows import commit, kept, parser_of, show
from sce.losses import CrossEntropy

MAX_MILLISECONDS = 5000  # after which a slow cell is not repeated again
MAX_NUMBERS_FOR_ERRORS = 1 << 26  # of the catalogue, beyond which float64 takes too long
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPE: Row = {"batch": 128, "length": 200, "dim": 64, "bucket_size_y": 256}
COLUMNS = [*SHAPE, "items", "dtype", "loss"]
PEERS = ("cut-cross-entropy", "liger-kernel", "replay-rec")

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
OURS = ("SCE", "SCE, CUDA graph", "SCE, GraphedLoss", "SCE, tensor code")
CUT = ("CE, cut-cross-entropy", "CE, cut-cross-entropy, unfiltered")
EXACT = ("CE, fused", *CUT, "CE, Liger, tuned")


def grid() -> list[Row]:
    """Return the cells that answer the questions of the README and of docs/kernels.md.

    What matters most comes first, should time run out.
    """
    single, half, million = ["float32"], ["bfloat16"], SIZES[2:3]
    # SCE itself, and shapes that are not the usual: large buckets, wide states, a large batch, a
    # catalogue that fills the GPU.
    cells = exact() + combine(OURS, SIZES[1:], half)
    cells += combine(["SCE, sparse gradient"], [*SIZES[2:], 100_000_000], half)
    for size_y in (2048, 4096, 16_384):
        cells += combine(OURS, million, half, bucket_size_y=size_y)
    cells += combine(OURS, million, half, dim=256)
    cells += combine((*OURS, CUT[0]), million, half, batch=640, buckets=715)
    # What others have written, and what one would write instead.
    cells += combine(("CE, torch", *EXACT), SIZES[1:2], half)
    linear = "CE, torch, linear_cross_entropy"
    theirs = ("CE, torch", "CE, Liger", linear, f"{linear}, tuned", "SCE, RePlay")
    cells += combine(theirs, million, half)
    cells += combine(("SCE, tensor code, TF32", "SCE, RePlay"), million, single)
    # Which loss when.
    cells += combine((*OURS, "CE, chunked", "CE-", "BCE", "gBCE"), SIZES, single)
    cells += combine(["CE"], SIZES[:3], single)
    cells += combine(["SCE, default"], SIZES[:3], single, bucket_size_y=2048)
    return [*cells, *combine(["SCE"], [100_000_000], half)]


def exact() -> list[Row]:
    """Return the cells of exact cross-entropy, at the sizes of this field."""
    half, million, default = ["bfloat16"], SIZES[2:3], partial(combine, ["SCE, default"])
    cells = combine((*EXACT, "CE, chunked", "CE, chunked, tuned"), million, half)
    cells += default(million, half, bucket_size_y=2048)
    cells += combine(["CE, fused, autocast"], million, ["float32"])
    cells += combine(["CE, fused"], [20_000_000], half)  # others: seconds a call
    cells += default([20_000_000], half, bucket_size_y=2048)
    cells += combine(EXACT, million, half, dim=256)
    for dim in (128, 512):
        cells += combine(("CE, fused", CUT[0], "CE, Liger, tuned"), million, half, dim=dim)
    for dim in (256, 128, 512):
        cells += default(million, half, bucket_size_y=2048, dim=dim)
    # Which of the two a training in half precision takes, by items and states.
    for batch in (128, 32):
        for items in (3000, 10_000, 30_000, 100_000, 300_000):
            captured = partial(combine, sizes=[items], dtypes=["float32"], batch=batch)
            cells += captured(["CE, fused, autocast, CUDA graph"])
            cells += captured(["SCE, default, autocast, CUDA graph"], bucket_size_y=2048)
    return cells


def combine(
    losses: "list[str] | tuple[str, ...]",
    sizes: "list[int] | tuple[int, ...]",
    dtypes: "list[str] | dict[str, torch.dtype]",
    **shape: object,
) -> list[Row]:
    """Return a cell for each combination. What is compared is measured close together in time."""
    return [
        {**SHAPE, **shape, "items": items, "dtype": dtype, "loss": loss}
        for items in sizes
        for dtype in dtypes
        for loss in losses
    ]


def main() -> None:
    options = _options()
    if options.cross:
        shape = {name: getattr(options, name) for name in SHAPE}
        names = options.only or list(contenders(1))
        cells = combine(names, options.items or SIZES, options.dtype or DTYPES, **shape)
    else:
        cells = [
            cell
            for cell in (exact() if options.exact else grid())
            if (options.only is None or cell["loss"] in options.only)
            and (options.items is None or cell["items"] in options.items)
            and (options.dtype is None or cell["dtype"] in options.dtype)
        ]
    if options.missing:
        known = kept("loss_gpu", to=options.out)
        if options.missing == "commit":
            this = commit()
            known = [row for row in known if row["commit"] == this]
        there = [{name: row.get(name) for name in COLUMNS} for row in known]
        cells = [cell for cell in cells if {name: cell[name] for name in COLUMNS} not in there]
    if options.list:
        print(show(cells, COLUMNS))
        print(f"\n{len(cells)} cells")
        return
    if not cells and options.missing:
        print("nothing is missing")
        return
    if not cells:
        sys.exit("loss_gpu: the grid has no such cell; --list shows it, --cross makes others")
    # Counts devices without making a CUDA context, which could not be carried into a fork.
    if torch.cuda.device_count() == 0:
        sys.exit("loss_gpu: there is no CUDA device here; loss_cpu.py measures on the CPU")
    rows = measure_cells(
        "loss_gpu",
        cells,
        lambda cell: measure_cell(cell, options.repeats),
        packages=("torch", "triton", *PEERS),
        beside=COLUMNS,
        to=options.out,
    )
    measured = ["ms", "extra MiB", "forward MiB", "states error", "catalogue error", "failed"]
    print(show(rows, [*COLUMNS, *measured]))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "loss_gpu")
    names = list(contenders(1))
    parser.add_argument("--only", nargs="+", choices=names, metavar="LOSS", help=" | ".join(names))
    parser.add_argument("--items", type=int, nargs="+")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--exact", action="store_true", help="the cells of exact cross-entropy")
    parser.add_argument("--cross", action="store_true", help="all combinations, with the shape:")
    for name, default in SHAPE.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=default, help="[%(default)s] with --cross")
    parser.add_argument(
        "--missing",
        nargs="?",
        choices=["commit", "any"],
        const="commit",
        help="only what this commit has no row of; any: what has no row of any commit",
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--list", action="store_true", help="print the cells, and measure nothing")
    return parser.parse_args()


def measure_cell(cell: Row, repeats: int) -> Row:
    """Measure one loss on one catalogue size and precision, in this process."""
    loss: Any = contenders(
        cell["batch"] * cell["length"], buckets=cell.get("buckets"), size_y=cell["bucket_size_y"]
    )[cell["loss"]]()
    dtype = DTYPES[cell["dtype"]]
    torch.manual_seed(0)
    shape = (cell["batch"], cell["length"])
    states = torch.randn(*shape, cell["dim"], device="cuda", dtype=dtype).requires_grad_()
    catalogue = torch.randn(cell["items"], cell["dim"], device="cuda", dtype=dtype).requires_grad_()
    targets = torch.randint(cell["items"], shape, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))

    before = torch.cuda.memory_allocated()
    for _ in range(2):  # compiles the kernels, makes the handles of the libraries
        found = step()
    torch.cuda.synchronize()
    gradients = sum(map(_bytes, found))
    errors = _errors(found, states, catalogue, targets) if is_exact(cell["loss"]) else {}
    del found
    forward = forward_peak(lambda: loss(states, catalogue, targets))
    graph = warm_graph(step) if cell["loss"].endswith("CUDA graph") else None
    # What libraries keep for themselves (the workspace of matrix products) is not the loss's.
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call = step if graph is None else graph()
    call()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - resting - gradients
    taken = {"ms": round(median_ms(call, repeats), 3)}
    if cell["loss"].endswith("GraphedLoss"):  # its buffers are there before the call
        return taken
    return taken | {
        "extra MiB": round(extra / 2**20, 1),
        "forward MiB": round(forward / 2**20, 1),
        "workspace MiB": round((resting - before) / 2**20, 1),
        **errors,
    }


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """How long a call takes, by the GPU's clock."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < MAX_MILLISECONDS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def forward_peak(forward: Callable[[], Tensor]) -> int:
    """What a forward pass takes at most, as it is, without a graph."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def warm_graph(step: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    """Return what records the step in a CUDA graph, and gives the call that replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch.cuda.graph wants it
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)

    def record() -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # each replay draws other centres
            step()
        return graph.replay

    return record


def _bytes(gradient: Tensor) -> int:
    if gradient.is_sparse:
        return _bytes(gradient._values()) + _bytes(gradient._indices())
    return gradient.numel() * gradient.element_size()


def _errors(
    found: tuple[Tensor, ...], states: Tensor, catalogue: Tensor, targets: Tensor
) -> dict[str, float]:
    """Say how far both gradients are from those in float64 for the same (rounded) inputs."""
    if catalogue.numel() > MAX_NUMBERS_FOR_ERRORS:
        return {}
    inputs = tuple(tensor.detach().double().requires_grad_() for tensor in (states, catalogue))
    exact = torch.autograd.grad(CrossEntropy(chunk_size=1024)(*inputs, targets), inputs)
    return {
        name: float(f"{float((got.double() - want).norm() / want.norm()):.3g}")
        for name, got, want in zip(("states error", "catalogue error"), found, exact, strict=True)
    }


if __name__ == "__main__":
    main()
