"""Adam, row-wise Adagrad for the catalogue, and the schedule of learning rates."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sce.errors import InputError, named
from sce.losses import Loss
from sce.models.base import Backbone
from sce.optim import RowwiseAdagrad
from sce.training.settings import Schedule, TrainingSettings

_WARMUP_SHARE = 0.05


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: TrainingSettings,
    *,
    device: torch.device,
    capturable: bool = False,
    row_wise: nn.Parameter | None = None,
) -> torch.optim.Optimizer:
    """Make Adam as the paper uses it; a weight decay is decoupled, as in AdamW.

    `capturable` keeps learning rates on the device, so that a CUDA graph can hold the step; of the
    table `row_wise`, row-wise Adagrad updates the touched rows.
    """

    def rate(value: float) -> float | torch.Tensor:
        return torch.tensor(value, device=device) if capturable else value

    adagrad = None
    if row_wise is not None:
        assert settings.catalogue_learning_rate is not None  # as with settings.row_wise
        adagrad = RowwiseAdagrad([row_wise], lr=rate(settings.catalogue_learning_rate))
        adagrad.param_groups[0]["initial_lr"] = settings.catalogue_learning_rate
    kind = torch.optim.AdamW if settings.weight_decay else torch.optim.Adam
    dense = [p for p in parameters if p is not row_wise]
    if adagrad is not None and not dense:
        return adagrad
    adam = kind(
        dense,
        lr=rate(settings.learning_rate),
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        capturable=capturable,
        # One pass over the weights instead of a dozen, which takes gradients to lie as weights do.
        fused=device.type in ("cuda", "cpu") and all(p.is_contiguous() for p in dense),
    )
    adam.param_groups[0]["initial_lr"] = settings.learning_rate
    return adam if adagrad is None else _Together(adam, adagrad)


class _Together(torch.optim.Optimizer):
    """Several optimizers as one, with one list of groups and one state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([{"params": g["params"]} for part in parts for g in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            self.state.update(part.state)
            part.state = self.state  # by parameter: none has two optimizers

    def step(self, closure: Any = None) -> Any:
        first, *others = self.parts
        loss = first.step(closure)
        for part in others:
            part.step()
        return loss


def rate_factor(schedule: Schedule, step: int, total: int, warmup_steps: int | None) -> float:
    """The factor of the learning rate at a step, counted from 0 over the whole run.

    >>> [rate_factor("constant", step, 4, None) for step in range(4)]
    [1.0, 1.0, 1.0, 1.0]
    >>> [round(rate_factor("warmup-cosine", step, 6, 2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if schedule == "constant":
        return 1.0
    warmup = math.ceil(total * _WARMUP_SHARE) if warmup_steps is None else warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rates of the next step: this share of what the optimizer was made with."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def needs_sce() -> str:
    """Why rows are updated with no other loss."""
    row_wise, shards = named("training.row_wise"), named("training.shard_catalogue")
    return f"only the loss sce goes with {row_wise} and {shards}; choose it, or leave both out"


def row_wise_table(model: nn.Module, loss: object) -> nn.Parameter:
    """The catalogue, if the gradient of model and loss is of its touched rows alone."""
    if not (isinstance(loss, Loss) and hasattr(loss, "sparse_grad")):
        raise InputError(needs_sce())
    if not (isinstance(model, Backbone) and isinstance(model.catalogue, nn.Parameter)):
        raise InputError(
            f"{named('training.row_wise')} needs a sce.models.base.Backbone, whose parameter "
            "`catalogue` has a sparse gradient while `sparse_grad` is True; got "
            f"{type(model).__name__}"
        )
    return model.catalogue


@contextmanager
def sparse_gradients(model: nn.Module, loss: object, *, wanted: bool) -> Iterator[None]:
    """Let model and loss give the catalogue sparse gradients inside the block, or dense ones."""
    switched: list[Any] = [
        part
        for part, kind in ((model, Backbone), (loss, Loss))
        if isinstance(part, kind) and hasattr(part, "sparse_grad")
    ]
    before = [part.sparse_grad for part in switched]
    try:
        for part in switched:
            part.sparse_grad = wanted
        yield
    finally:
        for part, setting in zip(switched, before, strict=True):
            part.sparse_grad = setting
