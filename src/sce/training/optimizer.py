"""Adam, and how its learning rate goes over the steps."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

Schedule = Literal["constant", "warmup-cosine"]

_WARMUP_SHARE = 0.05


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    device: torch.device,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """Adam as the paper uses it; a weight decay is decoupled from the gradient, as in AdamW.

    One that is `capturable` can be recorded in a CUDA graph: its learning rate is on the device.
    """
    kind = torch.optim.AdamW if weight_decay else torch.optim.Adam
    return kind(
        list(parameters),
        lr=torch.tensor(learning_rate, device=device) if capturable else learning_rate,
        betas=betas,
        weight_decay=weight_decay,
        capturable=capturable,
        fused=device.type == "cuda",  # one pass over the weights instead of a dozen
    )


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


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
