"""What the memory of a training step is taken by, measured stage by stage.

One step is done in pieces: the model, the loss and its gradient with respect to states and
catalogue, the model's gradient, the update. At the highest moment of all, the parts are

    weights        the parameters
    optimizer      Adam's two moments of each
    activations    what the model keeps for its backward pass, and the batch
    gradients      of the states and the catalogue, by the loss
    loss           everything else the loss takes: its logits and what is made of them
    backward       by how much the model's gradient or the update goes beyond that

so that they add up to the peak. On a GPU that is what torch's allocator counts. Elsewhere it is the
bytes of the tensors alive, which leaves out what an operation takes and gives back inside.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sce.config import Config
from sce.data.batches import DeviceSequences, training_batch
from sce.data.prepared import PreparedDataset
from sce.training.device import matmul_precision
from sce.training.optimizer import make_optimizer
from sce.training.step import keyword_arguments

PARTS = ("weights", "optimizer", "activations", "gradients", "loss", "backward")
_MIB = 2**20


class Meter(Protocol):
    """Bytes of tensors alive now, and the most since the peak was last forgotten."""

    def now(self) -> int: ...  # noqa: D102
    def peak(self) -> int: ...  # noqa: D102
    def forget_peak(self) -> None: ...  # noqa: D102


def measure_components(
    dataset: PreparedDataset, config: Config, device: torch.device
) -> dict[str, float]:
    """Do two steps (the first makes the optimizer's moments) and take the second one apart.

    The batch is of the longest sequences there are.

    Returns:
        MiB by part, and their sum as "peak".
    """
    with _meter(device) as meter:
        base = meter.now()
        model, loss = config.build(dataset)
        model, loss = model.to(device), loss.to(device)
        optimizer = make_optimizer(
            [*model.parameters(), *loss.parameters()],
            learning_rate=config.training.learning_rate,
            betas=config.training.betas,
            weight_decay=config.training.weight_decay,
            device=device,
        )
        sequences = DeviceSequences.place(dataset.train, device)
        count = min(config.training.batch_size, len(sequences))
        rows = sequences.lengths.argsort(descending=True)[:count]
        found: dict[str, float] = {}
        with matmul_precision(device, config.training.precision):
            for _ in range(2):
                found = _step(model, loss, optimizer, sequences, rows, config, device, meter, base)
    return found


def _step(
    model: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    sequences: DeviceSequences,
    rows: Tensor,
    config: Config,
    device: torch.device,
    meter: Meter,
    base: int,
) -> dict[str, float]:
    optimizer.zero_grad(set_to_none=True)
    weights = sum(_bytes(parameter) for parameter in model.parameters())
    moments = sum(
        _bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device == device
    )
    options: dict[str, Any] = {}
    if "generator" in keyword_arguments(loss):
        options["generator"] = torch.Generator(device).manual_seed(0)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.training.precision == "bf16"):
        histories, targets = training_batch(sequences, rows, max_length=config.model.max_length)
        states: Tensor = model(histories)
        after_model = meter.now()
        cut = states.detach().requires_grad_()
        meter.forget_peak()
        value = loss(cut, model.catalogue, targets, **options)
    value.backward()
    del value
    in_loss = meter.peak()
    assert cut.grad is not None
    gradients = _bytes(cut.grad) + _bytes(getattr(model.catalogue, "grad", None))
    states.backward(cut.grad)
    del states, cut
    optimizer.step()
    whole = meter.peak()
    parts = {
        "weights": weights,
        "optimizer": moments,
        "activations": after_model - base - weights - moments,
        "gradients": gradients,
        "loss": max(0, in_loss - after_model - gradients),
    }
    parts["backward"] = max(0, whole - base - sum(parts.values()))
    found = {name: size / _MIB for name, size in parts.items()}
    return found | {"peak": sum(found.values())}


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


@contextmanager
def _meter(device: torch.device) -> Iterator[Meter]:
    if device.type == "cuda":
        yield _Allocator(device)
        return
    with LiveTensors() as counted:
        yield counted


class _Allocator:
    """What torch's allocator has given out on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class LiveTensors(TorchDispatchMode):
    """Within the block, counts the bytes of the tensors that operations make, until they go."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self._peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        """Bytes alive."""
        return self._now

    def peak(self) -> int:
        """The most there were."""
        return self._peak

    def forget_peak(self) -> None:
        """Begin the peak at what is alive."""
        self._peak = self._now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            if self._known.pop(key, None) is not None:
                self._now -= size

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self._peak = max(self._peak, self._now)
