"""The state of a training run in one file: weights, optimizer, progress. No code is executed by it.

One file, because then one rename puts all of it in place: after a crash at any instant there is the
state before or the state after, never half of each. The tensors lie in the safetensors format, the
progress as JSON in its header.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sce.data.storage import atomic_file, new_digest
from sce.errors import InputError

FORMAT = "sce training state"
VERSION = 1

MODEL, _LOSS = "model.", "loss."  # before the names of tensors
_PROGRESS = "progress"
_SCALARS = "optimizer_scalars"
_DIGEST = "blake2b"
_BUCKETS = ("picked_once", "placed", "correct_in_bucket")


@dataclass
class EpochSoFar:
    """The epoch under way, up to some step. Sums are Python floats: JSON keeps them to the bit."""

    step: int = 0  # steps done
    loss_sum: float = 0.0  # of each batch's loss times its targets
    targets: int = 0
    bucket_sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    bucket_samples: int = 0
    seconds: float = 0.0
    memory_mib: float = 0.0

    @classmethod
    def whole(cls, record: Mapping[str, Any]) -> "EpochSoFar":
        """All steps of an epoch done, as its record has it."""
        buckets = record["buckets"]
        return cls(
            step=record["steps"],
            loss_sum=record["loss"] * record["targets"],
            targets=record["targets"],
            bucket_sums=list((buckets or dict.fromkeys(_BUCKETS, 0.0)).values()),
            bucket_samples=1 if buckets else 0,
            seconds=record["seconds"]["training"],
            memory_mib=record["memory_mib"]["training"],
        )

    def summary(self) -> dict[str, Any]:
        """The mean loss over the targets, and the mean statistics of the buckets, if any."""
        buckets = None
        if self.bucket_samples:
            means = (total / self.bucket_samples for total in self.bucket_sums)
            buckets = dict(zip(_BUCKETS, means, strict=True))
        return {"loss": self.loss_sum / max(1, self.targets), "buckets": buckets}


@dataclass
class Progress:
    """How far training has come, apart from the tensors."""

    history: list[dict[str, Any]] = field(default_factory=list)  # a record for each finished epoch
    current: EpochSoFar = field(default_factory=EpochSoFar)
    best_epoch: int = 0  # 0: none yet
    best_score: float = -1.0
    stale: int = 0  # evaluations since the best
    stopped: str | None = None  # why training ended, once it has

    @property
    def epoch(self) -> int:
        """How many epochs are finished."""
        return len(self.history)

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        """The opposite of `to_json`."""
        fields = json.loads(text)
        return cls(**(fields | {"current": EpochSoFar(**fields["current"])}))


@dataclass(frozen=True, eq=False)
class Trained:
    """What training changes: the model, perhaps parameters of the loss, and the optimizer."""

    model: nn.Module
    loss: nn.Module | None
    optimizer: torch.optim.Optimizer

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Everything that the optimizer moves, by name."""
        named = {f"{MODEL}{name}": p for name, p in self.model.named_parameters()}
        if self.loss is not None:
            named |= {f"{_LOSS}{name}": p for name, p in self.loss.named_parameters()}
        return named

    def weights(self) -> dict[str, Tensor]:
        """The state of the model and of the loss, by name."""
        found = {f"{MODEL}{name}": value for name, value in self.model.state_dict().items()}
        if self.loss is not None:
            found |= {f"{_LOSS}{name}": value for name, value in self.loss.state_dict().items()}
        return found

    def restore_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Put model and loss back as `weights` gave them."""
        self.model.load_state_dict(with_prefix(tensors, MODEL))
        if self.loss is not None:
            self.loss.load_state_dict(with_prefix(tensors, _LOSS))

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the optimizer's state that is not tensors."""
        found = self.weights()
        scalars = {}
        for name, parameter in self.named_parameters().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{key}.{name}"] = value
                else:
                    scalars[f"{key}.{name}"] = value
        return found, scalars

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Put everything back as `tensors` gave it."""
        self.restore_weights(tensors)
        parameters = self.named_parameters()
        for full, value in [*with_prefix(tensors, "optimizer.").items(), *scalars.items()]:
            key, _, name = full.partition(".")
            parameter = parameters[name]
            if isinstance(value, Tensor):
                # The count of steps may live on another device than the weights: Adam's fused form
                # keeps it on the GPU, the plain form on the host.
                fused = bool(self.optimizer.param_groups[0].get("fused"))
                at_home = value.dim() > 0 or fused
                value = value.to(parameter.device if at_home else "cpu", copy=True)
            self.optimizer.state[parameter][key] = value

    def finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(p.detach().isfinite().all()) for p in self.named_parameters().values())


def save_state(
    path: Path, trained: Trained, progress: Progress, best: Mapping[str, Tensor] | None
) -> None:
    """Write everything that training goes on from, in one step.

    Args:
        path: The file.
        trained: The model, loss and optimizer.
        progress: How far they have come.
        best: What `Trained.weights` gave at the best epoch, if that is not the last one.
    """
    tensors, scalars = trained.tensors()
    tensors |= {f"best.{name}": value for name, value in (best or {}).items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        _PROGRESS: progress.to_json(),
        _SCALARS: json.dumps(scalars),
    }
    write_tensors(path, tensors, metadata)


def load_state(path: Path, trained: Trained) -> tuple[Progress, dict[str, Tensor] | None]:
    """Read what `save_state` wrote into a model, loss and optimizer of the same shapes.

    Returns:
        The progress, and `best` as it was given.

    Raises:
        InputError: When the file is not such a state, or one of another model.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
        raise InputError(f"{path} is no training state that this sce can read; start anew: --force")
    try:
        trained.restore(tensors, json.loads(metadata[_SCALARS]))
    except (RuntimeError, KeyError) as error:
        raise InputError(f"{path} is the state of another model: {error}") from error
    return Progress.from_json(metadata[_PROGRESS]), with_prefix(tensors, "best.") or None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with a checksum of all that is in it, whole or not at all.

    Raises:
        InputError: When it cannot be written; what was there before is still there.
    """
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # Tied weights: the format holds each tensor by itself.
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    with atomic_file(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # which the library would make private
        try:
            save_file(separate, partial, metadata | {_DIGEST: _digest(separate, metadata)})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        _sort_metadata(partial)
        partial.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Lay the metadata out by name: the library's order is chance, and equal runs give equal files.

    Its tensors are in order already.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # else the library wrote it more briefly: leave it
            file.seek(8)
            file.write(text.ljust(size))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote: the tensors, on the host, and the metadata.

    Raises:
        InputError: When the file is missing or not as it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            metadata: dict[str, str] = file.metadata() or {}
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is half-written or altered: {error}") from error
    written = metadata.pop(_DIGEST, None)
    if written != _digest(tensors, metadata):
        what = "it has no checksum" if written is None else "its checksum does not fit"
        raise InputError(f"{path} is half-written or altered: {what}")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A checksum of everything that a file holds, however the format lays it out."""
    digest = new_digest(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
