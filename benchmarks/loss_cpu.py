"""How much time and memory does each loss take on a CPU, over catalogue sizes?

    python benchmarks/loss_cpu.py
    python benchmarks/loss_cpu.py --items 1000000 --only SCE "SCE, tensor code"
    OMP_NUM_THREADS=1 python benchmarks/loss_cpu.py --bucket-size-y 2048 --length 47 \
        --items 1000 2000 3000 4000 8000 16000 --only SCE "CE, chunked"  # where exact is faster

Each cell runs in a process of its own: forward and backward of a batch of 128 sequences of 200
states. "extra MiB" is the peak of resident memory beyond what was resident before the call (inputs,
libraries) and beyond the two gradients that it returns: what a machine must have that holds those.
"forward MiB" is the peak of the forward pass by itself, when there are no gradients yet (unless the
loss computes them there). Seconds are the median of the repeats; compare them within a run, not
between machines. "CPU seconds" are the least of the repeats' time on a processor, of all threads:
with one thread they can be compared on a busy machine.

What is chosen with --only and --items replaces its own rows in the results, and leaves the others.
"""

import resource
import statistics
import time
from pathlib import Path

import torch

from cells import Row, measure_cells
from contenders import NOT_ON_CPU, ROOM_CPU, contenders
from rows import parser_of, show
from sce.training.device import _resident_mib

SHAPE: Row = {"batch": 128, "length": 200, "dim": 64, "bucket_size_y": 256}
MAX_SECONDS = 20.0  # after which a slow cell is not repeated again


def main() -> None:
    items = [10_000, 100_000, 1_000_000]
    parser = parser_of(__doc__, "loss_cpu", items=items, **SHAPE, repeats=3)
    names = [name for name in contenders(1) if not NOT_ON_CPU.search(name)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LOSS")
    parser.add_argument("--limit-gib", type=float, default=16.0, help="give up beyond this memory")
    options = parser.parse_args()

    def measure(cell: Row) -> Row:
        limit = int(options.limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return measure_cell(cell, options.repeats)

    # Sizes outside, losses inside: what is compared is measured close together in time.
    shape = {name: vars(options)[name] for name in SHAPE}
    cells: list[Row] = [
        shape | {"items": items, "loss": loss} for items in options.items for loss in options.only
    ]
    rows = measure_cells(
        "loss_cpu", cells, measure, packages=["torch"], beside=list(cells[0]), to=options.out
    )
    measured = ["seconds", "CPU seconds", "extra MiB", "forward MiB", "failed"]
    print(show(rows, ["items", "loss", *measured]))


def measure_cell(cell: Row, repeats: int) -> Row:
    """Measure one loss on one catalogue size, in this process."""
    batch, length, dim, size_y = (cell[name] for name in SHAPE)
    loss = contenders(batch * length, size_y=size_y, room=ROOM_CPU)[cell["loss"]]()
    torch.manual_seed(0)
    # A small call first: it starts the thread pool and loads what is loaded lazily.
    small = (torch.randn(2, 40, dim), torch.randn(500, dim), torch.randint(500, (2, 40)))
    first = contenders(80, size_y=16, k=16)[cell["loss"]]()
    first(small[0].requires_grad_(), *small[1:]).backward()
    states = torch.randn(batch, length, dim).requires_grad_()
    catalogue = torch.randn(cell["items"], dim).requires_grad_()
    targets = torch.randint(cell["items"], (batch, length))
    gradients = (states.numel() + catalogue.numel()) * 4 / 2**20

    before, _ = _resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    value = loss(states, catalogue, targets)
    forward = _resident_mib()[1] - before
    torch.autograd.grad(value, (states, catalogue))
    extra = _resident_mib()[1] - before - gradients
    del value

    seconds: list[float] = []
    on_cpu: list[float] = []
    while len(seconds) < repeats and sum(seconds) < MAX_SECONDS:
        start, start_on_cpu = time.perf_counter(), time.process_time()
        torch.autograd.grad(loss(states, catalogue, targets), (states, catalogue))
        seconds.append(time.perf_counter() - start)
        on_cpu.append(time.process_time() - start_on_cpu)
    return {
        "seconds": round(statistics.median(seconds), 4),
        "CPU seconds": round(min(on_cpu), 4),
        "extra MiB": round(extra, 1),
        "forward MiB": round(forward, 1),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
