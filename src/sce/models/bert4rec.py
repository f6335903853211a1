"""BERT4Rec: a transformer that looks both ways, and learns masked items (arXiv 1904.06690).

The architecture is that of the authors' code: normalisation behind each residual and of the
embedded items, GELU, a projection before the scores. Some events of a history, as many in each
step, are exchanged for a mask and are the targets; of some histories only the last is. To
recommend, a mask follows the history, and its state is the one after the last event.

It differs from that code in this: scores have no bias by item; positions are counted from the end,
as in the other backbones; of a long history the last events are trained on, not several windows;
the first of them, which no other backbone predicts either, is never masked. The mask is not counted
in `max_length`, which is 199 where the authors say 200. A sharded catalogue begins as it does for
the other backbones.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.data.batches import IGNORED, PADDING
from sce.data.length_groups import LengthGroups
from sce.documented import documented
from sce.errors import InputError
from sce.models.packing import check_groups, join, split, unpack
from sce.models.transformer import Block, Transformer, TransformerSettings, linear

_EPSILON = 1e-12  # of the layer norms, as in the authors' code
_DEVIATION = 0.02  # of new weights, cut off at twice as much
_MASK = -2  # in sequences: an event that is masked


@documented
@dataclass(frozen=True)
class BERT4RecSettings(TransformerSettings):
    """Settings of BERT4Rec."""

    heads: int = 2
    """Attention heads; they divide dim."""
    widening: int = 4
    """Width of the feed-forward layers, in multiples of dim."""
    masked: float = 0.2
    """Share of events masked in training, which are the targets; at least one of each history."""
    last_only: float = 0.1
    """Share of training histories of which only the last event is masked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked <= 1:
            raise InputError(f"masked is a share above 0, up to 1; got {self.masked}")
        if not 0 <= self.last_only <= 1:
            raise InputError(f"last_only is a share from 0 to 1; got {self.last_only}")


class BERT4RecBlock(Block):
    """Attention in both directions, then a feed-forward with GELU, both normalised behind."""

    def __init__(self, settings: BERT4RecSettings) -> None:
        super().__init__(settings, _EPSILON)
        self.length = settings.max_length + 1
        self.inner = linear(settings.dim, settings.widening * settings.dim)
        self.outer = linear(settings.widening * settings.dim, settings.dim)

    def _behind(self, states: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        states = self.attention_norm(states + self.dropout(attended))
        inner = F.gelu(self.inner(states))
        return self.forward_norm(states + self.dropout(self.outer(inner)))  # type: ignore[no-any-return]

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, missing: Tensor | None, **options: Any
    ) -> Tensor:
        assert missing is not None
        real = torch.arange(key.shape[2], device=key.device) < self.length - missing
        return F.scaled_dot_product_attention(query, key, value, real[:, None, None], **options)

    @staticmethod
    def kept_bytes(settings: Any, width: int) -> float:
        """Return bytes kept for the backward pass besides attention's, by position and `dim`."""
        # Inputs of query, attention_out and inner; of both norms; two dropout masks. Under autocast
        # key_value has a copy of its input as well. What GELU takes and gives.
        narrow = 3 * width + 2 * 4 + 2 * 1 + (width if width < 4 else 0)
        return float(narrow + 2 * settings.widening * width)


class BERT4Rec(Transformer):
    """Histories in, hidden states out, of which the last predicts the next item.

    >>> BERT4Rec(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])

    Settings may be given by name, as here: see `BERT4RecSettings`.
    """

    settings_class, block_class = BERT4RecSettings, BERT4RecBlock
    settings: BERT4RecSettings
    draws = True

    @property
    def _places(self) -> int:
        return self.max_length + 1

    def _last_norm(self) -> nn.Module:
        dim = self.settings.dim
        # All weights are made before any is drawn.
        self.mask = nn.Parameter(torch.empty(dim))
        self.embedding_norm = nn.LayerNorm(dim, eps=_EPSILON)
        return nn.Sequential(linear(dim, dim), nn.GELU(), nn.LayerNorm(dim, eps=_EPSILON))

    def forward(
        self,
        histories: Tensor,
        length_groups: LengthGroups | None = None,
        masked: Tensor | None = None,
    ) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]; the last of each predicts.

        In training, `inputs` [b, 1 + l], the state at a place is that of the event after it, which
        predicts this event where it is `masked`, [b, 1 + l].
        """
        after = histories if masked is None else histories[:, 1:]
        self.check(after)
        groups = check_groups(after, length_groups)
        if masked is None:
            histories = F.pad(histories, (0, 1), value=PADDING)
            columns = torch.arange(histories.shape[1], device=histories.device)
            masked = columns == (after != PADDING).sum(1, keepdim=True)
        wider = tuple((rows, width + 1) for rows, width in groups)
        parts = split(self._run(histories.masked_fill(masked, _MASK), wider), wider)
        states = join([part[:, 1:].flatten(0, 1) for part in parts])
        return unpack(self.norm(states), groups, after.shape[1])

    def inputs(self, histories: Tensor, targets: Tensor) -> Tensor:
        """Return whole sequences, [b, 1 + l]: with the last event of each."""
        after = targets.masked_fill(targets == IGNORED, PADDING)
        return torch.cat([histories[:, :1], after], dim=1)

    def draw(self, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw the events to mask: `most_targets` of each history, or the last alone."""
        real = targets != IGNORED
        count = real.sum(1, keepdim=True)
        order = torch.rand(targets.shape, device=targets.device).masked_fill(~real, 2)
        chosen = order.argsort(1).argsort(1) < self.most_targets(count)
        last = torch.arange(targets.shape[1], device=targets.device) == count - 1
        alone = torch.rand(count.shape, device=targets.device) < self.settings.last_only
        chosen = torch.where(alone, last, chosen)
        return targets.masked_fill(~chosen, IGNORED), {"masked": F.pad(chosen, (1, 0))}

    def most_targets(self, lengths: Tensor) -> Tensor:
        """Return how many of so many events are masked: see `Backbone.most_targets`."""
        share = self.settings.masked * lengths.double()  # in which any device rounds alike
        if not lengths.is_floating_point():  # as a mean is
            share = share.round().to(lengths.dtype)
        return share.clamp(min=1).minimum(lengths)

    def look_up(self, items: Tensor) -> Tensor:
        """Return rows of the catalogue, and the mask in their place where an event is masked."""
        masked = items == _MASK
        return torch.where(
            masked[:, None], self.mask, super().look_up(items.masked_fill(masked, 0))
        )

    def _place(self, embedded: Tensor, places: Tensor) -> Tensor:
        return self.embedding_norm(super()._place(embedded, places))  # type: ignore[no-any-return]

    def _missing(self, events: Tensor) -> Tensor | None:
        return self._places - events

    def _fill(self, generator: torch.Generator) -> None:
        layers = [layer for layer in self.modules() if isinstance(layer, nn.Linear)]
        for layer in layers:
            nn.init.zeros_(layer.bias)
        drawn = [self.catalogue, self.positions, self.mask, *(each.weight for each in layers)]
        for weight in drawn:
            ends = -2 * _DEVIATION, 2 * _DEVIATION
            nn.init.trunc_normal_(weight, 0, _DEVIATION, *ends, generator=generator)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        # The embedding norm keeps as much as hidden states take; a mask follows each history.
        kept = super().activation_bytes(sequences, positions + sequences, half=half)
        # The projection: what it takes, GELU's input, its norm's, and the hidden states.
        return kept + (2 * (2 if half else 4) + 4 + 4) * positions * self.settings.dim
