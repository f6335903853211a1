"""What a run has come to, to be compared with another to the bit; and a signal that ends it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sce.data.storage import read_json
from sce.distributed.checkpoint import LATEST, read_whole
from sce.training.checkpoint import read_tensors
from sce.training.run import Run

_VARYING = ("seconds", "memory_mib", "tokens_per_second", "memory_measured")


def stop_at(epoch: int) -> Callable[[dict[str, Any]], None]:
    """Send a signal when so many epochs are done."""

    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == epoch:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


def read_state(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint, every byte as it was written; with shards, the files of their rows."""
    if file.name != LATEST:
        return read_tensors(file)
    _, tensors, metadata = read_whole(file.parent)
    state = file.parent / read_json(file)["state"]
    for part in state.glob("table-*.safetensors"):
        content = bytearray(part.read_bytes())
        tensors[f"{state.name}/{part.name}"] = torch.frombuffer(content, dtype=torch.uint8)
    return tensors, metadata


def outcome(out: Path) -> dict[str, Any]:
    """Everything that came out, but for times, memory, and what the run was told."""
    run = Run.open(out)
    result = run.result()
    assert result is not None
    best, about = read_tensors(run.best_weights)
    state, metadata = read_state(run.resume_state)
    return {
        "result": {key: value for key, value in result.items() if key not in _VARYING},
        "epochs": [
            {key: value for key, value in record.items() if key not in _VARYING}
            for record in run.metrics()
        ],
        "best": {name: tensor.tolist() for name, tensor in best.items()},
        "best_epoch": about["epoch"],
        "state": {name: tensor.tolist() for name, tensor in state.items()},
        "best_score": metadata["progress"]["best_score"],
        "ranks": [file.read_bytes() for file in sorted(out.glob("*_ranks.npy"))],
    }
