"""How much memory and time a run will take: as runs like it did, or as `sce plan` says."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from sce.errors import InputError
from sce.experiments.plan import SEED, PlannedRun
from sce.experiments.rows import FINISHED, Row
from sce.planning import Job, LossName, predict
from sce.planning.coefficients import H200
from sce.planning.formula import ROW_WISE
from sce.planning.job import sizes_of

_MIB = 2**20
# What a process takes beside its tensors: of a GPU its context, elsewhere Python and libraries,
# which then have no workspaces of a GPU.
_CONTEXT_MIB, _LIBRARIES_MIB = 600.0, 350.0
_NO_WORKSPACE = replace(H200, workspace=0.0)


class Forecast:
    """Learns from the rows of runs that ended."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._peaks: dict[str, float] = {}  # by settings without the seed
        self._seconds: dict[tuple[str, ...], list[float]] = {}  # by what runs have in common
        for row in rows:
            self.learn(row)

    def learn(self, row: Row) -> None:
        """Take note of a row."""
        if row["status"] != FINISHED:
            return
        peaks = [value for value in (row.get("memory_mib") or {}).values() if value is not None]
        data, settings = row["dataset"]["content_hash"], row["settings"]
        if peaks:
            alike = _alike(row["measure"], data, settings)
            # Resident memory is that of the whole process already.
            whole = "resident" in str(row.get("memory_measured"))
            needed = max(peaks) + (0.0 if whole else _CONTEXT_MIB)
            self._peaks[alike] = max(self._peaks.get(alike, 0.0), needed)
        if row.get("wall_seconds"):
            for group in _groups(row["measure"], data, settings["loss.name"]):
                self._seconds.setdefault(group, []).append(row["wall_seconds"])

    def mib(self, run: PlannedRun) -> float:
        """The memory of a run's process: as with another seed, or as predicted."""
        known = self._peaks.get(_alike(run.measure, run.dataset.content_hash, run.settings))
        return predicted_mib(run) if known is None else known

    def seconds(self, run: PlannedRun) -> float | None:
        """How long a run's process lasts: as those most like it did; None without any."""
        name = run.config.loss.name
        for group in _groups(run.measure, run.dataset.content_hash, name):
            if group in self._seconds:
                return sum(self._seconds[group]) / len(self._seconds[group])
        return None


@cache
def predicted_mib(run: PlannedRun) -> float:
    """The peak of a run's process, as `sce plan` predicts that of training.

    Nothing, for a run that cannot be: it is tried, and says why.
    """
    model, loss, training = run.config.model, run.config.loss, run.config.training
    train = run.dataset.prepared.train
    job = Job(
        run.dataset.n_items,
        batch=training.batch_size,
        **sizes_of(train.lengths, model.max_length),
        dim=model.dim,
        blocks=model.blocks,
        heads=model.heads,
        precision=training.precision,
        events=len(train.items),
        users=len(train),
    )
    known = {
        name: getattr(loss, name)
        for name in (
            *("bucket_size_y", "n_buckets", "bucket_size_x", "alpha", "beta"),
            *("n_negatives", "chunk_size"),
        )
        if getattr(loss, name) is not None
    }
    name: LossName = "ce chunked" if loss.chunk_size is not None else loss.name
    if training.row_wise:
        name = ROW_WISE
    try:
        job = replace(job, **known)
    except InputError:
        return 0.0
    if _on_gpu(training.device):
        return predict(job, name).total / _MIB + _CONTEXT_MIB
    return predict(job, name, _NO_WORKSPACE).total / _MIB + _LIBRARIES_MIB


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _alike(measure: str, content_hash: str, settings: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in settings.items() if name != SEED}
    return f"{measure} {content_hash} " + json.dumps(rest, sort_keys=True)


def _groups(measure: str, content_hash: str, loss: str) -> tuple[tuple[str, ...], ...]:
    """What tells how long a run lasts, the closest first."""
    return (measure, content_hash, loss), (measure, content_hash), (measure,)
