"""Peak memory of a few training steps, and by component: nothing is evaluated, nothing is kept.

The steps are those of `fit`, without test users. Then one step is done in stages;
experiments/README.md says what its components are. On a GPU torch's allocator counts. Elsewhere it
is the bytes of the tensors alive, which leaves out what an operation takes and gives back inside.
"""

import gc
import sys
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cyclopts
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sce.config import Config, load_toml
from sce.data.batches import DeviceSequences, training_batch
from sce.data.prepared import PreparedDataset, Sequences
from sce.data.storage import write_json
from sce.errors import InputError, TrainingWarning
from sce.training.device import matmul_precision, resolve_device
from sce.training.fit import fit
from sce.training.optimizer import make_optimizer

_MIB = 2**20


def measure_steps(dataset: PreparedDataset, config: Config, steps: int) -> dict[str, Any]:
    """Train for so many steps, without test users; return the content of result.json."""
    model, loss = config.build(dataset)
    empty = dataset.test
    empty = Sequences(empty.items[:0], empty.offsets[:1], empty.users[:0])
    untested = replace(dataset, test=empty)
    settings = replace(config.training, epochs=steps, max_steps=steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)  # that there are no test users
        result = asdict(fit(model, loss, untested, settings=settings, progress=False))
    del result["history"], model, loss
    gc.collect()  # what training took is not to be measured again
    device = resolve_device(config.training.device)
    return result | {"components_mib": measure_components(dataset, config, device)}


def measure_components(
    dataset: PreparedDataset, config: Config, device: torch.device
) -> dict[str, float]:
    """Do two steps (the first makes the optimizer's moments) and take the second one apart.

    The batch is of the longest sequences there are.

    Returns:
        MiB by component, and their sum as "peak".
    """
    settings, meter = config.training, MemoryMeter(device)
    half = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    with (
        nullcontext() if device.type == "cuda" else meter,
        matmul_precision(device, settings.precision),
    ):
        base = meter.now()
        model, loss = config.build(dataset)
        model, loss = model.to(device), loss.to(device)
        optimizer = make_optimizer(
            [*model.parameters(), *loss.parameters()], settings, device=device
        )
        sequences = DeviceSequences.place(dataset.train, device)
        count = min(settings.batch_size, len(sequences))
        rows = sequences.lengths.argsort(descending=True)[:count]
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            weights = _bytes(*model.parameters())
            moments = _bytes(
                *(
                    value
                    for state in optimizer.state.values()
                    for value in state.values()
                    if isinstance(value, Tensor) and value.device == device
                )
            )
            generator = torch.Generator(device).manual_seed(0)
            with half:
                histories, targets = training_batch(
                    sequences, rows, max_length=config.model.max_length
                )
                histories = model.inputs(histories, targets)
                targets, given = model.draw(targets)
                states: Tensor = model(histories, **given)
                after_model = meter.now()
                cut = states.detach().requires_grad_()
                meter.forget_peak()
                value = loss(cut, model.catalogue, targets, generator=generator)
            value.backward()
            del value
            in_loss = meter.peak()
            assert cut.grad is not None
            gradients = _bytes(cut.grad, model.catalogue.grad)
            states.backward(cut.grad)
            del states, cut
            optimizer.step()
            whole = meter.peak()
            del histories, targets
    parts = {
        "weights": weights,
        "optimizer": moments,
        "activations": after_model - base - weights - moments,
        "gradients": gradients,
        "loss": max(0, in_loss - after_model - gradients),
    }
    parts |= {"backward": max(0, whole - base - sum(parts.values()))}
    found = {name: size / _MIB for name, size in parts.items()}
    return found | {"peak": sum(found.values())}


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class MemoryMeter(TorchDispatchMode):
    """Bytes of live tensors.

    On a GPU those that torch's allocator gave out; elsewhere, within the block, those of the
    tensors that operations make, until they go.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = device if device.type == "cuda" else None
        self._now = self._peak = 0
        self._known: set[int] = set()

    def now(self) -> int:
        """Bytes alive."""
        return self._now if self._gpu is None else torch.cuda.memory_allocated(self._gpu)

    def peak(self) -> int:
        """The most bytes alive since `forget_peak`."""
        return self._peak if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)

    def forget_peak(self) -> None:
        """Begin the peak at what is alive."""
        self._peak = self._now
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._add(storage, storage.nbytes())
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key not in self._known:
            self._known.add(key)
            self._now += size
            self._peak = max(self._peak, self._now)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.remove(key)
        self._now -= size


def main(prepared: Path, *, config: Path, out: Path, steps: int) -> int:
    """Measure, and write OUT/result.json; return 2 when it cannot be."""
    try:
        settings = Config.compose(load_toml(config))
        result = measure_steps(PreparedDataset.load(prepared), settings, steps)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "result.json", result)
    except (InputError, OSError) as error:
        print("sce: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    cyclopts.run(main)
