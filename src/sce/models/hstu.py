"""HSTU: pointwise attention with relative times and positions (arXiv 2402.17152).

The layers are those of the authors' code for public datasets. States are normalised and projected
to gates, values, queries and keys. Attention weighs by SiLU, not softmax, and its logits know how
far apart two events are, in events and in seconds. Taken over are also embeddings by position, √d
on items, dropout, the buckets of times and the initial weights.

Left out are L2-normalised states and items with a temperature of 0.05: scores are products with the
catalogue here. A layer norm, the other choice of the authors' code, follows the last block. Their
code tells a query the time of the event that is to be predicted, in evaluation too; here it does so
only where `times` is "next", as no other model is told.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.data.length_groups import LengthGroups
from sce.documented import documented
from sce.models.packing import check_groups, join, pack, split, unpack
from sce.models.transformer import Transformer, TransformerSettings, linear

_EPSILON = 1e-6
_LOG_WIDTH = 0.301  # of a bucket of times
_BUCKETS = 72  # that 31 bits of seconds have; the authors have room for 128


@documented
@dataclass(frozen=True)
class HSTUSettings(TransformerSettings):
    """Settings of HSTU."""

    dropout: float = 0.2
    """Share of activations dropped in training."""
    times: Literal["past", "next", "none"] = "past"
    """Times that attention knows: those of past events; also that of the next one, which is to be
    predicted, as the authors' code; or none, for a log without."""


class HSTUBlock(nn.Module):
    """Pointwise attention, gated."""

    def __init__(self, settings: HSTUSettings) -> None:
        super().__init__()
        dim, self.heads, self.longest = settings.dim, settings.heads, settings.max_length
        self.inner = linear(dim, 4 * dim, bias=False)
        self.outer = linear(dim, dim)
        self.by_distance = nn.Parameter(torch.empty(settings.max_length))
        self.by_time = nn.Parameter(torch.empty(_BUCKETS))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, states: Tensor, groups: LengthGroups, buckets: list[Tensor]) -> Tensor:
        """Map the states of all groups, [n, d], given the buckets of times of each group."""
        gate, value, query, key = F.silu(self.inner(_normalise(states))).chunk(4, dim=-1)
        by_group = zip(*(split(each, groups) for each in (value, query, key)), buckets, strict=True)
        del value, query, key
        attended = join([self._attend(*each).flatten(0, 1) for each in by_group])
        return states + self.outer(self.dropout(gate * _normalise(attended)))  # type: ignore[no-any-return]

    def _attend(self, value: Tensor, query: Tensor, key: Tensor, buckets: Tensor) -> Tensor:
        """Return values [b, l, d] weighed by those queries that come no earlier."""
        # Before attention, as there are fewer values than weights.
        value = value / self.longest
        value, query, key = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (value, query, key)
        )
        logits = query @ key.transpose(2, 3)
        columns = torch.arange(buckets.shape[2], device=buckets.device)
        distances = columns[:, None] - columns
        near, then = (table[:, None].to(logits.dtype) for table in (self.by_distance, self.by_time))
        bias = F.embedding(distances.clamp(min=0), near) + F.embedding(buckets, then)
        logits = (logits + bias.movedim(-1, 1)).masked_fill(distances < 0, 0)  # SiLU of 0 is 0
        return (F.silu(logits) @ value).transpose(1, 2).flatten(2)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw new weights, distributed as in the authors' code."""
        for weight in (self.inner.weight, self.by_distance, self.by_time):
            nn.init.normal_(weight, std=0.02, generator=generator)
        nn.init.xavier_uniform_(self.outer.weight, generator=generator)
        bound = 1 / math.sqrt(self.outer.in_features)
        nn.init.uniform_(self.outer.bias, -bound, bound, generator=generator)


class HSTU(Transformer):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    >>> HSTU(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Without times, as here, all events are of one moment. Settings may be given by name: see
    `HSTUSettings`.
    """

    settings_class, block_class = HSTUSettings, HSTUBlock
    settings: HSTUSettings
    scaled, epsilon = True, _EPSILON

    @property
    def uses_times(self) -> bool:
        """True if times are given: see `Backbone.uses_times`."""
        return self.settings.times != "none"

    def forward(
        self,
        histories: Tensor,
        length_groups: LengthGroups | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]: see `Transformer.forward`."""
        self.check(histories)
        groups, length = check_groups(histories, length_groups), histories.shape[1]
        columns = torch.arange(length, device=histories.device).expand_as(histories)
        states = self.dropout(self._place(self.embed(histories, groups), pack(columns, groups)))
        if times is None:
            times = histories.new_zeros(len(histories), length + 1)
        by_rows = zip(times.split([rows for rows, _ in groups]), groups, strict=True)
        buckets = [self._buckets(each, width) for each, (_, width) in by_rows]
        # Padding comes after all events, where causal attention does not look.
        for block in self.blocks:
            states = block(states, groups, buckets)
        return unpack(self.norm(states), groups, length)

    def _buckets(self, times: Tensor, length: int) -> Tensor:
        """Return how far apart each two events are, [b, l, l]: logarithms of seconds, rounded down.

        Events at padding may be any, those that come later too. In float64 no logarithm of a whole
        number comes so close to a border that another device would round it otherwise.
        """
        now = times.narrow(1, int(self.settings.times == "next"), length).long()
        apart = (now[:, :, None] - times.narrow(1, 0, length)[:, None]).abs().clamp(min=1)
        exact = torch.float32 if times.device.type == "mps" else torch.float64
        return (apart.to(exact).log() / _LOG_WIDTH).int().clamp(max=_BUCKETS - 1)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        width = 2 if half else 4
        # Input of inner, its result and SiLU's, values over their number, the normalised states
        # before and behind, what outer takes, and its dropout mask.
        block = (4 + width + 8 * width + width + 4 + 4 + 1 + width) * positions * self.settings.dim
        kept = (4 + 1 + 4) * positions * self.settings.dim + 24 * positions
        return float(kept + self.settings.blocks * block)

    def pair_bytes(self, *, half: bool) -> tuple[float, float]:
        """Return bytes for each two positions of a history: see `Backbone.pair_bytes`."""
        both = self.settings.heads * 2 * (2 if half else 4)  # logits and weights, or gradients
        # The buckets of times; in the backward pass they are sorted, to add up by bucket.
        return 4.0 + self.settings.blocks * both, both + 16.0


def _normalise(states: Tensor) -> Tensor:
    return F.layer_norm(states, states.shape[-1:], eps=_EPSILON)
