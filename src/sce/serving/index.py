"""Approximate search for catalogues that are too large to score whole: a graph of items (HNSW).

The graph is voyager's, by the cosine. With one more dimension all items have one norm, and the
cosine with a state that has zero there orders them as the inner product does. (Voyager's own space
for inner products finds less: of the ten best of 102,873 real items 66 % at an effort of 100 and
with 12 links, where this finds 74 %.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from sce.serving.onnx_graph import needed
from sce.serving.ranking import Codes, Floats

FROM = 2_000_000
"""Items, from which on the graph takes less time than scoring all, however many ask.

A server's core seconds for a thousand requests of a million items (recall 0.96): 3.7 in the graph
and 7.7 without for one client, 3.1 and 3.6 for 16, 2.6 and 2.5 for 128.
"""
EFFORTS = (100, 200, 400, 800)
GOAL = 0.95
"""Of recall@10: the least effort is taken that reaches it."""
_LINKS, _BUILDING = 16, 200
_MOST = 1000  # items asked of the graph: for more, all items are scored
_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Index:
    """A graph, and how many of its items are looked at."""

    graph: Any
    effort: int = EFFORTS[0]

    @classmethod
    def build(cls, table: Floats) -> "Index":
        """A graph of the items of a table. All cores build it: it is never twice the same."""
        voyager = needed("voyager", "index")
        options = {"M": _LINKS, "ef_construction": _BUILDING, "max_elements": len(table)}
        graph = voyager.Index(voyager.Space.Cosine, table.shape[1] + 1, **options)
        norms = np.linalg.norm(table, axis=1)
        rest = np.sqrt(np.maximum(norms.max(initial=0) ** 2 - norms**2, 0))
        for begin in range(0, len(table), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            ids = range(begin, begin + len(table[some]))
            graph.add_items(np.column_stack([table[some], rest[some]]), [*ids])
        return cls(graph)

    @classmethod
    def read(cls, data: bytes, effort: int) -> "Index":
        """A graph of which these are the bytes."""
        return cls(needed("voyager", "index").Index.load(BytesIO(data)), effort)

    def near(self, states: Floats, depths: Codes, hidden: Sequence[Codes]) -> dict[int, Codes]:
        """Items of large products with states, by row; none of them hidden.

        Without the rows of which fewer are found than are wanted, or so many are wanted that
        scoring all is no slower.
        """
        found: dict[int, Codes] = {}
        wanted = depths + [len(codes) for codes in hidden]
        rows = np.flatnonzero(wanted <= min(_MOST, len(self.graph)))
        if not len(rows):
            return found
        asked, zeros = int(wanted[rows].max()), np.zeros(len(rows), np.float32)
        try:
            items, _ = self.graph.query(
                np.column_stack([states[rows], zeros]),
                k=asked,
                num_threads=1,
                query_ef=max(asked, self.effort),
            )
        except needed("voyager", "index").RecallError:
            return found
        for row, near in zip(rows.tolist(), items.astype(np.int64), strict=True):
            left = near[~np.isin(near, hidden[row])]
            if len(left) >= depths[row]:
                found[row] = left
        return found
