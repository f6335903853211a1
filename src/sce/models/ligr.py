"""LiGR blocks: a causal transformer with gated residuals, as eSASRec has it (arXiv 2508.06450).

In each block attention and a SwiGLU feed-forward work on normalised states, and what they give is
added to the states as far as a gate of these lets it (LiGR, arXiv 2502.03417). Embeddings are
neither scaled before nor normalised behind the blocks, as in the code of eSASRec's authors. They
mask padding: `sink=False`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.documented import documented
from sce.models.transformer import Block, Transformer, TransformerSettings, linear

_EPSILON = 1e-5


@documented
@dataclass(frozen=True)
class LiGRSettings(TransformerSettings):
    """Settings of LiGR."""

    widening: int = 4
    """Width of the feed-forward layers, in multiples of dim."""
    sink: bool = True
    """Let attention also rest on the events that a history is short of max_length."""


class LiGRBlock(Block):
    """Causal attention, then a SwiGLU feed-forward, both normalised before and gated behind."""

    def __init__(self, settings: LiGRSettings) -> None:
        super().__init__(settings, _EPSILON)
        dim, wide = settings.dim, settings.widening * settings.dim
        self.attention_gate, self.forward_gate = linear(dim, dim), linear(dim, dim)
        self.inner, self.inner_gate = (linear(dim, wide, bias=False) for _ in range(2))
        self.outer = linear(wide, dim, bias=False)

    def _before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.attention_norm(states)
        return normed, normed

    def _behind(self, states: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        states = states + self.attention_gate(states).sigmoid() * self.dropout(attended)
        normed = self.forward_norm(states)
        inner = self.dropout(F.silu(self.inner_gate(normed)) * self.inner(normed))
        return states + self.forward_gate(states).sigmoid() * self.dropout(self.outer(inner))  # type: ignore[no-any-return]

    @staticmethod
    def kept_bytes(settings: Any, width: int) -> float:
        """Return the bytes kept for the backward pass: see `Block.kept_bytes`."""
        # Inputs of both norms, which gates have too; dropout masks; of each residual its gate and
        # branch; inputs of attention_out, of query with key_value, and of both inner layers. Under
        # autocast each layer and gate has a copy of its input.
        narrow = 2 * 4 + 2 * 1 + 4 * width + (7 if width < 4 else 3) * width
        # Both inner results, silu's, and the input of outer with its dropout mask.
        return float(narrow + settings.widening * (4 * width + 1))

    def initialise(self, generator: torch.Generator) -> None:
        """Draw new weights."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight, generator=generator)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


class LiGR(Transformer):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    >>> LiGR(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Settings may be given by name, as here: see `LiGRSettings`.
    """

    settings_class, block_class = LiGRSettings, LiGRBlock
    settings: LiGRSettings
