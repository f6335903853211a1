"""Rank for requests, each with its own number of items, and items that may or may not be ranked.

Where few items may be ranked, these alone are scored; where most may, all are scored, and the
others masked. Items are catalogue indices here, "codes"; lists of them may repeat some.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sce.data.batches import PADDING
from sce.data.requests import NONE, Codes, Query
from sce.evaluation.ranking import (
    NOTHING,
    Ranker,
    Ranking,
    Rows,
    last_states,
    longest_history,
    rescore,
    top_k,
    uses_times,
)

# Of the catalogue: more are not gathered. On a CPU, with a million items of 64 dimensions, masking
# is the faster from a tenth on for one state, from a half for 4 and 16, from 0.8 for 64.
_GATHERED_SHARE = 0.5
_NORMS_AT_ONCE = 1 << 16

T = TypeVar("T")
Found = tuple[NDArray[np.int64], NDArray[np.float32]]  # items and scores, best first


class ItemFilter(NamedTuple):
    """Items that may be ranked: those kept, or all but those masked; ascending, never both."""

    kept: NDArray[np.int64] | None = None
    masked: NDArray[np.int64] | None = None

    @classmethod
    def choose(cls, n_items: int, allow: Codes | None, block: Codes) -> "ItemFilter":
        """Keep items of one list, or all, without those of another; by what costs less."""
        if allow is not None:
            return cls._keep(n_items, np.setdiff1d(allow, block))
        masked = np.unique(block).astype(np.int64)
        if n_items - len(masked) <= _GATHERED_SHARE * n_items:
            return cls(kept=_others(n_items, masked))
        return cls(masked=masked if len(masked) else None)

    def narrow(self, n_items: int, allow: Codes) -> "ItemFilter":
        """Keep, of those that may be ranked, the items of a list."""
        wanted = np.unique(allow)
        if self.kept is not None:
            wanted = wanted[_among(wanted, self.kept)]
        if self.masked is not None:
            wanted = wanted[~_among(wanted, self.masked)]
        return self._keep(n_items, wanted)

    @classmethod
    def _keep(cls, n_items: int, kept: Codes) -> "ItemFilter":
        if len(kept) <= _GATHERED_SHARE * n_items:
            return cls(kept=kept.astype(np.int64))
        return cls(masked=_others(n_items, kept))

    def rank(
        self,
        states: Tensor,
        catalogue: Tensor,
        k: int,
        *,
        scale: Tensor | None = None,
        **options: Any,
    ) -> Ranking:
        """Do what `top_k` does, among these items; their vectors are scaled where it is said."""
        kept, masked = (
            None if some is None else torch.from_numpy(some).to(catalogue.device) for some in self
        )
        rows = catalogue if kept is scale is None else Rows(catalogue, kept, scale)
        return top_k(states, rows, k, blocked=masked, **options)


@torch.no_grad()
def rank_queries(
    model: Ranker, queries: Sequence[Query], among: ItemFilter, norm: Tensor, batch_size: int
) -> list[Found]:
    """The best items of queries, of which no history is empty, among those for all of them.

    They are ranked in batches, but the states are computed together: `last_states` computes as many
    as the device is busy with, though a batch has fewer. Where a model takes histories of any
    length, all would be as wide as the longest: its states are computed in batches, too.
    """
    catalogue = model.catalogue.detach()
    together = len(queries) if longest_history(model) else batch_size
    states = torch.cat([states_after(model, some) for some in _cut(queries, together)])
    alike: dict[object, list[int]] = {}
    for row, query in enumerate(queries):
        own = None if query.allow is None else np.unique(query.allow).tobytes()
        alike.setdefault((query.k, own), []).append(row)
    found: list[Found] = [(NONE, np.empty(0, np.float32))] * len(queries)
    for rows in (some for group in alike.values() for some in _cut(group, batch_size)):
        k, allow = queries[rows[0]].k, queries[rows[0]].allow
        some = among if allow is None else among.narrow(len(catalogue), allow)
        never = [queries[row].hidden for row in rows]
        ranking = some.rank(states[rows], catalogue, k, seen=_pairs(never, states), norm=norm)
        for row, one in zip(rows, split_ranking(ranking), strict=True):
            found[row] = one
    return found


@torch.no_grad()
def rank_similar(
    catalogue: Tensor, scale: Tensor, items: Codes, k: int, among: ItemFilter
) -> list[Found]:
    """The items of largest cosine with each of some items; `scale`: `inverse_norms(catalogue)`."""
    chosen = torch.from_numpy(np.asarray(items, np.int64)).to(catalogue.device)
    states, itself = Rows(catalogue, scale=scale)[chosen], torch.arange(len(chosen)).to(chosen)
    some_more_than_one = scale.new_tensor(1.01)  # no norm of a scaled vector is larger
    options: dict[str, Any] = {"scale": scale, "seen": (chosen, itself), "norm": some_more_than_one}
    return split_ranking(among.rank(states, catalogue, k, **options))


@torch.no_grad()
def inverse_norms(catalogue: Tensor) -> Tensor:
    """1 / norm of every vector, 0 for a zero vector; of bits that depend on nothing else."""
    found = []
    for rows in catalogue.detach().split(_NORMS_AT_ONCE):
        itself = torch.arange(len(rows), device=rows.device)[:, None]
        norms = rescore(rows.double(), rows, itself).squeeze(1).sqrt()
        found.append((1 / norms).masked_fill(norms == 0, 0))
    return torch.cat(found)


def split_ranking(ranking: Ranking) -> list[Found]:
    """Items and scores of each row, without what is missing."""
    items, scores = ranking.items.cpu().numpy(), ranking.scores.cpu().numpy()
    if (items != NOTHING).all():
        return [*zip(items, scores, strict=True)]
    return [
        (one[one != NOTHING], own[one != NOTHING]) for one, own in zip(items, scores, strict=True)
    ]


def _cut(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def states_after(model: Ranker, queries: Sequence[Query]) -> Tensor:
    """The hidden state after the history of each query, [b, d]."""
    device, most, times = model.catalogue.device, longest_history(model), None
    last = slice(None if most is None else -most, None)
    histories = _pad([query.history[last] for query in queries], PADDING)
    if uses_times(model):
        known = [np.zeros_like(one.history) if one.times is None else one.times for one in queries]
        # Behind the last event comes the moment that is asked about: its own.
        times = _pad([np.append(some[last], some[-1:]) for some in known], 0).int().to(device)
    return last_states(model, histories.to(device), most, times)


def _pad(rows: Sequence[Codes], value: int) -> Tensor:
    """Rows as a batch, int64 [b, l], with the value behind those that are shorter."""
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(real.shape, value)
    padded[real] = np.concatenate(rows)
    return torch.from_numpy(padded)


def _pairs(items: Sequence[Codes], states: Tensor) -> tuple[Tensor, Tensor] | None:
    """Flat items, and the row of each, where the states are."""
    flat, lengths = np.concatenate(items).astype(np.int64), [len(some) for some in items]
    if not len(flat):
        return None
    rows = np.repeat(np.arange(len(items)), lengths)
    return torch.from_numpy(flat).to(states.device), torch.from_numpy(rows).to(states.device)


def _among(some: Codes, ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    places = np.searchsorted(ascending, some)
    inside = places < len(ascending)
    inside[inside] = ascending[places[inside]] == some[inside]
    return inside


def _others(n_items: int, items: Codes) -> NDArray[np.int64]:
    left = np.ones(n_items, bool)
    left[items] = False
    return np.flatnonzero(left)
