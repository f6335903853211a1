"""A transformer over a user's history: what SASRec, LiGR and BERT4Rec have in common.

Padding is outside the item table, and batches are as wide as they need to be; positions are counted
from the end of a history, and `sink` puts the events that it is short of the full length back into
attention, by their number. A state is the same however its batch is padded, trimmed, or grouped by
length.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.data.batches import PADDING
from sce.data.length_groups import LengthGroups
from sce.errors import InputError
from sce.models.base import BackboneSettings, ConfiguredBackbone
from sce.models.packing import check_groups, join, pack, split, unpack

_SINKS = 8  # empty events that stand for the missing ones: dropout hits some of them, not all
_SINK_WIDTH = 8  # dimensions that they add: one is used, fast attention wants eight


@dataclass(frozen=True)
class TransformerSettings(BackboneSettings):
    """The settings that all transformers have."""

    heads: int = 1
    """Attention heads; they divide dim."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads:
            raise InputError(
                f"the heads share the width equally: dim {self.dim} is not a multiple of "
                f"{self.heads} heads"
            )


class Transformer(ConfiguredBackbone):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    Nothing in `forward` depends on the values in a batch or is a sync, so a step can be compiled,
    captured and exported.
    """

    block_class: ClassVar[Any]
    settings: Any
    scaled: ClassVar[bool] = False
    """Item embeddings are multiplied with √d, before positions are added."""
    epsilon: ClassVar[float | None] = None  # of a layer norm behind the last block; None: none

    def _build(self) -> None:
        dim = self.settings.dim
        self.positions = nn.Parameter(torch.empty(self._places, dim))
        self.blocks = nn.ModuleList(
            self.block_class(self.settings) for _ in range(self.settings.blocks)
        )
        self.norm = self._last_norm()

    @property
    def _places(self) -> int:
        """Positions of the longest sequence."""
        return self.max_length

    def _last_norm(self) -> nn.Module:
        """Return what comes after the last block."""
        if self.epsilon is None:
            return nn.Identity()
        return nn.LayerNorm(self.settings.dim, eps=self.epsilon)

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]; those at padding are arbitrary.

        Padding before an event, or a history longer than its group is wide, is an error (on a GPU,
        where values are not looked at: an index out of bounds).
        """
        self.check(histories)
        groups = check_groups(histories, length_groups)
        return unpack(self.norm(self._run(histories, groups)), groups, histories.shape[1])

    def _run(self, sequences: Tensor, groups: LengthGroups) -> Tensor:
        """Return what the blocks make of sequences [b, l]: the states of all groups, [n, d]."""
        columns = torch.arange(sequences.shape[1], device=sequences.device)
        real = sequences != PADDING
        events = real.sum(1, keepdim=True)
        places = torch.where(real, columns + (self._places - events), 0)
        # From here on there are no rows, but the positions of all groups, [n].
        states = self._place(self.embed(sequences, groups), pack(places, groups))
        states = self.dropout(states).masked_fill(~pack(real, groups)[:, None], 0)
        missing = self._missing(events)
        for block in self.blocks:
            states = block(states, groups, missing)
        return states  # type: ignore[no-any-return]

    def _place(self, embedded: Tensor, places: Tensor) -> Tensor:
        """Add to embedded items what stands for their positions."""
        scale = math.sqrt(self.settings.dim) if self.scaled else 1.0
        return embedded * scale + F.embedding(places, self.positions)

    def _missing(self, events: Tensor) -> Tensor | None:
        """Return how many events the blocks are told that sequences are short of, [b, 1]."""
        # Padding comes after all events, where causal attention does not look.
        return self._places - events if self.settings.sink else None

    def _fill(self, generator: torch.Generator) -> None:
        for weight in (self.catalogue, self.positions):
            nn.init.xavier_uniform_(weight, generator=generator)
        for block in self.blocks:
            each: Any = block
            each.initialise(generator)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        dim, heads = self.settings.dim, self.settings.heads
        width = 2 if half else 4  # bytes of what matrix products take and give
        sinks = getattr(self.settings, "sink", False)
        attended = (positions + sequences * _SINKS * sinks) * (dim + heads * _SINK_WIDTH * sinks)
        # Query, key, value and result, with the sink; and what norms and softmax leave of a row.
        block = 4 * width * attended + (16 + 4 * heads) * positions
        block += self.block_class.kept_bytes(self.settings, width) * positions * dim
        # Input of the blocks, its dropout mask, and the hidden states; indices of both tables.
        kept = (4 + 1 + 4) * positions * dim + 24 * positions + self.settings.blocks * block
        return float(kept)


class Block(nn.Module):
    """Attention, by default causal; a feed-forward layer follows in those derived from it.

    These have `kept_bytes`, of the settings and the bytes of a number in products, for the memory;
    and `initialise`, to draw new weights, where the model does not.
    """

    def __init__(self, settings: Any, epsilon: float) -> None:
        super().__init__()
        dim, self.heads = settings.dim, settings.heads
        self.attention_norm = nn.LayerNorm(dim, eps=epsilon)
        self.query = linear(dim, dim)
        self.key_value = linear(dim, 2 * dim)
        self.attention_out = linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim, eps=epsilon)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, states: Tensor, groups: LengthGroups, missing: Tensor | None = None
    ) -> Tensor:
        """Map states [n, d] to states [n, d], those of all groups of a batch.

        With `missing` [b, 1], attention sees as many empty events before the history.
        """
        normed, around = self._before(states)
        return self._behind(states, normed, self.attend(normed, around, groups, missing))

    def _before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention takes for queries, and for keys and values."""
        return states, states

    def _behind(self, states: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Map states, given the queries of attention and what it gives."""
        raise NotImplementedError

    def attend(
        self, queries: Tensor, states: Tensor, groups: LengthGroups, missing: Tensor | None
    ) -> Tensor:
        """Return what attention adds to the queries, [n, d]; keys and values are of states."""
        query, key_value = split(self.query(queries), groups), split(self.key_value(states), groups)
        lack = len(groups) * [None] if missing is None else missing.split([n for n, _ in groups])
        # Nobody holds on to queries, keys and values: attention has copies of them, with the sink.
        attended = [self._attend_in_group(query.pop(0), key_value.pop(0), each) for each in lack]
        return self.attention_out(join(attended))  # type: ignore[no-any-return]

    def _attend_in_group(self, query: Tensor, key_value: Tensor, missing: Tensor | None) -> Tensor:
        key, value = key_value.chunk(2, dim=-1)
        del key_value
        # [b, l, d] -> [b, heads, l, d / heads]
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value)
        )
        dropout = self.dropout.p if self.training else 0.0
        scale = 1 / math.sqrt(query.shape[-1])
        attended = self._weigh(query, key, value, missing, dropout_p=dropout, scale=scale)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _weigh(
        self, query: Tensor, key: Tensor, value: Tensor, missing: Tensor | None, **options: Any
    ) -> Tensor:
        """Attention proper, [b, heads, l, d / heads]."""
        if missing is not None:
            query, key, value = self._with_sink(query, key, value, missing, options["scale"])
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        return attended if missing is None else attended[:, :, _SINKS:, :-_SINK_WIDTH]

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, missing: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put a few events before all others that stand for all the missing ones.

        An empty event has the key and value of a state of zeros. That each stands for several is
        an addition to its logit, brought in by one more dimension of query and key.
        """
        empty_key, empty_value = (
            half.unflatten(0, (1, self.heads, 1, -1)).expand(query.shape[0], -1, _SINKS, -1)
            for half in self.key_value.bias.to(key.dtype).chunk(2)
        )
        count = missing.to(torch.promote_types(key.dtype, torch.float32))
        each = (count.clamp(min=1) / _SINKS).log().masked_fill(missing == 0, -1e3) / scale
        each = F.pad(each[:, None, None, :], (0, _SINK_WIDTH - 1)).to(key.dtype)
        each = each.expand(-1, self.heads, _SINKS, -1)
        ones = F.pad(torch.ones_like(query[..., :1]), (0, _SINK_WIDTH - 1))
        query = F.pad(torch.cat([query, ones], dim=-1), (0, 0, _SINKS, 0))
        first_keys = torch.cat([empty_key, each], dim=-1)
        key = torch.cat([first_keys, F.pad(key, (0, _SINK_WIDTH))], dim=2)
        value = F.pad(torch.cat([empty_value, value], dim=2), (0, _SINK_WIDTH))
        return query, key, value


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    """Return a layer without weights: its constructor would draw them from the global generator."""
    made = nn.Linear(inputs, outputs, bias=bias, device="meta")
    return made.to_empty(device=torch.get_default_device())
