"""SASRec: a causal transformer over a user's history, as the paper uses it.

The architecture is that of the paper's code, which adapts pmixer/SASRec.pytorch: in each block only
the queries are normalised before attention, the residual goes around attention from the normalised
queries, and a point-wise feed-forward of width d follows. That code pads every history on the left
to the full length and attends to the padding, which is zero in every block: see `sink`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.documented import documented
from sce.models.transformer import Block, Transformer, TransformerSettings, linear

_EPSILON = 1e-8  # of the layer norms, as in the paper's code


@documented
@dataclass(frozen=True)
class SASRecSettings(TransformerSettings):
    """Settings of SASRec."""

    sink: bool = True
    """Let attention also rest on the events that a history is short of max_length."""


class SASRecBlock(Block):
    """Causal attention, then a point-wise feed-forward."""

    def __init__(self, settings: SASRecSettings) -> None:
        super().__init__(settings, _EPSILON)
        self.inner = linear(settings.dim, settings.dim)
        self.outer = linear(settings.dim, settings.dim)

    def _before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention_norm(states), states

    def _behind(self, states: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        normed = self.forward_norm(normed + attended)
        inner = F.relu(self.dropout(self.inner(normed)))
        return normed + self.dropout(self.outer(inner))  # type: ignore[no-any-return]

    @staticmethod
    def kept_bytes(settings: Any, width: int) -> float:
        """Return bytes kept for the backward pass besides attention's, by position and `dim`."""
        # Inputs of query, attention_out, inner and outer; of both norms; two dropout masks. Under
        # autocast key_value has a copy of its input as well.
        return 4 * width + 2 * 4 + 2 * 1 + (width if width < 4 else 0)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw new weights, distributed as in the paper's code."""
        dim = self.query.in_features
        # There, queries, keys and values come from one [3d, d] matrix: its bound, for all three.
        bound = math.sqrt(6 / (dim + 3 * dim))
        for projection in (self.query, self.key_value):
            nn.init.uniform_(projection.weight, -bound, bound, generator=generator)
            nn.init.zeros_(projection.bias)
        nn.init.zeros_(self.attention_out.bias)
        nn.init.xavier_uniform_(self.attention_out.weight, generator=generator)
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.uniform_(layer.bias, -(dim**-0.5), dim**-0.5, generator=generator)


class SASRec(Transformer):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    >>> SASRec(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Settings may be given by name, as here: see `SASRecSettings`.
    """

    settings_class, block_class = SASRecSettings, SASRecBlock
    settings: SASRecSettings
    scaled, epsilon = True, _EPSILON
