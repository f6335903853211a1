"""Weights and histories for tests of models."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from sce.data.batches import PADDING

N_ITEMS = 30
M = TypeVar("M", bound=nn.Module)


def scaled_up(model: M) -> M:
    """Fresh weights are small: make every part matter, biases and norms too."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def torch_parts(block: nn.Module, heads: int) -> tuple[dict[str, Tensor], nn.MultiheadAttention]:
    """The weights of a block by name, and torch's own attention with them, in float64."""
    own: dict[str, Tensor] = dict(block.named_parameters())
    attention = nn.MultiheadAttention(len(own["query.bias"]), heads, batch_first=True).double()
    for part in ("weight", "bias"):
        joined = torch.cat([own[f"query.{part}"], own[f"key_value.{part}"]])
        given = {f"in_proj_{part}": joined, f"out_proj.{part}": own[f"attention_out.{part}"]}
        attention.load_state_dict(given, strict=False)
    return own, attention


def random_histories(*lengths: int, width: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(lengths))
    histories = torch.full((len(lengths), max(width, *lengths)), PADDING)
    for row, length in enumerate(lengths):
        histories[row, :length] = torch.randint(0, N_ITEMS, (length,), generator=generator)
    return histories
