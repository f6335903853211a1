"""The best items for each state, out of the whole table, exactly and in bounded memory.

The table is scored in chunks, each by one product of matrices, items × states: BLAS is quicker at
that than at states × items. Scores are looked at in groups: only those whose maximum reaches the
state's threshold, its k-th best score so far. The bits of such a product depend on its shape, so
whatever is that close to the threshold is a candidate, and candidates are scored once more: a
ranking does not depend on the other states.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.integer[Any]]
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
    margins, deepest, tight = _margins(states, norm), int(depths.max()), 0
    thresholds = np.full(rows, -np.inf, np.float32)
    best: Any = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
    grouped = n_items - n_items % _GROUP
    buffer = np.empty(rows * min(chunk_size, n_items), np.float32)
    begins = [*range(0, grouped, chunk_size), *([grouped] if grouped < n_items else [])]
    for begin, end in zip(begins, [*begins[1:], n_items], strict=True):
        scores = buffer[: rows * (end - begin)].reshape(end - begin, rows)
        np.matmul(table[begin:end], states.T, out=scores)
        some = slice(*np.searchsorted(items, (begin, end)))
        scores[items[some] - begin, of[some]] = -np.inf
        groups = scores.reshape(_GROUP if (end - begin) % _GROUP == 0 else end - begin, -1, rows)
        maxima = groups.max(axis=0)
        known = maxima if len(maxima) >= deepest else scores
        if begin == 0 and len(known) >= deepest:  # the k-th best is not below that of the maxima
            place = len(known) - deepest
            thresholds = np.partition(known.T, place, axis=1)[:, place] - margins
        group, row = np.nonzero(maxima >= thresholds)
        values = groups[:, group, row]
        at, hit = np.nonzero((values >= thresholds[row]) & (values > -np.inf))
        more = row[hit], begin + at * groups.shape[1] + group[hit], values[at, hit]
        best = tuple(np.concatenate(pair) for pair in zip(best, more, strict=True))
        if len(best[0]) > 2 * tight:  # as many more as there were: worth a sort
            best = _tighten(best, depths, margins, thresholds)
            tight = len(best[0])
    return rank(states, table, depths, best, norm)


def rank(
    states: Floats, table: Floats, depths: Codes, candidates: Candidates, norm: float
) -> list[tuple[Codes, Floats]]:
    """Rank candidates, of which none is hidden, as `top_k` ranks all items.

    By scores that depend on state and item alone.
    """
    thresholds = np.full(len(states), -np.inf, np.float32)
    rows, items, _ = _tighten(candidates, depths, _margins(states, norm), thresholds)
    scores = rescore(states, table, rows, items)
    order = np.lexsort((items, -scores, rows))
    begins = np.searchsorted(rows, np.arange(len(states) + 1)).tolist()
    ends = [b + k for b, k in zip(begins, depths.tolist(), strict=False)]
    chosen = [order[b : min(e, c)] for b, e, c in zip(begins, ends, begins[1:], strict=False)]
    return [(items[some], scores[some]) for some in chosen]


def _margins(states: Floats, norm: float) -> Floats:
    norms: Floats = np.linalg.norm(states, axis=1)
    return (rounding(states.shape[1]) * norm * norms).astype(np.float32)


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


def _tighten(
    candidates: Candidates, depths: Codes, margins: Floats, thresholds: Floats
) -> Candidates:
    """Those that can be among the best, ordered by row and score; thresholds rise to the k-th best.

    The margins are of the k-th best, and of the item that it is compared to.
    """
    rows, items, scores = candidates
    order = np.lexsort((items, -scores, rows))
    rows, items, scores = rows[order], items[order], scores[order]
    begins = np.searchsorted(rows, np.arange(len(depths)))
    last = begins + depths - 1
    full = np.append(rows, -1)[np.minimum(last, len(rows))] == np.arange(len(depths))
    thresholds[full] = scores[last[full]] - margins[full]
    ranks = np.arange(len(rows)) - begins[rows]
    close = (scores >= thresholds[rows]) & (ranks < depths[rows] + _MOST_TIES)
    return rows[close], items[close], scores[close]


def rescore(states: Floats, table: Floats, rows: Codes, items: Codes) -> Floats:
    """Products of some states with some items, in float64, rounded."""
    scores = np.empty(len(rows), np.float32)
    for begin in range(0, len(rows), _RESCORED_AT_ONCE):
        some = slice(begin, begin + _RESCORED_AT_ONCE)
        products = table[items[some]].astype(np.float64)
        products *= states[rows[some]]
        scores[some] = products.sum(1) + 0.0  # + 0.0: there are two zeros
    return scores
