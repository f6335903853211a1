"""Recommending from an export, without torch.

    engine = Engine.load("exports/clicks")
    (found,) = engine.recommend([Request(["apple", "pear"], k=10)])
    print(found.items, found.scores)

Requests that are given together are computed together. An engine never changes: any number of
threads may use it, and a new export is a new engine, of another `version`. A server calls
`one_core_a_call()` first, and `recommend` from as many threads as it has cores: threads of BLAS
wait for each other busily at every product, which beside other work takes several times as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sce.data.popular import MostPopular
from sce.data.requests import NONE, Query, Recommended, list_request, look_up
from sce.data.requests import Id as Id
from sce.data.requests import Request as Request
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, show_value
from sce.serving.exported import MANIFEST, Exported, open_export
from sce.serving.index import FROM, Index
from sce.serving.onnx_graph import needed, onnx_function
from sce.serving.ranking import Codes, Floats, rank, rescore, rounding, top_k, warm_up
from sce.serving.screen import Screen, exact_here

_SCREENED = 1 << 15  # items, from which on integers rule out most: below, all are scored sooner
Encode = Callable[..., Floats]
"""From embedded histories [b, l, d], their lengths [b] and, if the model uses them, the times of
events [b, l + 1] to states [b, d]."""


@dataclass(frozen=True, eq=False)
class Engine:
    """An encoder, a table of items, and their ids."""

    encode: Encode
    table: Floats
    """Item vectors, [n_items, dim]."""
    item_ids: Vocabulary
    max_length: int
    """Events of a history that count: the last ones."""
    version: str
    """Checksum of the content."""
    titles: Vocabulary | None = None
    """Titles by catalogue index, to be decoded: `titles.decode(item_ids.lookup(ids))`."""
    popularity: NDArray[np.int64] | None = None
    """Training events of each item."""
    dataset: tuple[str | None, str] = None, ""
    """Content of the dataset that it was trained on, and of its times, if it uses them."""
    index: Index | None = None
    """Where the best items are searched, instead of scoring all; lists of allowed ones, and what
    is offered, are not."""
    offered: Codes | None = None
    """The items that may be recommended, ascending indices; without, all. Only they are scored."""
    uses_times: bool = False
    """The encoder is given the times of events."""
    screened: bool = False
    """Rule out most of many items by integers, with onnxruntime; the ranking is the same."""
    _norms: Floats = field(init=False, repr=False)
    _norm: float = field(init=False, repr=False)  # the largest

    def __post_init__(self) -> None:
        norms = np.sqrt(np.einsum("nd,nd->n", self.table, self.table))
        object.__setattr__(self, "_norms", norms)
        object.__setattr__(self, "_norm", float(norms.max(initial=0)))
        warm_up()

    @classmethod
    def load(cls, path: Path | str, *, threads: int = 1, index: bool | None = None) -> "Engine":
        """Load an export of `sce export RUN --format onnx`.

        Args:
            path: The directory.
            threads: Of the encoder; 0 for as many as there are cores.
            index: Search approximately; by default where the export has an index and items are so
                many that it takes less time.

        Raises:
            InputError: When there is none, or it is not as it was written.
        """
        path = Path(path)
        exported = open_export(path)
        name = exported.manifest["encoder"]
        if not name.endswith(".onnx"):
            raise InputError(f"{path} has {name}, which needs torch; export with --format onnx")
        try:
            encode = onnx_function(exported.encoder, threads=threads)
        except RuntimeError as error:
            raise MANIFEST.damaged(path, f"{name} cannot be read") from error
        if index and exported.graph is None:
            raise InputError(f"{path} has no index; make one with: sce export RUN --index")
        return cls.of(exported, encode, index=index)

    @classmethod
    def of(cls, exported: Exported, encode: Encode, *, index: bool | None = None) -> "Engine":
        """An engine of an export's items with an encoder, that of the export or its equal."""
        many = len(exported.table) >= FROM
        graph = exported.graph if index or (index is None and many) else None
        effort = exported.manifest.get("index", {}).get("effort", 0)
        run = exported.manifest["run"]
        return cls(
            encode=encode,
            table=exported.table,
            item_ids=exported.items.ids,
            max_length=exported.manifest["max_length"],
            version=exported.version,
            titles=exported.items.titles,
            popularity=exported.items.popularity,
            dataset=(run["dataset"], run.get("times", "")),
            uses_times=exported.manifest.get("times", False),
            index=None if graph is None else Index.read(graph.tobytes(), effort),
            screened=exported.manifest["encoder"].endswith(".onnx"),
        )

    @cached_property
    def _screen(self) -> Screen | None:
        wanted = self.screened and len(self._shelf) >= _SCREENED and exact_here()
        return Screen(self._shelf) if wanted else None

    @cached_property
    def _popular(self) -> MostPopular | None:
        return None if self.popularity is None else MostPopular(self.popularity, self.offered)

    @cached_property
    def _shelf(self) -> Floats:
        """Vectors of what is offered."""
        return self.table if self.offered is None else self.table[self.offered]

    @cached_property
    def _places(self) -> Codes:
        """The place of each item on the shelf, -1 where it is not offered."""
        places = np.full(self.n_items, -1)
        places[self.offered] = np.arange(len(self._shelf))
        return places

    @property
    def n_items(self) -> int:
        """Number of items in the catalogue."""
        return len(self.table)

    @property
    def dim(self) -> int:
        """Dimensions of states and items."""
        return int(self.table.shape[1])

    def check(self, request: Request) -> list[list[Id]]:
        """Refuse a request that cannot be answered; return its lists: see `list_request`.

        Raises:
            InputError: `recommend` raises it too, for all requests that are given together.
        """
        k = 10 if request.k is None else request.k
        if type(k) is not int or not 1 <= k <= self.n_items:
            raise InputError(
                f"k is a whole number from 1 to {self.n_items:,}, the items of the catalogue; got "
                f"{show_value(k)}"
            )
        return list_request(request)

    def recommend(self, requests: Sequence[Request]) -> list[Recommended]:
        """Recommend for histories; results are in the order of the requests."""
        queries = look_up(self.item_ids, requests, [self.check(one) for one in requests])
        found, popular = self._rank(queries), self._popular is not None
        return [
            query.answer(self.item_ids.decode(items), scores, popular=popular)
            for query, (items, scores) in zip(queries, found, strict=True)
        ]

    def similar(self, item: Id, k: int = 10) -> Recommended:
        """The items whose vectors have the largest cosine with this one's; scores are cosines."""
        self.check(Request([item], k))
        (code,) = self.item_ids.lookup([item])
        if code < 0:
            raise InputError(f"item {show_value(item)} is not in the catalogue")
        norms = np.maximum(self._norms, np.finfo(np.float32).tiny)
        vector = self.table[code : code + 1] / norms[code]
        scores = (self.table @ vector[0]) / norms
        scores[code] = -np.inf
        if self.offered is not None:
            scores[self._places < 0] = -np.inf
        place = max(0, self.n_items - k)
        least = np.partition(scores, place)[place] - np.float32(rounding(self.dim))
        close = np.flatnonzero(scores >= least)
        close = close[scores[close] > -np.inf]
        exact = rescore(vector, self.table, np.zeros_like(close), close) / norms[close]
        order = np.lexsort((close, -exact))[:k]
        return Recommended(self.item_ids.decode(close[order]), exact[order], known=1)

    def states(
        self, histories: Sequence[Codes], times: Sequence[Codes | None] | None = None
    ) -> Floats:
        """States [b, d] after histories of catalogue indices, none of them empty.

        Those of like length are computed together. `times` are seconds of the events.
        """
        states = np.empty((len(histories), self.dim), np.float32)
        lengths = np.array([min(len(one), self.max_length) for one in histories], np.int64)
        widths = 1 << np.ceil(np.log2(lengths)).astype(np.int64)  # the next power of two
        for width in np.unique(widths):
            rows = np.flatnonzero(widths == width)
            codes = np.zeros((len(rows), lengths[rows].max()), np.int64)
            seconds = np.zeros((len(rows), codes.shape[1] + 1), np.int32)
            for row, padded, at in zip(rows.tolist(), codes, seconds, strict=True):
                padded[: lengths[row]] = histories[row][-lengths[row] :]
                if times is not None and (known := times[row]) is not None:
                    at[: lengths[row]] = known[-lengths[row] :]
                    at[lengths[row]] = known[-1]
            more = (seconds,) if self.uses_times else ()
            states[rows] = self.encode(self.table[codes], lengths[rows], *more)
        return states

    def _rank(self, queries: Sequence[Query]) -> list[tuple[Codes, Floats]]:
        """Rank the catalogue for all queries together, and lists of allowed items one by one."""
        ranked: list[tuple[Codes, Floats]] = [(NONE, np.empty(0, np.float32))] * len(queries)
        hidden = [one.hidden for one in queries]
        filled = [row for row, one in enumerate(queries) if len(one.history)]
        given = [queries[row].history for row in filled], [queries[row].times for row in filled]
        states = dict(zip(filled, self.states(*given), strict=True))
        for row, one in enumerate(queries):
            codes, k = one.allow, one.k
            if codes is not None:
                codes = np.setdiff1d(codes, hidden[row])
                codes = codes if self.offered is None else codes[self._places[codes] >= 0]
            if row not in states:
                if self._popular is not None:
                    ranked[row] = self._popular.best(k, kept=codes, masked=hidden[row])
            elif codes is not None and len(codes):
                ((places, scores),) = top_k(
                    states[row][None], self.table[codes], np.array([k]), (NONE, NONE), self._norm
                )
                ranked[row] = codes[places], scores
        rows = [row for row in filled if queries[row].allow is None]
        if rows:
            depths = np.array([queries[row].k for row in rows], np.int64)
            found = self._best(
                np.stack([states[row] for row in rows]), depths, [hidden[row] for row in rows]
            )
            for row, best in zip(rows, found, strict=True):
                ranked[row] = best
        return ranked

    def _best(
        self, states: Floats, depths: Codes, hidden: Sequence[Codes]
    ) -> list[tuple[Codes, Floats]]:
        """The best of the catalogue for each state, given how many, and which not."""
        if self.index is None or self.offered is not None:
            return self._exact(states, depths, hidden)
        near = self.index.near(states, depths, hidden)
        found, some = {}, [*near]
        if near:
            rows = np.repeat(np.arange(len(near)), [len(items) for items in near.values()])
            items = np.concatenate([*near.values()])
            candidates = rows, items, rescore(states[some], self.table, rows, items)
            ranked = rank(states[some], self.table, depths[some], candidates, self._norm)
            found = dict(zip(some, ranked, strict=True))
        if rest := [row for row in range(len(states)) if row not in near]:
            exact = self._exact(states[rest], depths[rest], [hidden[row] for row in rest])
            found |= dict(zip(rest, exact, strict=True))
        return [found[row] for row in range(len(states))]

    def _exact(
        self, states: Floats, depths: Codes, hidden: Sequence[Codes]
    ) -> list[tuple[Codes, Floats]]:
        """The best out of all items."""
        table, of = self._shelf, np.repeat(np.arange(len(states)), [len(one) for one in hidden])
        flat = np.concatenate(hidden), of
        if self.offered is not None:
            places = self._places[flat[0]]
            flat = places[places >= 0], of[places >= 0]
        found = self._screen and self._screen.candidates(states, depths, flat)
        if found:
            best = rank(states, table, depths, found, self._norm)
        else:
            best = top_k(states, table, depths, flat, self._norm)
        if self.offered is None:
            return best
        return [(self.offered[places], scores) for places, scores in best]


def one_core_a_call() -> None:
    """Let BLAS use one thread a call, in this whole process."""
    needed("threadpoolctl").threadpool_limits(1, "blas")
