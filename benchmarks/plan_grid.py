"""Is the memory that `sce plan` predicts the memory that training takes?

    python benchmarks/plan_grid.py                          # on a GPU: measure, compare, keep rows
    python benchmarks/plan_grid.py --rows FILE.jsonl        # compare rows measured before
    python benchmarks/plan_grid.py --device cpu             # count instead of measuring

Each cell trains a few steps as `sce train` does (bucket statistics, warm-up, recording and replay
of the CUDA graph) and notes the peak of allocated memory; then one more step is taken apart,
for the peaks of its moments. Cells share a process: nothing of one is left when the next
begins, which each row says ("left MiB").

On a CPU the bytes of live tensors are counted as a GPU would have them (live_bytes.py), without the
workspace of libraries.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cells import Row
from live_bytes import LiveBytes, gpu_like
from plan_cells import grid, job_of, lengths_of
from rows import keep, parser_of, provenance, show
from sce.data.batches import DeviceSequences
from sce.data.prepared import Sequences
from sce.experiments.step_memory import MemoryMeter
from sce.losses import ScalableCrossEntropy
from sce.models.base import Backbone
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning import PLANNED, ROW_WISE, Job, predict
from sce.training.device import matmul_precision, spare_workspace
from sce.training.settings import TrainingSettings
from sce.training.step import TrainingStep, seeds_of_epoch
from sce.units import parse_size
from train_step import make_step

MIB = 2**20


def main() -> None:
    parser = parser_of(__doc__, "plan_grid")
    parser.add_argument("--losses", nargs="+", choices=PLANNED, default=list(PLANNED))
    parser.add_argument("--backbone", choices=BACKBONES, default=DEFAULT_BACKBONE)
    parser.add_argument("--cells", type=int, nargs=2, default=(9, 6), metavar=("FIT", "HELD-OUT"))
    parser.add_argument("--at-most", default=None, help="leave out what takes more; default: 40GB")
    parser.add_argument("--rows", type=Path, default=None, help="measured before")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.rows is not None:
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    else:
        where = provenance("torch")
        rows = []
        for row in measure_grid(options):
            rows.append(row | where)
            path = keep("plan_grid", rows, to=options.out)
        print(f"{len(rows)} rows in {path}")
    measured = [row for row in rows if "peak MiB" in row]
    print(f"\n{error_table(measured)}")


def error_table(rows: Sequence[Row]) -> str:
    """Compare predicted and measured peaks, by part of the grid and loss."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        error = predict(job_of(row), row["loss"]).total / MIB / row["peak MiB"] - 1
        for loss in (row["loss"], "all"):
            errors.setdefault((row["part"], loss), []).append(error)
    table = [
        {
            "part": part,
            "loss": loss,
            "cells": len(found),
            "mean error %": 100 * mean(map(abs, found)),
            "lowest %": 100 * min(found),
            "highest %": 100 * max(found),
        }
        for part in ("fit", "held out")
        for loss in (*PLANNED, "all")
        if (found := errors.get((part, loss)))
    ]
    return show(table, list(table[0]) if table else [])


# --- measuring


def measure_grid(options: argparse.Namespace) -> Iterator[Row]:
    """Measure cell after cell; one that fails is a row that says how."""
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("plan_grid: there is no CUDA device here; --device cpu counts bytes instead")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    at_most = parse_size(options.at_most or ("40GB" if options.device == "cuda" else "500MB"))
    cells = grid(options.losses, options.cells, at_most)
    if options.backbone != DEFAULT_BACKBONE:
        cells = [cell | {"backbone": options.backbone} for cell in cells]
    begun = time.perf_counter()
    for number, cell in enumerate(cells, start=1):
        try:
            with spare_workspace(device):
                found = measure_cell(cell, device)
        except (RuntimeError, ValueError) as error:
            found = {"failed": " ".join(str(error).split())[:200]}
        found["left MiB"] = _clean(device)
        yield cell | found
        seconds = f"{time.perf_counter() - begun:.0f} s"
        shown = show([cell | found], ["loss", "items", "peak MiB", "predicted MiB", "failed"])
        print(f"[{number}/{len(cells)}] {seconds}", shown.splitlines()[-1], file=sys.stderr)


def _clean(device: torch.device) -> float:
    """Free everything, and say how many MiB are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return round(torch.cuda.memory_allocated() / MIB, 3)


def measure_cell(cell: Row, device: torch.device) -> Row:
    """Train as `sce train` does; return the peak, and the peaks of the moments of one step."""
    job = job_of(cell)
    lengths = lengths_of(cell) + 1
    generator = np.random.default_rng(0)
    events = generator.integers(job.items, size=int(lengths.sum()), dtype=np.int32)
    with ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(gpu_like())
        stack.enter_context(matmul_precision(device, job.precision))
        with torch.device(device):
            model = job.backbone.build(job.items).train()
        offsets = np.concatenate([[0], lengths.cumsum()])
        users = np.arange(len(lengths), dtype=np.int32)
        made = Sequences(events, offsets, users, times=events)
        sequences = DeviceSequences.place(made, device, times=model.uses_times)
        step = _step(cell, job, model, sequences)
        meter = MemoryMeter(device)
        if device.type == "cpu":
            counter = LiveBytes([*model.parameters()], [sequences.items, sequences.offsets])
            meter = stack.enter_context(counter)
        meter.forget_peak()
        rows = torch.arange(job.batch)
        rows = rows.pin_memory() if device.type == "cuda" else rows
        # As an epoch goes: statistics first; then warm-up, recording, replay.
        for number, seeds in enumerate(seeds_of_epoch(0, 1, 6 if step.captured else 3)[1]):
            step(rows, seeds, with_statistics=number == 0)
        peak = meter.peak()
        found: Row = {
            "peak MiB": round(peak / MIB, 2),
            "predicted MiB": round(predict(job, cell["loss"]).total / MIB, 2),
            "captured": step.captured,
        }
        # On the stream of the other steps: on another, libraries would need another workspace.
        return found | {"moments": step.on_capture_stream(lambda: moments(step, rows, meter))}


def _step(cell: Row, job: Job, model: Backbone, sequences: DeviceSequences) -> TrainingStep:
    loss: Any = job.build_loss(cell["loss"])
    on_gpu, row_wise = sequences.items.is_cuda, cell["loss"] == ROW_WISE
    captured = on_gpu and loss.is_capturable(model.catalogue)
    if isinstance(loss, ScalableCrossEntropy):
        loss.centres = "mix"
        loss.backend = "auto" if on_gpu else "triton"
    settings = TrainingSettings(batch_size=job.batch, precision=job.precision, row_wise=row_wise)
    step = make_step(model, loss.to(sequences.items.device), sequences, settings, captured=captured)
    for group in step.optimizer.param_groups:
        group["fused"] = True  # as on a GPU
    return step


def moments(step: TrainingStep, rows: Tensor, meter: MemoryMeter) -> dict[str, int]:
    """Take one step as it is, and note the bytes beyond those between steps at each moment."""
    model: Any = step.model
    step.optimizer.zero_grad(set_to_none=True)
    batch = step.batch(rows)
    between = meter.now()
    found = {"between": between}

    def mark(name: str) -> None:
        found[name] = meter.peak() - between
        meter.forget_peak()

    # When the gradient of the states is there, the loss has done its part; when that of the first
    # block's input is, all blocks have.
    hook = model.blocks[0].register_forward_pre_hook(
        lambda _, inputs: inputs[0].register_hook(lambda _: mark("model backward")) and None
    )
    meter.forget_peak()
    with torch.autocast(step.device.type, torch.bfloat16, enabled=step.autocast):
        targets, given = step.draw(batch)
        states = model(batch.histories, **given)
        found["activations"] = meter.now() - between
        states.register_hook(lambda _: mark("loss backward"))
        meter.forget_peak()
        options = {} if step.generator is None else {"generator": step.generator}
        loss = step.loss(states, model.catalogue, targets, **options)
        del states
    mark("forward")
    loss.backward()
    mark("embedding")
    hook.remove()
    step.optimizer.step()
    mark("update")
    return found


if __name__ == "__main__":
    main()
