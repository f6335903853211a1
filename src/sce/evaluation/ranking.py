"""The k best items for each state, out of the whole catalogue, exactly and in bounded memory.

The catalogue is scored chunk by chunk, and only the best so far are kept. Equal scores are ordered
by item id, lower first, always: `torch.topk` alone promises nothing about ties.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sce.data.batches import Ragged
from sce.errors import InputError
from sce.evaluation.precision import matmul_precision

NOTHING = -1  # in place of an item, where fewer than k are available

_SCORES_AT_ONCE = 1 << 26  # per chunk, 256 MiB
_SMALLEST_CHUNK = 1 << 12
_GROUP = 32
_EVENTS_AT_ONCE = 1 << 24  # counted by a function that copies its input
_EXACT_INTEGERS = 1 << 24  # float32 holds every integer up to here


class Ranker(Protocol):
    """A model to evaluate: histories [b, l] to states [b, l, d], and item embeddings [C, d]."""

    @property
    def catalogue(self) -> Tensor:
        """Item embeddings; the score of an item is its product with the hidden state."""

    def __call__(self, histories: Tensor, /) -> Tensor:
        """Return the states, the one at each place computed from the events up to it."""


class Ranking(NamedTuple):
    """The best items of each row, best first."""

    scores: Tensor  # float32 [b, k], -inf where there are fewer items
    items: Tensor  # int64 [b, k], NOTHING where there are fewer items


@torch.no_grad()
def top_k(
    states: Tensor,
    catalogue: Tensor,
    k: int,
    *,
    seen: tuple[Tensor, Tensor] | None = None,
    chunk_size: int | None = None,
) -> Ranking:
    """Rank the k items with the largest product with each state; equal scores by item id.

    Args:
        states: [b, d].
        catalogue: [C, d].
        k: How many items per row. Rows with fewer items available, because the catalogue is
            small or the others were seen, end in `NOTHING` with score -inf.
        seen: Items never to be ranked: flat item ids, and the row of each.
        chunk_size: Items scored at once; by default so many that the scores take 256 MiB.

    Scores are computed in float32, without TF32 and whatever autocast says. An item whose score is
    not a number is never ranked.
    """
    if k < 1:
        raise InputError(f"k must be at least 1; got {k}")
    if chunk_size is None:
        chunk_size = max(_SMALLEST_CHUNK, _SCORES_AT_ONCE // max(1, len(states)))
    states = states.float()
    best = torch.empty(len(states), 0, dtype=torch.int64, device=states.device)
    autocast = torch.autocast(states.device.type, enabled=False)
    with autocast, matmul_precision(states.device, "float32"):
        for first in range(0, len(catalogue), chunk_size):
            scores = states @ catalogue[first : first + chunk_size].float().T
            if seen is not None:
                _mask(scores, *seen, first)
            best = torch.cat([best, _best_keys(scores, k, first)], dim=1)
            best = best.topk(min(k, best.shape[1])).values
    found, items = _unkey(best)
    items = items.masked_fill(found == -torch.inf, NOTHING)
    missing = (0, k - best.shape[1])
    return Ranking(
        scores=torch.nn.functional.pad(found, missing, value=-torch.inf),
        items=torch.nn.functional.pad(items, missing, value=NOTHING),
    )


class Popularity:
    """The most popular items for everybody: the baseline of any model.

    A ranker like any other, with states and item vectors of width 1.
    """

    def __init__(self, train: Ragged, n_items: int, *, device: torch.device | str = "cpu") -> None:
        """Count how often each item occurs in the training sequences."""
        counts = np.zeros(n_items, dtype=np.int64)
        for first in range(0, len(train.items), _EVENTS_AT_ONCE):
            events = train.items[first : first + _EVENTS_AT_ONCE]
            counts += np.bincount(events, minlength=n_items)
        places = np.empty(n_items, dtype=np.int64)
        places[np.argsort(-counts, kind="stable")] = np.arange(n_items)
        # Scores by place, not count: float32 could not tell large counts apart, and without ties
        # ranking is quicker. Beyond 16 million items the rarest share the score 0.
        scores = np.maximum(_EXACT_INTEGERS - places, 0).astype(np.float32)
        self.counts = counts
        self.catalogue = torch.from_numpy(scores[:, None]).to(device)

    def __call__(self, histories: Tensor) -> Tensor:
        """Return the same state for every history."""
        return torch.ones(*histories.shape, 1, device=self.catalogue.device)


def _mask(scores: Tensor, items: Tensor, rows: Tensor, first: int) -> None:
    # Adding -inf where an item is in this chunk and 0 where not: choosing those that are would
    # need their number, a sync.
    width = scores.shape[1]
    columns = items - first
    inside = (columns >= 0) & (columns < width)
    places = rows * width + columns.clamp(0, width - 1)
    penalties = torch.zeros_like(places, dtype=scores.dtype).masked_fill_(inside, -torch.inf)
    scores.view(-1).scatter_add_(0, places, penalties)


def _best_keys(scores: Tensor, k: int, first: int) -> Tensor:
    """Return the keys of the k best items of each row of a chunk, in no order."""
    if scores.shape[1] <= k:
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        return _key(scores, first + torch.arange(scores.shape[1], device=scores.device))
    # One more than k: a row is in doubt when its last two are equal, as others may be.
    values, columns = _largest(scores, k + 1)
    last = values[:, k - 1]
    in_doubt = (last == values[:, k]) & (last > -torch.inf)
    not_numbers = values[:, 0].isnan()
    any_in_doubt, any_not_numbers = torch.stack([in_doubt.any(), not_numbers.any()]).tolist()
    if any_not_numbers:
        return _best_keys(scores.masked_fill(scores.isnan(), -torch.inf), k, first)
    keys = _key(values[:, :k], first + columns[:, :k])
    if any_in_doubt:
        items = first + torch.arange(scores.shape[1], device=scores.device)
        at_once = max(1, _SCORES_AT_ONCE // 8 // scores.shape[1])  # keys take more memory
        for rows in in_doubt.nonzero().squeeze(1).split(at_once):
            keys[rows] = _key(scores[rows], items).topk(k).values
    return keys


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what topk does, several times faster on long rows.

    The k largest values lie in the k groups of columns with the largest maxima.
    """
    rows, width = scores.shape
    groups = width // _GROUP
    if groups < 2 * k:
        return scores.topk(k)
    grouped = scores[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    chosen = grouped.amax(2).topk(k, sorted=False).indices
    values = grouped.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    offsets = torch.arange(_GROUP, device=scores.device)
    columns = (chosen[:, :, None] * _GROUP + offsets).flatten(1)
    rest = torch.arange(groups * _GROUP, width, device=scores.device)
    values = torch.cat([values, scores[:, groups * _GROUP :]], dim=1)
    columns = torch.cat([columns, rest.expand(rows, -1)], dim=1)
    values, places = values.topk(k)
    return values, columns.gather(1, places)


# A key is an integer that orders as (score, then lower item id first) does: the bits of the score,
# made to order like integers, above the complement of the id.


def _key(scores: Tensor, items: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: there are two zeros
    return (_reorder(bits) << 32) | (0x7FFFFFFF - items)


def _unkey(keys: Tensor) -> tuple[Tensor, Tensor]:
    scores = _reorder(keys >> 32).to(torch.int32).view(torch.float32)
    return scores, 0x7FFFFFFF - (keys & 0xFFFFFFFF)


def _reorder(bits: Tensor) -> Tensor:
    # Negative floats order backwards by their bits; this is its own inverse.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
