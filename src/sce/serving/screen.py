"""Which items can be among the best? Most are ruled out by products of small integers.

Items and states are rounded to eight bits. Such a product takes a fraction of the time of one of
floats, and the score that it gives is wrong by no more than is known: what cannot be among the
best by that much is left out, the others are scored in full. The ranking stays exact.

The products are made by onnxruntime, which has kernels for integers, and numpy none. Items are
taken in groups, of which it gives the largest product.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.serving.onnx_graph import INT8, INT32, Graph, Run
from sce.serving.ranking import Candidates, Codes, Floats, rounding

GROUP = 32  # items
_CHUNK = 1 << 13  # items of one product, which stays in the cache
_PART = 1 << 18  # items of one model: while it is made, they are copied several times
_LARGEST = 127
_SLACK = 1 + 1e-4  # of bounds: they are computed in floats themselves
_MOST = 8  # one group in so many is looked at; if it were more, none is left out
_PAIRS_AT_ONCE = 1 << 11  # of a state and a group


class Screen:
    """The items of a table, rounded."""

    def __init__(self, table: Floats) -> None:
        self.table, self.n_groups = table, len(table) // GROUP
        self.scale = float(np.abs(table).max(initial=0)) / _LARGEST or 1.0
        self.parts: list[Run] = []
        self.error = self.norm = 0.0  # the largest norms: of what rounding took, and of items
        rounded = self.n_groups * GROUP  # the others are always candidates
        for begin in range(0, rounded, _PART):
            items = table[begin : min(begin + _PART, rounded)]
            integers, errors = _round(items, self.scale)
            self.error = max(self.error, float(errors.max()))
            self.norm = max(self.norm, float(np.linalg.norm(items, axis=1).max()))
            self.parts.append(largest_products(integers))

    def candidates(
        self, states: Floats, depths: Codes, hidden: tuple[Codes, Codes]
    ) -> Candidates | None:
        """All items that can be among the best of each state; None if too many can.

        The arguments are those of `top_k`.
        """
        places, norms = self.n_groups - depths, np.linalg.norm(states, axis=1)
        if places.min() < 0 or not np.isfinite(norms).all():
            return None
        scales = np.abs(states).max(axis=1) / _LARGEST
        scales[scales == 0] = 1
        integers, errors = _round(states, scales[:, None])
        maxima = np.concatenate([part(integers) for part in self.parts], axis=1)
        unit = self.scale * scales  # of the products, as scores
        wrong = self.error + rounding(states.shape[1]) * self.norm
        wrong = norms * wrong + errors * (self.norm + self.error)
        wrong *= _SLACK
        # As many groups as items are wanted have an item each that is not hidden, and as good.
        free = maxima.copy()
        some = hidden[0] < self.n_groups * GROUP
        free[hidden[1][some], hidden[0][some] // GROUP] = np.iinfo(np.int32).min
        free.partition(sorted({*places.tolist()}), axis=1)
        least = free[np.arange(len(states)), places] * unit - wrong
        rows, groups = np.nonzero(maxima >= ((least - wrong) / unit)[:, None])
        if len(rows) * _MOST > maxima.size:
            return None
        parts = [*self._score(states, rows, groups, least), self._rest(states)]
        found_rows, items, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        shown = ~_among(
            found_rows * len(self.table) + items, hidden[1] * len(self.table) + hidden[0]
        )
        return found_rows[shown], items[shown], scores[shown]

    def _score(
        self, states: Floats, rows: Codes, groups: Codes, least: Floats
    ) -> Iterator[Candidates]:
        """Items of groups whose scores are no less than is needed."""
        grouped = self.table[: self.n_groups * GROUP].reshape(self.n_groups, GROUP, -1)
        for begin in range(0, len(rows), _PAIRS_AT_ONCE):
            some = slice(begin, begin + _PAIRS_AT_ONCE)
            row, group = rows[some], groups[some]
            scores = np.matmul(grouped[group], states[row][:, :, None])[:, :, 0]
            pair, place = np.nonzero(scores >= least[row][:, None])
            yield row[pair], group[pair] * GROUP + place, scores[pair, place]

    def _rest(self, states: Floats) -> Candidates:
        """The last items, of which there are too few for a group."""
        first = self.n_groups * GROUP
        scores = states @ self.table[first:].T
        rows, places = np.indices(scores.shape)
        return rows.ravel(), first + places.ravel(), scores.ravel()


def _among(values: Codes, others: Codes) -> NDArray[np.bool_]:
    """As `np.isin`, which takes longer for few."""
    ordered = np.append(np.sort(others), -1)
    found: NDArray[np.bool_] = ordered[np.searchsorted(ordered[:-1], values)] == values
    return found


def _round(vectors: Floats, scales: Any) -> tuple[NDArray[np.int8], Floats]:
    """Integers, and the norms of what they lack."""
    integers = np.rint(vectors / scales).astype(np.int8)
    return integers, np.linalg.norm(vectors - integers * np.float32(scales), axis=1)


def largest_products(items: NDArray[np.int8]) -> Run:
    """From rounded states [b, d] to the largest product of each group of items, [b, groups]."""
    graph = Graph()
    axis = graph.constant(np.array([2]))
    maxima = []
    for begin in range(0, len(items), _CHUNK):
        chunk = items[begin : begin + _CHUNK]
        products = graph.node("MatMulInteger", "states", graph.constant(chunk.T))
        shape = graph.constant(np.array([0, -1, GROUP]))  # 0: as it is
        grouped = graph.node("Reshape", products, shape)
        maxima.append(graph.node("ReduceMax", grouped, axis, keepdims=0))
    largest = graph.node("Concat", *maxima, axis=1)
    given, made = ("states", INT8, items.shape[1]), (largest, INT32, len(items) // GROUP)
    return graph.run(given, made)


def exact_here() -> bool:
    """Whether this machine multiplies integers without saturation, which some kernels have."""
    random = np.random.default_rng(0)
    items, states = random.choice(np.array([-_LARGEST, _LARGEST], np.int8), (2, 2 * GROUP, 64))
    products = states.astype(np.int32) @ items.T.astype(np.int32)
    return np.array_equal(
        largest_products(items)(states), products.reshape(len(states), -1, GROUP).max(axis=2)
    )
