"""The best items for each state, out of the whole table, exactly and in bounded memory.

The table is scored in chunks, each by one product of matrices, items × states: BLAS is quicker at
that than at states × items. Scores are looked at in groups: only those whose maximum reaches the
state's threshold, its k-th best score so far. The bits of such a product depend on its shape, so
whatever is that close to the threshold is a candidate, and candidates are scored once more: a
ranking does not depend on the other states.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int64]
Candidates = tuple[Codes, Codes, Floats]
"""Flat rows, items and scores."""

_GROUP = 32  # items, as far apart as there are groups in a chunk
_SCORES_AT_ONCE = 1 << 19  # per chunk, 2 MiB: they stay in the cache until they are looked at
_SMALLEST_CHUNK = 1 << 12
_MOST_TIES = 1 << 12  # candidates beyond k
_RESCORED_AT_ONCE = 1 << 14


def top_k(
    states: Floats,
    table: Floats,
    depths: Codes,
    hidden: tuple[Codes, Codes],
    norm: float,
    *,
    chunk_size: int | None = None,
) -> list[tuple[Codes, Floats]]:
    """Rank the items with the largest products with each state; equal scores by item, lower first.

    Args:
        states: [b, d].
        table: Item vectors, [n, d], finite.
        depths: Items wanted for each row, [b], at least 1; there may be fewer.
        hidden: Items never to be ranked: flat items, and the row of each.
        norm: The largest norm of an item's vector, or more.
        chunk_size: Items scored at once, a multiple of 32.

    Returns:
        Items and scores of each row, best first.
    """
    rows, n_items = len(states), len(table)
    chunk_size = chunk_size or max(_SMALLEST_CHUNK, _SCORES_AT_ONCE // rows // _GROUP * _GROUP)
    order = np.argsort(hidden[0], kind="stable")
    items, of = hidden[0][order], hidden[1][order]
    best = _Best(states, depths, norm)
    grouped = n_items - n_items % _GROUP
    buffer = np.empty(rows * min(chunk_size, n_items), np.float32)
    begins = [*range(0, grouped, chunk_size), *([grouped] if grouped < n_items else [])]
    for begin, end in zip(begins, [*begins[1:], n_items], strict=True):
        scores = buffer[: rows * (end - begin)].reshape(end - begin, rows)
        np.matmul(table[begin:end], states.T, out=scores)
        some = slice(*np.searchsorted(items, (begin, end)))
        scores[items[some] - begin, of[some]] = -np.inf
        best.add(scores, begin)
    return best.ranked(states, table)


def rank(
    states: Floats, table: Floats, depths: Codes, candidates: Candidates, norm: float
) -> list[tuple[Codes, Floats]]:
    """Rank candidates, of which none is hidden, as `top_k` ranks all items."""
    best = _Best(states, depths, norm)
    best.kept = [candidates]
    return best.ranked(states, table)


def rounding(dim: int) -> float:
    """Twice the largest error of a product in float32, as a part of both norms."""
    return 2 * (dim + 8) * 2.0**-24


def warm_up() -> None:
    """Multiply matrices once that fill the buffer of BLAS.

    OpenBLAS's kernels for ARM prefetch beyond what they packed. Where that part of the buffer was
    never written, products of few states took up to three times as long (Neoverse N1).
    """
    block = np.ones((256, 256), np.float32)
    np.matmul(block, block)


class _Best:
    """Candidates for the best items of each row: flat rows, items and scores."""

    def __init__(self, states: Floats, depths: Codes, norm: float) -> None:
        self.depths, self.deepest = depths, int(depths.max())
        # Of the k-th best, and of the item that it is compared to.
        error = rounding(states.shape[1]) * norm
        self.margins = (error * np.linalg.norm(states, axis=1)).astype(np.float32)
        self.thresholds = np.full(len(states), -np.inf, np.float32)
        self.kept = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
        self.pending = 0

    def add(self, scores: Floats, begin: int) -> None:
        """Add the candidates among the scores [w, b] of items from `begin` on."""
        width, rows = scores.shape
        groups = scores.reshape(_GROUP if width % _GROUP == 0 else width, -1, rows)
        maxima = groups.max(axis=0)
        if begin == 0:
            self._begin(scores, maxima)
        group, row = np.nonzero(maxima >= self.thresholds)
        values = groups[:, group, row]
        place, hit = np.nonzero((values >= self.thresholds[row]) & (values > -np.inf))
        items = begin + place * groups.shape[1] + group[hit]
        self.kept.append((row[hit], items, values[place, hit]))
        self.pending += len(hit)
        if self.pending > len(self.kept[0][0]):  # as many as there were: worth a sort
            self._tighten()

    def _begin(self, scores: Floats, maxima: Floats) -> None:
        """The k-th best of the first chunk is not below the k-th best maximum of its groups."""
        for some in (maxima, scores):
            place = len(some) - self.deepest
            if place >= 0:
                self.thresholds = np.partition(some.T, place, axis=1)[:, place] - self.margins
                return

    def _tighten(self) -> None:
        rows, items, scores = (np.concatenate(parts) for parts in zip(*self.kept, strict=True))
        order = np.lexsort((items, -scores, rows))
        rows, items, scores = rows[order], items[order], scores[order]
        begins = np.searchsorted(rows, np.arange(len(self.depths)))
        last = begins + self.depths - 1
        full = np.append(rows, -1)[np.minimum(last, len(rows))] == np.arange(len(self.depths))
        self.thresholds[full] = scores[last[full]] - self.margins[full]
        ranks = np.arange(len(rows)) - begins[rows]
        close = (scores >= self.thresholds[rows]) & (ranks < self.depths[rows] + _MOST_TIES)
        self.kept, self.pending = [(rows[close], items[close], scores[close])], 0

    def ranked(self, states: Floats, table: Floats) -> list[tuple[Codes, Floats]]:
        """The best of each row, by scores that depend on state and item alone."""
        self._tighten()
        ((rows, items, _),) = self.kept
        scores = rescore(states, table, rows, items)
        order = np.lexsort((items, -scores, rows))
        begins = np.searchsorted(rows, np.arange(len(states) + 1)).tolist()
        ends = [b + k for b, k in zip(begins, self.depths.tolist(), strict=False)]
        chosen = [order[b : min(e, c)] for b, e, c in zip(begins, ends, begins[1:], strict=False)]
        return [(items[some], scores[some]) for some in chosen]


def rescore(states: Floats, table: Floats, rows: Codes, items: Codes) -> Floats:
    """Products of some states with some items, in float64, rounded."""
    scores = np.empty(len(rows), np.float32)
    for begin in range(0, len(rows), _RESCORED_AT_ONCE):
        some = slice(begin, begin + _RESCORED_AT_ONCE)
        products = table[items[some]].astype(np.float64)
        products *= states[rows[some]]
        scores[some] = products.sum(1) + 0.0  # + 0.0: there are two zeros
    return scores
