"""How fast is a training step, and an evaluation, beside loops in the authors' style?

    python benchmarks/train_step.py --items 100000 1000000 10000000
    python benchmarks/train_step.py --device cpu --items 1000 --batch 8 --length 20 --steps 5

Training: "sce train" is the step as `fit` makes it, batches and all. "authors' style" is the
straightforward loop for the same model and loss: nn.MultiheadAttention on left-padded histories,
Scalable Cross-Entropy as whole-tensor code, dense Adam, one `.item()` a step; it is given its
batches ready-made on the device. Every history is full, so that nobody gains by trimming. The parts
are measured in a second pass, each waited for: they add up to more than the step. From 10 M items
on, "sce train" updates the touched rows of the catalogue alone (`--training.row-wise`: row-wise
Adagrad, which is not the same as dense Adam); each row says which update it had.

Evaluation: "sce evaluate" for all users, and one user at a time for some, its seconds scaled to
all. Each cell runs in a process of its own.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from authors_style import MultiheadSASRec, evaluate_one_by_one
from cells import Row, measure_cells
from contenders import Loss, tensor_sce
from rows import parser_of, show
from sce.data.batches import DeviceSequences, training_batch
from sce.data.prepared import Sequences
from sce.evaluation.evaluate import evaluate
from sce.losses import ScalableCrossEntropy, suggest_sizes
from sce.models.base import Backbone
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.checkpoint import EpochSoFar
from sce.training.device import PeakMemory
from sce.training.optimizer import make_optimizer
from sce.training.settings import TrainingSettings
from sce.training.step import TrainingStep, seeds_of_epoch
from sce.training.trainer import LossMonitor

LOOPS = ["sce train", "authors' style"]
WARM_UP = 10
LARGE = 10_000_000  # items of which a few steps are enough: each is long


class TestUsers(NamedTuple):
    """What evaluation needs of a dataset."""

    test: Sequences
    n_items: int


def main() -> None:
    items = {"items": [100_000, 1_000_000, LARGE], "evaluation_items": 100_000}
    sizes = {"batch": 128, "length": 200, "dim": 64, "bucket_size_y": 256}
    parser = parser_of(__doc__, "train_step", **items, **sizes)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--steps", type=int, default=100, help="a fifth from 10 M items on")
    parser.add_argument(
        "--row-wise-from", type=int, default=LARGE, help="items from which updates are row-wise"
    )
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--capture", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--profile", action="store_true", help="print the longest kernels (GPU)")
    parser.add_argument("--users", type=int, default=20_000, help="evaluated; 0: none are")
    parser.add_argument("--single-users", type=int, default=200, help="timed one by one")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    # Counts devices without making a CUDA context, which could not be carried into a fork.
    if options.device == "cuda" and torch.cuda.device_count() == 0:
        sys.exit("train_step: there is no CUDA device here; --device cpu measures on the CPU")
    if options.capture is None:
        options.capture = options.device == "cuda"
    if options.precision is None:
        options.precision = "bf16" if options.device == "cuda" else "float32"

    shape = {"batch": options.batch, "length": options.length, "dim": options.dim}
    cells: list[Row] = [
        shape | {"items": items, "loop": loop} for items in options.items for loop in options.loops
    ]
    last = shape | {"items": options.evaluation_items, "loop": "evaluation"}
    found = measure_cells(
        "train_step",
        [*cells, last] if options.users else cells,
        lambda cell: (measure_evaluation if cell == last else measure_loop)(cell, options),
        packages=["torch", "triton"],
        beside=[*last],
        to=options.out,
    )
    rows, evaluations = found[: len(cells)], found[len(cells) :]
    parts = ["backbone ms", "loss ms", "optimizer ms"]
    print(show(rows, ["items", "loop", "update", "tokens/s", "ms", *parts, "peak MiB", "failed"]))
    for items in options.items:
        measured = [row for row in rows if row["items"] == items and "tokens/s" in row]
        pair = {row["loop"]: row["tokens/s"] for row in measured}
        if len(pair) == len(LOOPS):
            print(f"{items:,} items: {pair[LOOPS[0]] / pair[LOOPS[1]]:.2f} times the tokens/s")
    if evaluations:
        columns = ["items", "users", "seconds", "seconds one by one", "times faster", "failed"]
        print("\n" + show(evaluations, columns))


# --- training


def measure_loop(cell: Row, options: argparse.Namespace) -> Row:
    """Measure one loop on one catalogue size, in this process."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    ours = cell["loop"] == LOOPS[0]
    row_wise = ours and cell["items"] >= options.row_wise_from
    steps = options.steps if cell["items"] < LARGE else max(1, options.steps // 5)
    make = our_loop if ours else authors_loop
    loop, parts = make(cell["items"], device, options)
    memory = PeakMemory(device)
    with memory.phase():
        loop(WARM_UP)
        _wait(device)
        begun = time.perf_counter()
        loop(steps)
        _wait(device)
    seconds = (time.perf_counter() - begun) / steps
    if options.profile and device.type == "cuda":
        print_profile(f"{cell['items']:,} items, {cell['loop']}", loop)
    found: Row = {
        "tokens/s": round(options.batch * options.length / seconds),
        "ms": round(1000 * seconds, 3),
        "peak MiB": round(memory.peak()),
        "memory": memory.measures,
        "steps": steps,
        "update": "row-wise Adagrad" if row_wise else "Adam",
        "precision": options.precision if ours else "float32",
        "compiled": options.compile and ours,
        "captured": options.capture and ours,
    }
    return found | {f"{name} ms": value for name, value in parts().items()}


def print_profile(title: str, loop: Callable[[int], None], steps: int = 10, most: int = 25) -> None:
    """Print which kernels keep the GPU busy in a step, and how long."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        loop(steps)
        torch.cuda.synchronize()
    kernels = [event for event in watched.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / steps
    count = sum(event.count for event in kernels) / steps
    print(f"\n{title}: GPU busy {busy / 1000:.2f} ms of a step, in {count:.0f} kernels")
    for event in kernels[:most]:
        times = event.count / steps
        print(f"{event.self_device_time_total / steps:9.0f} us {times:6.1f} x {event.key[:90]}")


Loop = tuple[Callable[[int], None], Callable[[], dict[str, float]]]


def our_loop(items: int, device: torch.device, options: argparse.Namespace) -> Loop:
    """Return the loop as `fit` runs it, and what tells where its time goes."""
    generator = np.random.default_rng(0)
    users = 8 * options.batch
    sequences = DeviceSequences.place(
        _sequences(generator, users, options.length + 1, items), device
    )
    row_wise = items >= options.row_wise_from
    settings = SASRecSettings(dim=options.dim, max_length=options.length)
    with device:  # gigabytes are drawn where they are used
        model = SASRec(items, settings).train()
    loss = ScalableCrossEntropy(
        n_buckets=suggest_sizes(options.batch, options.length)[0],
        bucket_size_y=min(items, options.bucket_size_y),
        sparse_grad=row_wise,
    )
    chosen = TrainingSettings(
        batch_size=options.batch,
        precision=options.precision,
        compile=options.compile,
        row_wise=row_wise,
    )
    step = make_step(model, loss, sequences, chosen, captured=options.capture)

    def loop(steps: int) -> None:
        seeds = seeds_of_epoch(0, 1, steps)[1]
        order = torch.from_numpy(generator.integers(users, size=steps * options.batch))
        order = order.pin_memory() if device.type == "cuda" else order
        watch = LossMonitor(EpochSoFar(), epoch=1, device=device)
        for number, rows in enumerate(order.split(options.batch)):
            watch.add(step(rows, seeds[number]), number + 1, rows, len(rows) * options.length)
            if watch.full:
                watch.check()
        watch.check()

    def parts() -> dict[str, float]:
        batch = training_batch(sequences, torch.arange(options.batch), max_length=options.length)

        def forward() -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
                compiled = model if step.compiled_model is None else step.compiled_model
                states: Tensor = compiled(batch.histories)
            return states

        def of_states(states: Tensor) -> Tensor:
            found: Tensor = loss(states, model.catalogue, batch.targets)
            return found

        return _parts(forward, of_states, step.optimizer, device)

    return loop, parts


def make_step(
    model: Backbone,
    loss: Loss,
    sequences: DeviceSequences,
    settings: TrainingSettings,
    *,
    captured: bool,
) -> TrainingStep:
    """Return the step as `fit` makes it, on the device of the sequences."""
    device, table = sequences.items.device, model.catalogue if settings.row_wise else None
    model.sparse_grad = settings.row_wise
    optimizer = make_optimizer(
        model.parameters(), settings, device=device, capturable=captured, row_wise=table
    )
    given = (model, loss, optimizer, sequences, settings)
    return TrainingStep(*given, device=device, max_length=model.max_length, captured=captured)


def authors_loop(items: int, device: torch.device, options: argparse.Namespace) -> Loop:
    """Return the straightforward loop, and what tells where its time goes."""
    with device:
        model = MultiheadSASRec(items, options.dim, options.length).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    n_buckets, size_x = suggest_sizes(options.batch, options.length)
    size_y = min(items, options.bucket_size_y)
    shape = (8, options.batch, options.length + 1)
    events = torch.randint(1, items + 1, shape, device=device)  # 0 is padding

    def of_states(states: Tensor, targets: Tensor) -> Tensor:
        catalogue = model.item_embedding.weight[1:]
        return tensor_sce(
            states, catalogue, targets - 1, n_buckets=n_buckets, size_x=size_x, size_y=size_y
        )

    def loop(steps: int) -> None:
        total = 0.0
        for number in range(steps):
            batch = events[number % len(events)]
            optimizer.zero_grad()
            loss = of_states(model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            optimizer.step()
            total += loss.item()

    def parts() -> dict[str, float]:
        batch = events[0]
        return _parts(
            lambda: model(batch[:, :-1]),
            lambda states: of_states(states, batch[:, 1:]),
            optimizer,
            device,
        )

    return loop, parts


def _parts(
    forward: Callable[[], Tensor],
    of_states: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    repeats: int = 11,
) -> dict[str, float]:
    """Milliseconds of the backbone (forward and backward), the loss (likewise), the optimizer."""
    times: dict[str, list[float]] = {"backbone": [], "loss": [], "optimizer": []}
    for _ in range(repeats):
        optimizer.zero_grad(set_to_none=True)
        marks = [_now(device)]
        states = forward()
        marks.append(_now(device))
        apart = states.detach().requires_grad_()
        of_states(apart).backward()
        marks.append(_now(device))
        states.backward(apart.grad)
        marks.append(_now(device))
        optimizer.step()
        marks.append(_now(device))
        took = [1000 * (after - before) for before, after in pairwise(marks)]
        times["backbone"].append(took[0] + took[2])
        times["loss"].append(took[1])
        times["optimizer"].append(took[3])
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


# --- evaluation


def measure_evaluation(cell: Row, options: argparse.Namespace) -> Row:
    """Measure evaluation of all users at once and of some one by one, in this process."""
    device = torch.device(options.device)
    generator = np.random.default_rng(0)
    users = TestUsers(
        _sequences(generator, options.users, options.length + 1, cell["items"]), cell["items"]
    )
    settings = SASRecSettings(dim=options.dim, max_length=options.length)
    model = SASRec(cell["items"], settings).to(device).eval()
    few = TestUsers(_first(users.test, 512), cell["items"])
    evaluate(model, few, split="test")  # warm up
    _wait(device)
    begun = time.perf_counter()
    ours = evaluate(model, users, split="test")
    _wait(device)
    seconds = time.perf_counter() - begun
    single = _first(users.test, options.single_users)
    evaluate_one_by_one(model, _first(users.test, 20), options.length)
    begun = time.perf_counter()
    theirs = evaluate_one_by_one(model, single, options.length)
    one_by_one = (time.perf_counter() - begun) * options.users / options.single_users
    check = evaluate(model, TestUsers(single, cell["items"]), split="test")
    assert abs(theirs - check["ndcg@10"]) < 1e-6, "the two do not find the same"
    return {
        "users": ours.users,
        "seconds": round(seconds, 2),
        "seconds one by one": round(one_by_one, 1),
        "timed one by one": options.single_users,
        "times faster": round(one_by_one / seconds, 1),
    }


def _sequences(generator: np.random.Generator, count: int, length: int, items: int) -> Sequences:
    drawn = generator.integers(items, size=count * length, dtype=np.int32)
    users = np.arange(count, dtype=np.int32)
    return Sequences(drawn, np.arange(count + 1, dtype=np.int64) * length, users)


def _first(sequences: Sequences, count: int) -> Sequences:
    offsets = sequences.offsets[: count + 1]
    return Sequences(sequences.items[: offsets[-1]], offsets, sequences.users[:count])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _now(device: torch.device) -> float:
    _wait(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
