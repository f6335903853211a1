"""From what a run wrote to its row."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sce.experiments.failures import Failure
from sce.experiments.plan import SEED, PlannedRun
from sce.experiments.rows import FAILED, FINISHED, Row

_RESULT = (
    *("best_epoch", "epochs", "stopped", "validation", "test", "popularity"),
    *("seconds", "memory_mib", "memory_measured", "components_mib"),
    *("tokens_per_second", "device"),
)
_BUCKETS = ("picked_once", "placed", "correct_in_bucket")


def finished_row(
    run: PlannedRun, directory: Path, *, at_once: int | None, wall: float | None
) -> Row:
    """The row of a run that has ended, from what it wrote.

    Args:
        run: As planned.
        directory: What it wrote.
        at_once: How many ran beside it, itself included, at most; None when that is not known.
        wall: Seconds from start to end of its processes, all together; likewise.
    """
    result = json.loads((directory / "result.json").read_bytes())
    epochs = _read_lines(directory / "metrics.jsonl")
    row = _row(run, FINISHED, at_once, wall)
    row |= {name: result[name] for name in _RESULT if name in result}
    if wall is not None:
        # Of legs that nobody timed, the run itself knows at least what it did.
        known = sum(value for value in (result.get("seconds") or {}).values() if value)
        row["wall_seconds"] = round(max(wall, known), 1)
    row["derived"] = _read_object(directory / "run.json").get("derived", {})
    row["buckets"] = _buckets_at(epochs, result.get("best_epoch"))
    row["history"] = _history(epochs)
    return row


def failed_row(
    run: PlannedRun, failure: Failure, *, at_once: int | None, wall: float | None
) -> Row:
    """The row of a run that came to nothing."""
    row = _row(run, FAILED, at_once, wall)
    return row | {"failure": {"kind": failure.kind, "message": failure.message}}


def _row(run: PlannedRun, status: str, at_once: int | None, wall: float | None) -> Row:
    settings = run.settings
    return {
        "key": run.key,
        "run": f"runs/{run.name}",
        "status": status,
        "measure": run.measure,
        "steps": run.steps or None,
        "dataset": {
            "name": run.dataset.name,
            "content_hash": run.dataset.content_hash,
            "n_items": run.dataset.n_items,
        },
        "seed": settings[SEED],
        "settings": dict(settings),
        "at_once": at_once,
        "wall_seconds": None if wall is None else round(wall, 1),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Of what the numbers depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("scalable-cross-entropy", "torch", "triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _buckets_at(epochs: Sequence[Mapping[str, Any]], best: int | None) -> dict[str, float] | None:
    found = next((epoch for epoch in epochs if epoch.get("epoch") == best), None)
    buckets: dict[str, float] | None = (found or {}).get("buckets")
    return buckets


def _history(epochs: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The course of training, column by column, in the digits that a figure can show."""
    columns: dict[str, list[float | None]] = {
        "loss": [epoch.get("loss") for epoch in epochs],
        "validation.ndcg@10": [(epoch.get("validation") or {}).get("ndcg@10") for epoch in epochs],
    }
    for name in _BUCKETS:
        columns[name] = [(epoch.get("buckets") or {}).get(name) for epoch in epochs]
    return {
        name: [None if value is None else float(f"{value:.5g}") for value in values]
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _read_object(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return found
