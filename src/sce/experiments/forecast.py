"""How much memory and time a run will take: as runs like it did, or as `sce plan` says."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from sce.experiments.plan import SEED, PlannedRun
from sce.experiments.rows import FINISHED, Row
from sce.planning import Job, LossName, predict

_MIB = 2**20
# What a process takes of a GPU beside its tensors: its context.
_PROCESS_MIB = 600.0


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
            needed = max(peaks) + (0.0 if whole else _PROCESS_MIB)
            self._peaks[alike] = max(self._peaks.get(alike, 0.0), needed)
        if row.get("wall_seconds"):
            for group in _groups(row["measure"], data, settings["loss.name"]):
                self._seconds.setdefault(group, []).append(row["wall_seconds"])

    def mib(self, run: PlannedRun) -> float:
        """The memory of a run's process: as with another seed, or as predicted."""
        known = self._peaks.get(_alike(run.measure, run.dataset.content_hash, run.settings))
        return predicted_mib(run) + _PROCESS_MIB if known is None else known

    def seconds(self, run: PlannedRun) -> float | None:
        """How long a run's process lasts: as those most like it did; None without any."""
        name = run.config.loss.name
        for group in _groups(run.measure, run.dataset.content_hash, name):
            if group in self._seconds:
                return sum(self._seconds[group]) / len(self._seconds[group])
        return None


@cache
def predicted_mib(run: PlannedRun) -> float:
    """The peak of training, as `sce plan` predicts it for a GPU."""
    model, loss, training = run.config.model, run.config.loss, run.config.training
    train = run.dataset.prepared.train
    targets = (train.lengths[train.lengths >= 2] - 1).clip(max=model.max_length)
    job = Job(
        run.dataset.n_items,
        batch=training.batch_size,
        length=int(targets.max(initial=1)),
        mean_length=float(targets.mean()) if len(targets) else None,
        dim=model.dim,
        blocks=model.blocks,
        heads=model.heads,
        precision=training.precision,
        events=len(train.items),
        users=len(train),
    )
    known = {
        name: getattr(loss, name)
        for name in ("n_negatives", "bucket_size_y", "alpha", "beta", "chunk_size")
        if getattr(loss, name) is not None
    }
    name: LossName = "ce chunked" if loss.chunk_size is not None else loss.name
    if training.row_wise:
        name = "sce row-wise"
    return predict(replace(job, **known), name).total / _MIB


def _alike(measure: str, content_hash: str, settings: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in settings.items() if name != SEED}
    return f"{measure} {content_hash} " + json.dumps(rest, sort_keys=True)


def _groups(measure: str, content_hash: str, loss: str) -> tuple[tuple[str, ...], ...]:
    """What tells how long a run lasts, the closest first."""
    return (measure, content_hash, loss), (measure, content_hash), (measure,)
