"""Whether tensors of a file fit what they are for: their checksum can be right all the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sce.errors import InputError


def forms(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shapes by name, and which are real numbers: torch would turn any type into another."""
    return {n: (t.shape, t.is_floating_point() and t.itemsize > 1) for n, t in tensors.items()}


def check_state(
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
