"""How much time and memory does each loss take on a GPU, over catalog sizes?

    python benchmarks/loss_gpu.py
    python benchmarks/loss_gpu.py --catalogs 1000000 --dtypes bfloat16 --losses SCE CE

Each cell runs in a process of its own: forward and backward of a batch of 128 sequences of 200
states. "extra MiB" is the peak of allocated memory beyond the inputs and the two gradients.
Milliseconds are the median of the repeats, measured with events.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

from cells import Row, measure_cells
from contenders import contenders
from rows import keep, provenance, show

MAX_MILLISECONDS = 5000  # after which a slow cell is not repeated again
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--catalogs", type=int, nargs="+", default=sizes)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--losses", nargs="+", choices=list(contenders(1)), default=None)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None, help="default: results/loss_gpu.jsonl")
    options = parser.parse_args()
    # Counts devices without making a CUDA context, which could not be carried into a fork.
    if torch.cuda.device_count() == 0:
        sys.exit("loss_gpu: there is no CUDA device here; loss_cpu.py measures on the CPU")

    def measure(cell: Row) -> Row:
        return measure_cell(cell, options.batch, options.length, options.dim, options.repeats)

    losses = options.losses or list(contenders(1))
    cells: list[Row] = [
        {"items": c, "dtype": dtype, "loss": loss}
        for c in options.catalogs
        for dtype in options.dtypes
        for loss in losses
    ]
    shape = {"batch": options.batch, "length": options.length, "dim": options.dim}
    rows = [shape | row for row in measure_cells(cells, measure)]
    where = provenance("torch")
    path = keep("loss_gpu", [row | where for row in rows], to=options.out)
    print(show(rows, ["items", "dtype", "loss", "ms", "extra MiB", "failed"]))
    print(f"\n{len(rows)} rows in {path}")


def measure_cell(cell: Row, batch: int, length: int, dim: int, repeats: int) -> Row:
    """Measure one loss on one catalog size and precision, in this process."""
    loss = contenders(batch * length)[cell["loss"]]
    dtype = DTYPES[cell["dtype"]]
    torch.manual_seed(0)
    states = torch.randn(batch, length, dim, device="cuda", dtype=dtype).requires_grad_()
    catalogue = torch.randn(cell["items"], dim, device="cuda", dtype=dtype).requires_grad_()
    targets = torch.randint(cell["items"], (batch, length), device="cuda")

    def step() -> None:
        torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))

    before = torch.cuda.memory_allocated()
    gradients = (states.numel() + catalogue.numel()) * states.element_size()
    for _ in range(2):  # compiles the kernels, makes the handles of the libraries
        step()
    torch.cuda.synchronize()
    # What libraries keep for themselves (the workspace of matrix products) is not the loss's.
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    step()
    extra = torch.cuda.max_memory_allocated() - before - kept - gradients
    times: list[float] = []
    while len(times) < repeats and sum(times) < MAX_MILLISECONDS:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": round(statistics.median(times), 3),
        "extra MiB": round(extra / 2**20, 1),
        "workspace MiB": round(kept / 2**20, 1),
    }


if __name__ == "__main__":
    main()
