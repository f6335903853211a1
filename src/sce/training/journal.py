"""The records of the epochs: a line of JSON each, and TensorBoard when asked for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sce.data.storage import write_text
from sce.errors import InputError
from sce.training.run import Run


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Journal:
    """Writes a record as soon as its epoch is finished."""

    def __init__(self, run: Run, history: Sequence[Mapping[str, Any]], tensorboard: bool) -> None:
        """Begin with the records of the epochs so far, whatever the file holds.

        After a crash the file may be ahead of the state that training goes on from.
        """
        self._metrics = run.metrics_file
        self._writer = None
        if tensorboard:
            self._writer = _open_tensorboard(run.path / "tensorboard", len(history))
        write_text(self._metrics, "".join(_line(record) for record in history))

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the record of an epoch."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        if self._writer is not None:
            for name, value in _scalars(record).items():
                self._writer.add_scalar(name, value, record["epoch"])
            self._writer.flush()

    def close(self) -> None:
        """Close what is open."""
        if self._writer is not None:
            self._writer.close()


def check_tensorboard() -> None:
    """Refuse early when TensorBoard's writer is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(
            "TensorBoard is not installed; "
            "install it with: pip install 'scalable-cross-entropy[tensorboard]'"
        ) from error


def _open_tensorboard(directory: Path, epochs: int) -> _Writer:
    check_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    writer: _Writer = SummaryWriter(str(directory), purge_step=epochs + 1)
    return writer


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    found = {"loss": record["loss"], "tokens_per_second": record["tokens_per_second"]}
    for group in ("validation", "buckets", "seconds", "memory_mib"):
        for name, value in (record[group] or {}).items():
            if value is not None:
                found[f"{group}/{name}"] = value
    return found


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
