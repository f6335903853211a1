"""SASRec: a causal transformer over a user's history, as the paper uses it.

The architecture is that of the paper's code, which adapts pmixer/SASRec.pytorch: in each block only
the queries are normalised before attention, the residual goes around attention from the normalised
queries, and a point-wise feed-forward of width d follows. That code pads every history on the left
to the full length and attends to the padding, which is zero in every block. Here padding is outside
the item table and batches are as wide as they need to be; positions are counted from the end of a
history, and `sink` puts the events that it is short of the full length back into attention, by
their number. A state is the same however its batch is padded, trimmed, or grouped by length.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sce.data.batches import PADDING
from sce.data.length_groups import LengthGroups
from sce.documented import documented
from sce.errors import InputError, check_types, checked
from sce.models.base import Backbone

_SINKS = 8  # empty events that stand for the missing ones: dropout hits some of them, not all
_SINK_WIDTH = 8  # dimensions that they add: one is used, fast attention wants eight
_EPSILON = 1e-8  # of the layer norms, as in the paper's code
# More is a mistake, and would take hours or all memory to build.
_MOST = {"dim": 2**27, "blocks": 1000, "heads": 2**27, "max_length": 2**27}


@documented
@dataclass(frozen=True)
class SASRecSettings:
    """Settings of SASRec."""

    dim: int = 64
    """Width of item embeddings and hidden states."""
    blocks: int = 2
    """Transformer blocks."""
    heads: int = 1
    """Attention heads; they divide dim."""
    dropout: float = 0.2
    """Share of activations and attention weights dropped in training."""
    max_length: int = 200
    """Maximum history length; of a longer one the last events count."""
    sink: bool = True
    """Let attention also rest on the events that a history is short of max_length."""

    def __post_init__(self) -> None:
        vars(self).update(check_types(vars(self), get_type_hints(type(self)), "model."))
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most:,}"
                raise InputError(f"{name} must be {bound}; got {value}")
        if self.dim % self.heads:
            raise InputError(
                f"the heads share the width equally: dim {self.dim} is not a multiple of "
                f"{self.heads} heads"
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is a share from 0 to below 1; got {self.dropout}")

    def build(self, n_items: int, *, seed: int = 0) -> "SASRec":
        """Make the model with new weights."""
        return SASRec(n_items, self, seed=seed)


class SASRec(Backbone):
    """Histories in, one hidden state per event out; scores are `states @ catalogue.T`.

    Nothing in `forward` depends on the values in a batch or is a sync, so a step can be compiled,
    captured and exported.

    >>> SASRec(1000, dim=32, max_length=50)(torch.tensor([[3, 7, 5]])).shape
    torch.Size([1, 3, 32])
    """

    settings: SASRecSettings

    @checked
    def __init__(
        self,
        n_items: int,
        settings: SASRecSettings | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Make a model with new weights.

        Args:
            n_items: Items in the catalogue, C.
            settings: The settings, all at once.
            seed: The initial weights follow from it alone; the global random state is neither
                read nor moved.
            options: Settings by name, as in `SASRec(n_items, dim=64)`: see `SASRecSettings`.
        """
        super().__init__()
        if n_items < 1:
            raise InputError(f"a model needs at least one item; got {n_items}")
        self.settings = replace(settings or SASRecSettings(), **options)
        dim, dropout = self.settings.dim, self.settings.dropout
        self.catalogue = nn.Parameter(torch.empty(n_items, dim))
        self.positions = nn.Parameter(torch.empty(self.settings.max_length, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(dim, self.settings.heads, dropout) for _ in range(self.settings.blocks)
        )
        self.norm = nn.LayerNorm(dim, eps=_EPSILON)
        self._initialise(seed)

    def forward(self, histories: Tensor, length_groups: LengthGroups | None = None) -> Tensor:
        """Turn histories [b, l] into hidden states [b, l, d]; those at padding are arbitrary.

        Padding before an event, or a history longer than its group is wide, is an error (on a GPU,
        where values are not looked at: an index out of bounds).
        """
        self._check(histories)
        rows, length = histories.shape
        groups = ((rows, length),) if length_groups is None else length_groups
        if length_groups is not None:
            _check_groups(histories, groups)
        columns = torch.arange(length, device=histories.device)
        real = histories != PADDING
        events = real.sum(1, keepdim=True)
        inside = torch.cat([each.sum(1, keepdim=True) for each in _cut(real, groups)])
        # Beyond the table where an event follows padding, or is outside of its group: that must not
        # pass unnoticed.
        places = torch.where(real, columns + (self.max_length - events), 0)
        places = places + (events - inside) * self.max_length
        items = torch.where(real, histories, 0)
        # From here on there are no rows, but the positions of all groups, [n].
        real, places, items = (_pack(each, groups) for each in (real, places, items))
        # A compiled graph knows no sparse gradients: such a lookup stays outside of it.
        outside = self.sparse_grad and torch.compiler.is_compiling()
        look_up = torch.compiler.disable(F.embedding) if outside else F.embedding
        states = look_up(items, self.catalogue, sparse=self.sparse_grad)
        states = states * math.sqrt(self.settings.dim) + F.embedding(places, self.positions)
        states = self.dropout(states).masked_fill(~real[:, None], 0)
        # Padding comes after all events, where causal attention does not look.
        missing = self.max_length - events if self.settings.sink else None
        for block in self.blocks:
            states = block(states, groups, missing)
        return _unpack(self.norm(states), groups, length)

    def encode(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """Return the hidden state after each history, [b, d]: see `Backbone.encode`.

        Without dropout the sinks are one, which stands for all missing events. The last block has
        one query a history.
        """
        lengths = lengths[:, None]
        columns = torch.arange(embedded.shape[1], device=embedded.device)
        real = columns < lengths
        places = torch.where(real, columns + (self.max_length - lengths), 0)
        states = embedded * math.sqrt(self.settings.dim) + F.embedding(places, self.positions)
        states = states.masked_fill(~real[:, :, None], 0)
        # What is added to the logits of all queries, or of the last: 0, or -inf where none looks.
        hidden = (columns > columns[:, None])[None], ~real[:, None]
        added = [torch.where(each, -torch.inf, 0.0) for each in hidden]  # [1, l, l], [b, 1, l]
        if self.settings.sink:
            missing = (self.max_length - lengths)[:, :, None]
            sink = missing.clamp(min=1).to(states.dtype).log().masked_fill(missing == 0, -1e3)
            added = [
                torch.cat([sink.expand(-1, a.shape[1], 1), a.expand(sink.shape[0], -1, -1)], dim=2)
                for a in added
            ]
        final = (lengths - 1)[:, :, None].expand(-1, -1, states.shape[2])
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, Block)
            last = number == len(self.blocks)
            states = block.encode(states.gather(1, final) if last else states, states, added[last])
        return self.norm(states)[:, 0]  # type: ignore[no-any-return]

    def _check(self, histories: Tensor) -> None:
        if histories.ndim != 2 or histories.is_floating_point():
            raise InputError(
                "histories are integers of shape [batch, length]; got "
                f"{histories.dtype} of shape {list(histories.shape)}"
            )
        length = histories.shape[1]
        if length > self.max_length:
            raise InputError(
                f"histories of {length} events do not fit max_length {self.max_length}; give the "
                f"last {self.max_length} of each"
            )
        if histories.device.type != "cpu" or torch.compiler.is_compiling():
            return  # looking at values is a sync; embedding lookups still check
        outside = (histories != PADDING) & ((histories < 0) | (histories >= len(self.catalogue)))
        if outside.any():
            raise InputError(
                f"item {int(histories[outside][0])} is not in the catalogue of "
                f"{len(self.catalogue)} items (padding is {PADDING})"
            )
        real = (histories != PADDING).int()
        if (real.diff(dim=1) > 0).any():
            raise InputError("this model takes histories padded on the right, without gaps")

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        if self.catalogue.is_meta:
            return  # made to be counted, or to be filled from a file
        generator = torch.Generator(device=self.catalogue.device).manual_seed(seed)
        for weight in (self.catalogue, self.positions):
            nn.init.xavier_uniform_(weight, generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialise(generator)

    def activation_bytes(self, sequences: int, positions: int, *, half: bool) -> float:
        """Return the bytes that are kept for the backward pass, with the hidden states."""
        dim, heads = self.settings.dim, self.settings.heads
        width = 2 if half else 4  # bytes of what matrix products take and give
        sinks = self.settings.sink
        attended = (positions + sequences * _SINKS * sinks) * (dim + heads * _SINK_WIDTH * sinks)
        # Inputs of query, attention_out, inner and outer; of both norms; two dropout masks. Under
        # autocast key_value has a copy of its input as well.
        kept = 4 * width + 2 * 4 + 2 * 1 + (width if half else 0)
        # Query, key, value and result, with the sink; and what norms and softmax leave of a row.
        block = kept * positions * dim + 4 * width * attended + (16 + 4 * heads) * positions
        # Input of the blocks, its dropout mask, and the hidden states; indices of both tables.
        return (4 + 1 + 4) * positions * dim + 24 * positions + self.settings.blocks * block


class Block(nn.Module):
    """Causal attention, then a point-wise feed-forward."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim, eps=_EPSILON)
        self.query = _linear(dim, dim)
        self.key_value = _linear(dim, 2 * dim)
        self.attention_out = _linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim, eps=_EPSILON)
        self.inner = _linear(dim, dim)
        self.outer = _linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: Tensor, groups: LengthGroups, missing: Tensor | None = None
    ) -> Tensor:
        """Map states [n, d] to states [n, d], those of all groups of a batch.

        With `missing` [b, 1], attention sees as many empty events before the history.
        """
        normed = self.attention_norm(states)
        states = normed + self._attend(normed, states, groups, missing)
        normed = self.forward_norm(states)
        inner = F.relu(self.dropout(self.inner(normed)))
        return normed + self.dropout(self.outer(inner))  # type: ignore[no-any-return]

    def encode(self, queries: Tensor, states: Tensor, added: Tensor) -> Tensor:
        """Map some of the states, queries [b, q, d], as `forward` does in evaluation.

        Args:
            queries: States [b, q, d] to map.
            states: All states, [b, l, d].
            added: To the logits, [b or 1, q, l]; [b, q, 1 + l] where attention sees an empty event.
        """
        normed = self.attention_norm(queries)
        key, value = self.key_value(states).chunk(2, dim=-1)
        if added.shape[2] > states.shape[1]:
            empty = self.key_value.bias.expand(states.shape[0], 1, -1).chunk(2, dim=-1)
            key, value = (torch.cat(pair, dim=1) for pair in zip(empty, (key, value), strict=True))
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(normed), key, value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, added[:, None])
        normed = self.forward_norm(normed + self.attention_out(attended.transpose(1, 2).flatten(2)))
        return normed + self.outer(F.relu(self.inner(normed)))  # type: ignore[no-any-return]

    def _attend(
        self, queries: Tensor, states: Tensor, groups: LengthGroups, missing: Tensor | None
    ) -> Tensor:
        positions = [rows * width for rows, width in groups]
        query = list(self.query(queries).split(positions))
        key_value = list(self.key_value(states).split(positions))
        lack = len(groups) * [None] if missing is None else missing.split([n for n, _ in groups])
        # Nobody holds on to queries, keys and values: attention has copies of them, with the sink.
        attended = [
            self._attend_in_group(query.pop(0), key_value.pop(0), group, lacking)
            for group, lacking in zip(groups, lack, strict=True)
        ]
        return self.attention_out(_join(attended))  # type: ignore[no-any-return]

    def _attend_in_group(
        self, query: Tensor, key_value: Tensor, group: tuple[int, int], missing: Tensor | None
    ) -> Tensor:
        key, value = key_value.chunk(2, dim=-1)
        del key_value
        # [n, d] -> [b, heads, l, d / heads]
        query, key, value = (
            each.unflatten(0, group).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (query, key, value)
        )
        dropout = self.dropout.p if self.training else 0.0
        scale = 1 / math.sqrt(query.shape[-1])
        if missing is not None:
            query, key, value = self._with_sink(query, key, value, missing, scale)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
        if missing is not None:
            attended = attended[:, :, _SINKS:, :-_SINK_WIDTH]
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

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


def _check_groups(histories: Tensor, groups: LengthGroups) -> None:
    shape = list(histories.shape)
    sound = groups and all(rows > 0 and 0 < width <= shape[1] for rows, width in groups)
    if not sound or sum(rows for rows, _ in groups) != shape[0]:
        raise InputError(f"length groups {groups} are not those of a batch of shape {shape}")
    if histories.device.type != "cpu" or torch.compiler.is_compiling():
        return
    lengths = (histories != PADDING).sum(1).split([rows for rows, _ in groups])
    if any((some > width).any() for some, (_, width) in zip(lengths, groups, strict=True)):
        raise InputError(f"histories are longer than their groups {groups} are wide")


def _cut(tensor: Tensor, groups: LengthGroups) -> list[Tensor]:
    """The groups of a batch [b, l], each [rows, width]."""
    by_rows = tensor.split([rows for rows, _ in groups])
    return [each[:, :width] for each, (_, width) in zip(by_rows, groups, strict=True)]


def _pack(tensor: Tensor, groups: LengthGroups) -> Tensor:
    """The positions of all groups of a batch [b, l], one after another, [n]."""
    return _join([each.flatten() for each in _cut(tensor, groups)])


def _unpack(states: Tensor, groups: LengthGroups, length: int) -> Tensor:
    """States [n, d] as a batch [b, l, d]; zeros where there is no group."""
    each = states.split([rows * width for rows, width in groups])
    found = [part.unflatten(0, group) for part, group in zip(each, groups, strict=True)]
    lacking = [length - width for _, width in groups]
    return _join(
        [F.pad(p, (0, 0, 0, lack)) if lack else p for p, lack in zip(found, lacking, strict=True)]
    )


def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer without weights yet: its constructor would draw them from the global generator."""
    return nn.Linear(inputs, outputs, device="meta").to_empty(device=torch.get_default_device())
