"""Adam, beside it perhaps row-wise Adagrad, and how learning rates go over the steps."""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, overload

import torch
from torch import nn

from sce.optim import RowwiseAdagrad

Schedule = Literal["constant", "warmup-cosine"]

_WARMUP_SHARE = 0.05


class RowWise(NamedTuple):
    """A table of which a step updates the touched rows alone."""

    table: nn.Parameter
    learning_rate: float


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    device: torch.device,
    capturable: bool = False,
    row_wise: RowWise | None = None,
) -> torch.optim.Optimizer:
    """Adam as the paper uses it; a weight decay is decoupled from the gradient, as in AdamW.

    One that is `capturable` can be recorded in a CUDA graph: its learning rate is on the device. A
    table that is to be updated `row_wise` is so by row-wise Adagrad, the other parameters by Adam.
    """

    def rate(value: float) -> float | torch.Tensor:
        return torch.tensor(value, device=device) if capturable else value

    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    adam = kind(
        [p for p in parameters if row_wise is None or p is not row_wise.table],
        lr=rate(learning_rate),
        betas=betas,
        weight_decay=weight_decay,
        capturable=capturable,
        fused=device.type == "cuda",  # one pass over the weights instead of a dozen
    )
    adam.param_groups[0]["initial_lr"] = learning_rate
    if row_wise is None:
        return adam
    adagrad = RowwiseAdagrad([row_wise.table], lr=rate(row_wise.learning_rate))
    adagrad.param_groups[0]["initial_lr"] = row_wise.learning_rate
    return _Together(adam, adagrad)


class _Together(torch.optim.Optimizer):
    """Several optimizers as one: their groups one after the other, their states in one place."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([{"params": g["params"]} for part in parts for g in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            self.state.update(part.state)
            part.state = self.state  # by parameter: none has two optimizers

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def rate_factor(schedule: Schedule, step: int, total: int, warmup_steps: int | None) -> float:
    """What the learning rate is multiplied by at a step, counted from 0 over the whole run.

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
