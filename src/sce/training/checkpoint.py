"""Checkpoints: weights, optimizer and progress in one file, and when to save it.

One file, because then one rename puts all of it in place: after a crash at any instant there is the
state before or the state after, never half of each. The tensors lie in the safetensors format, the
progress as JSON in its header. Reading it executes no code.
"""

import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sce.data.shapes import misfit, parse_json
from sce.data.storage import atomic_file, new_digest, partial_directory
from sce.distributed.table import ShardedTable
from sce.errors import InputError

FORMAT, VERSION = "sce training state", "4"
_METADATA = "sce"  # the one key of a header: the library lays several out by chance
# Saving takes no more than one part in so many of the time: at most that much work is lost.
_SHARE = 20
_CHUNK = 2**22  # numbers looked at together
_NUMBER = int | float
_CURRENT = {
    **dict.fromkeys(("step", "targets", "samples"), int),
    **dict.fromkeys(("loss_sum", "seconds", "memory_mib"), _NUMBER),
    "statistics": {"*": _NUMBER},
}
_PHASES = ("training", "evaluation")
_RECORD = {
    **dict.fromkeys(("epoch", "steps", "targets"), int),
    "seconds": dict.fromkeys(_PHASES, _NUMBER),
    "memory_mib": dict.fromkeys(_PHASES, _NUMBER | None),
}
_PROGRESS = {
    "history": [_RECORD],
    "current": _CURRENT,
    "start?": _RECORD,
    "best_epoch": int,
    "best_score": _NUMBER,
    "stale": int,
    "stopped": str | None,
}
_SHAPE = {"progress": _PROGRESS, "optimizer_scalars": dict}


@dataclass
class EpochSoFar:
    """The epoch under way, up to some step. Sums are Python floats: JSON keeps them to the bit."""

    step: int = 0  # steps done
    loss_sum: float = 0.0  # of each batch's loss times its targets
    targets: int = 0
    statistics: dict[str, float] = field(default_factory=dict)  # sums, by name
    samples: int = 0  # of the statistics
    seconds: float = 0.0
    memory_mib: float = 0.0


@dataclass
class Progress:
    """State of training apart from the tensors."""

    history: list[dict[str, Any]] = field(default_factory=list)  # a record for each finished epoch
    current: EpochSoFar = field(default_factory=EpochSoFar)
    start: dict[str, Any] | None = None  # the record of what training began with: epoch 0
    best_epoch: int = 0  # 0: the start, if there is its record; else none yet
    best_score: float = -1.0
    stale: int = 0  # evaluations since the best
    stopped: str | None = None  # why training ended, once it has

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return len(self.history)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the start, if there is one, and of each finished epoch."""
        return [*([] if self.start is None else [self.start]), *self.history]

    @property
    def has_best(self) -> bool:
        """True if some weights were the best so far."""
        return bool(self.best_epoch) or self.start is not None


@dataclass(frozen=True, eq=False)
class Trained:
    """The model, a loss that is a module, and the optimizer: all that training changes."""

    model: nn.Module
    loss: nn.Module | None
    optimizer: torch.optim.Optimizer
    table: ShardedTable | None = None  # in place of the model's catalogue

    @property
    def modules(self) -> nn.ModuleDict:
        """Model and loss; names of weights begin with "model." or "loss."."""
        parts = {"model": self.model} | ({} if self.loss is None else {"loss": self.loss})
        return nn.ModuleDict(parts)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the optimizer's state that is not tensors."""
        found = self.modules.state_dict()
        scalars = {}
        for name, parameter in self.modules.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{key}.{name}"] = value
                else:
                    scalars[f"{key}.{name}"] = value
        return found, scalars

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Put everything back as `tensors` gave it."""
        weights = {k: v for k, v in tensors.items() if k.startswith(("model.", "loss."))}
        self.modules.load_state_dict(weights)
        if forms(weights) != forms(self.modules.state_dict()):
            raise InputError("its weights are of another type")
        parameters = dict(self.modules.named_parameters())
        state = {**with_prefix(tensors, "optimizer."), **scalars}
        _check_state(self.optimizer, parameters, state)
        for full, value in state.items():
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
        """True if every weight is a finite number."""
        parts = [self.modules] if self.table is None else [self.modules, self.table]
        sound = are_finite(weight for part in parts for weight in part.parameters())
        if self.table is None:
            return sound
        return all(each for (each,) in self.table.ranks.gather_counts(int(sound)))


def forms(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shapes by name, and which are real numbers: torch would turn any type into another."""
    return {n: (t.shape, t.is_floating_point() and t.itemsize > 1) for n, t in tensors.items()}


def _check_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
) -> None:
    """Refuse a state, named KEY.PARAMETER, that the optimizer cannot go on with.

    Row-wise Adagrad has its own from the beginning; Adam makes one at the first step.
    """
    for name in {full.partition(".")[2] for full in state}:
        table = parameters[name]
        adam = {"step": torch.ones(()), "exp_avg": table, "exp_avg_sq": table}
        for key, like in (optimizer.state.get(table) or adam).items():
            given: Any = state.get(f"{key}.{name}")
            kinds = (torch.float32, torch.float64) if key == "step" else (like.dtype,)
            shape = given.shape if isinstance(given, Tensor) else None
            if shape != like.shape or given.dtype not in kinds:
                raise InputError(
                    f"the optimizer's {key} of {name} is missing, or of another shape or type"
                )


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """True if all numbers are finite; looked at in chunks, to take no memory."""
    flat = (tensor.detach().reshape(-1) for tensor in tensors)
    return all(bool(chunk.isfinite().all()) for each in flat for chunk in each.split(_CHUNK))


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    streamed: tuple[str, torch.dtype, list[int], Iterable[Tensor]] | None = None,
) -> None:
    """Write a safetensors file with a checksum of all that is in it, whole or not at all.

    `streamed` is a tensor that is given by rows: its name, type, shape, and the rows.
    """
    kinds = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    parts: dict[str, Iterable[Tensor]] = {name: [tensor] for name, tensor in tensors.items()}
    if streamed is not None:
        added, dtype, shape, parts[added] = streamed
        kinds[added] = dtype, shape
    header: dict[str, Any] = {}
    end = 0
    # The widest numbers first: a tensor must lie at a multiple of their width.
    for name in sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name)):
        dtype, shape = kinds[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        empty = {name: torch.empty(0, dtype=dtype, device="cpu")}
        alike = json.loads(save(empty)[8:])[name]  # of a file without data: names the type
        header[name] = alike | {"shape": shape, "data_offsets": [begin, end]}
    digest = new_digest(json.dumps(metadata, sort_keys=True).encode())

    def head(checksum: str) -> bytes:
        content = json.dumps({"blake2b": checksum, **metadata}, allow_nan=False)
        text = json.dumps({"__metadata__": {_METADATA: content}, **header}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with atomic_file(path) as partial, partial.open("wb") as file:
        first = file.write(head(digest.hexdigest()))  # in whose place comes that of all
        for name, (dtype, shape) in sorted(kinds.items()):
            digest.update(f"{name} {dtype} {shape} ".encode())
            file.seek(first + header[name]["data_offsets"][0])
            for part in parts[name]:
                data = part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
                digest.update(data)
                file.write(data)
        file.seek(0)
        file.write(head(digest.hexdigest()))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors (on the host) and the metadata of a file of `write_tensors`."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise InputError(f"{path} is half-written or altered: it is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            metadata = parse_json((file.metadata() or {}).get(_METADATA, "{}").encode())
            if not isinstance(metadata, dict):
                raise ValueError("its metadata are not a JSON object")
    except FileNotFoundError as error:  # the library says so, too, of what may not be read
        what = "cannot be read: permission denied" if path.exists() else "is missing"
        raise InputError(f"{path} {what}") from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise InputError(f"{path} is half-written or altered: {error}") from error
    written = metadata.pop("blake2b", None)
    if written != _digest(tensors, metadata):
        what = "it has no checksum" if written is None else "its checksum does not fit"
        raise InputError(f"{path} is half-written or altered: {what}")
    return tensors, metadata


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """A checksum of everything that a file holds, however the format lays it out."""
    digest = new_digest(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


class Checkpointer:
    """Saves checkpoints, if given a file for them; keeps the best weights on the CPU."""

    def __init__(
        self,
        trained: Trained,
        state_file: Path | None = None,
        best_file: Path | None = None,
        identity: str = "",  # of the run
        writes: bool = True,  # else another rank does
    ) -> None:
        self.trained, self.state_file, self.best_file = trained, state_file, best_file
        self.identity, self.writes = identity, writes
        self.takes_part = writes
        self.best: dict[str, Tensor] = {}  # on the host: there may be gigabytes of it
        self._best_on_disk = -1  # the epoch
        self._saved_at, self._seconds = time.monotonic(), 0.0

    def resume(self) -> Progress | None:
        """Restore everything from the checkpoint; None where there is none."""
        path = self.state_file
        if path is None or not path.exists():
            return None
        tensors, metadata = self._read(path)
        if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
            raise InputError(f"{path} is no checkpoint that this sce can read; start anew")
        if metadata.get("run") != self.identity:
            raise InputError(f"{path} is the checkpoint of another run; start anew")
        if (wrong := misfit(metadata, _SHAPE)) is not None:
            raise InputError(f"{path} was altered: {wrong} is missing, or of another kind")
        try:
            self.trained.restore(tensors, metadata["optimizer_scalars"])
        except (RuntimeError, KeyError, InputError) as error:
            raise InputError(f"{path} is the checkpoint of another model: {error}") from error
        fields = {name: metadata["progress"].get(name) for name in asdict(Progress())}
        current = {name: fields["current"][name] for name in _CURRENT}
        progress = Progress(**fields | {"current": EpochSoFar(**current)})
        if progress.has_best:
            self.best = with_prefix(tensors, "best.")
            if not self.best:
                self.keep_best()
            self.save_best(progress)  # a crash may have come between the two files
        if self.writes:  # or just after one, which is not written again if training has ended
            shutil.rmtree(partial_directory(path), ignore_errors=True)
        return progress

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return read_tensors(path)

    @property
    def place(self) -> Path:
        """The directory of the run, which this or another rank writes."""
        assert self.state_file is not None
        return self.state_file.parent

    def keep_best(self) -> None:
        """Remember the weights as they are now."""
        weights = self.trained.modules.state_dict()
        self.best = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}

    def restore_best(self) -> None:
        """Give model and loss the weights of the best epoch."""
        self.trained.modules.load_state_dict(self.best)

    def due(self, at_least: float = 0.0) -> bool:
        """True if it is time to save again, `at_least` so many seconds after the last time."""
        since = time.monotonic() - self._saved_at
        wanted = self.writes and self.state_file is not None
        return wanted and since >= max(at_least, _SHARE * self._seconds)

    def save(self, progress: Progress) -> None:
        """Write the checkpoint, and the best weights if they are new."""
        if self.state_file is None or not self.takes_part:
            return
        begun = time.monotonic()
        tensors, scalars = self.trained.tensors()
        best_is_last = progress.best_epoch == progress.epoch and progress.current.step == 0
        best = {} if best_is_last else self.best
        tensors |= {f"best.{name}": value for name, value in best.items()}
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "run": self.identity,
            "progress": asdict(progress),
            "optimizer_scalars": scalars,
        }
        self._write(self.state_file, tensors, metadata)
        self.save_best(progress)
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - begun

    def _write(
        self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
    ) -> None:
        write_tensors(path, tensors, metadata)

    def save_best(self, progress: Progress) -> None:
        """Write the best weights of the model, if they are new."""
        new = progress.has_best and progress.best_epoch != self._best_on_disk
        if self.takes_part and new:
            weights = with_prefix(self.best, "model.")
            self._write_best(weights, {"epoch": progress.best_epoch, "run": self.identity})
            self._best_on_disk = progress.best_epoch

    def _write_best(self, weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        if self.best_file is not None:
            write_tensors(self.best_file, weights, metadata)
