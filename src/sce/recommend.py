"""Recommend from a trained run: for raw histories of anybody, or for the users of a dataset.

    recommender = Recommender.load("runs/first")
    for found in recommender.recommend([["apple", "pear"], ["plum"]], k=10):
        print(found.items, found.scores)
    best = recommender.recommend(frame, k=10).to_frame()  # frame: columns user_id, item_id

Histories come and go in batches, and the catalogue is scored in chunks: memory grows with neither
the number of histories nor that of users × items, when the `stream` methods are used.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sce.data.columns import BY_NAME, ITEM, Columns, UnitName
from sce.data.frames import histories_of
from sce.data.popular import MostPopular
from sce.data.prepared import PreparedDataset
from sce.data.requests import NONE, Listed, Query, list_ids
from sce.data.requests import Id as Id
from sce.data.requests import Recommended as Recommended
from sce.data.requests import Request as Request
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, check_types, checked, named
from sce.evaluation.queries import Found, ItemFilter, inverse_norms, rank_queries, rank_similar
from sce.evaluation.ranking import Ranker, check_depth, check_memory, largest_norm, uses_times
from sce.memory import require_memory
from sce.requests import SIMILAR, Recommendations, read_filter, read_requests
from sce.training.device import resolve_device
from sce.training.run import Run, load_model, read_weights, warn_of
from sce.units import plural

BATCH_SIZE = 256
# Histories are collected for so many batches: the model computes those of like length together.
BATCHES_TOGETHER = 8
_WINDOW_SECONDS = 10.0  # for these, at most
_IDS_AT_ONCE = 1 << 12

Histories = Iterable[Any]  # sequences or arrays of ids, or requests
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Recommender:
    """A trained model and the ids of the items that it ranks."""

    model: Ranker
    item_ids: Vocabulary
    content_hash: str | None = None
    """Content of the dataset whose users it may recommend for; None for any."""
    columns: Columns = BY_NAME
    """Columns of data frames, if they have no usual names."""
    popularity: NDArray[np.int64] | None = None
    """How often each item was trained on; without it, nobody gets popular items."""
    titles: Vocabulary | None = None
    """Titles by catalogue index, empty where there is none."""
    time_unit: UnitName | None = None
    """Of a data frame's times that are numbers, if the log's was told; None: guessed."""
    times_hash: str = ""
    """Of the times of that dataset, if the model uses them."""

    def __repr__(self) -> str:
        name, items = type(self.model).__name__, plural(len(self.item_ids), "item")
        return f"Recommender({name}, {items}, on {self.model.catalogue.device})"

    def __post_init__(self) -> None:
        check_types(vars(self), get_type_hints(type(self)))
        if len(self.model.catalogue) != len(self.item_ids):
            raise InputError(
                f"the model ranks {len(self.model.catalogue)} items, but there are "
                f"{len(self.item_ids)} item ids: they do not belong together"
            )
        if isinstance(self.model, nn.Module):
            self.model.eval()

    @classmethod
    def load(
        cls, run: Run | Path | str, device: str = "auto", *, model: nn.Module | None = None
    ) -> "Recommender":
        """Load the best weights of a run.

        Args:
            run: The run's directory.
            device: "cpu", "cuda", "cuda:1" …; "auto" is a GPU where there is one.
            model: Built as the one that was trained, where that was of a class of your own: it is
                given the weights. sce builds its own models by itself.
        """
        check_types({"run": run, "device": device}, {"run": Run | Path | str, "device": str})
        place = resolve_device(device)
        opened = run if isinstance(run, Run) else Run.open(run)
        if (file := weights_file(opened)).is_file():  # read, and copied into the model
            require_memory(2 * file.stat().st_size, f"loading {file}")
        if model is None:
            ranker: Any = load_model(opened, place)
        else:
            ranker = _with_weights(model, opened, place)
        warn_of(opened)
        columns = Columns(*map((opened.dataset.columns or {}).get, Columns._fields))
        return cls(
            ranker,
            opened.item_ids,
            opened.dataset.content_hash,
            columns,
            opened.popularity,
            opened.titles,
            opened.dataset.time_unit,
            opened.dataset.times,
        )

    @cached_property
    def _norm(self) -> Tensor:
        return largest_norm(self.model.catalogue.detach())

    @cached_property
    def _popular(self) -> MostPopular | None:
        return None if self.popularity is None else MostPopular(self.popularity)

    @cached_property
    def _inverse_norms(self) -> Tensor:
        return inverse_norms(self.model.catalogue)

    @property
    def n_items(self) -> int:
        """Number of items that are ranked."""
        return len(self.item_ids)

    def recommend(
        self,
        histories: Any,
        k: int = 10,
        *,
        keep_seen: bool = False,
        allow: Listed = None,
        block: Listed = None,
        batch_size: int = BATCH_SIZE,
    ) -> Recommendations:
        """Recommend for histories of item ids.

        Args:
            histories: One sequence of item ids per user, trained on or not, the oldest event first.
                Or a data frame of pandas or polars with a row per event: a column each of users and
                items and, unless the rows are in order, of times, by their usual names or those
                that `prepare` was given; ids and times are read as there. Of a history longer than
                the model takes, the last events count, but all are left out of the result. A
                `Request` instead of a sequence has wishes of its own, and may have times.
            k: Items for each; there are fewer where no more are left.
            keep_seen: Recommend items of the history too.
            allow: Ids of items: only these are recommended, and no others are scored where they
                are few. Ids that are not in the catalogue are skipped, with a warning; not all.
            block: Ids of items that are not recommended to anybody.
            batch_size: Histories at once.

        Returns:
            A list in the order of the histories, users of a data frame in that of their first rows,
            with a method `to_frame`.
        """
        users, backend = None, cast("Any", "polars")
        if hasattr(histories, "columns"):
            by_user, times, backend = histories_of(
                histories, self.columns, timed=uses_times(self.model), unit=self.time_unit
            )
            users = list_ids(list(by_user), "users")
            histories = [Request(one, times=times.get(user)) for user, one in by_user.items()]
        options: dict[str, Any] = {"allow": allow, "block": block, "batch_size": batch_size}
        ranked = self.stream(histories, k, keep_seen=keep_seen, **options)
        found = Recommendations(ranked, users, backend)
        if nothing := sum(not one.known for one in found):
            what = "nothing is" if self.popularity is None else "the most popular items are"
            warnings.warn(
                f"{what} recommended for {nothing:,} of {plural(len(found), 'user')}: none of "
                "their items is in the catalogue",
                stacklevel=2,
            )
        return found

    @checked
    def stream(
        self,
        histories: Histories,
        k: int = 10,
        *,
        keep_seen: bool = False,
        allow: Listed = None,
        block: Listed = None,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Recommended]:
        """Yield what `recommend` gives for sequences of ids, a few batches at a time."""
        self._check(k, batch_size)
        among = read_filter(self.item_ids, allow, block)

        def each_window() -> Iterator[Recommended]:
            done = 0
            for window in _windows(histories, batch_size):
                queries = read_requests(self.item_ids, window, done, k, keep_seen)
                done += len(window)
                yield from self._rank(queries, among, batch_size)

        return each_window()

    @checked
    def stream_users(
        self,
        dataset: PreparedDataset,
        users: Iterable[Id] | None = None,
        k: int = 10,
        *,
        keep_seen: bool = False,
        allow: Listed = None,
        block: Listed = None,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[tuple[Id, Recommended]]:
        """Yield what may come next for users of the log, after all that is known of them.

        The dataset is the one that the run was trained on. Users are given by their own ids; by
        default they are all of the log. One who is not there gets no items. The other options are
        those of `recommend`.
        """
        self._check(k, batch_size)
        if self.content_hash is not None:
            dataset.check_content(self.content_hash, self.times_hash, "the run")
        if dataset.n_items != self.n_items:  # by sce add-items, or of an earlier run
            dataset = dataset.with_items(self.item_ids)
        among, timed = read_filter(self.item_ids, allow, block), uses_times(self.model)

        def each_window() -> Iterator[tuple[Id, Recommended]]:
            chosen = each_id(dataset.everyone) if users is None else users
            for window in _windows(chosen, batch_size):
                ids = list_ids(window, "users")
                codes = dataset.everyone.lookup(ids)
                times = dataset.histories(codes, "times") if timed else [None] * len(ids)
                pairs = zip(dataset.histories(codes), times, strict=True)
                queries = [Query(events, k, keep_seen, times=some) for events, some in pairs]
                found = self._rank(queries, among, batch_size)
                for user, code, one in zip(ids, codes, found, strict=True):
                    yield user, one if code >= 0 else Recommended([], one.scores[:0], 0)

        return each_window()

    @checked
    def similar(
        self, items: Iterable[Id], k: int = 10, *, allow: Listed = None, block: Listed = None
    ) -> Recommendations:
        """The items whose vectors point in nearly the same direction: those of the largest cosine.

        The inner product, by which items are recommended, would rather name popular items. The list
        is in the order of the items, each without itself; `allow` and `block` are as in
        `recommend`.
        """
        check_depth(k, self.n_items)
        among, listed = read_filter(self.item_ids, allow, block), list_ids(items, "items")
        codes = self.item_ids.lookup(listed)
        for n in np.flatnonzero(codes < 0):
            closest = ", ".join(map(str, self.item_ids.closest(listed[n])))
            raise InputError(f"no item {listed[n]!r} in the catalogue; the closest are {closest}")
        catalogue, found = self.model.catalogue.detach(), []
        for first in range(0, len(codes), BATCH_SIZE):
            some = codes[first : first + BATCH_SIZE]
            found += rank_similar(catalogue, self._inverse_norms, some, k, among)
        ranked = self._named([Query(codes[n : n + 1], k, False) for n in range(len(codes))], found)
        ids = self.item_ids.decode(codes)
        return Recommendations(ranked, ids, cast("Any", "polars"), (ITEM, SIMILAR))

    def _rank(
        self, queries: Sequence[Query], among: ItemFilter, batch_size: int
    ) -> list[Recommended]:
        """Rank for queries; those of empty histories get what is popular."""
        filled = [row for row, query in enumerate(queries) if len(query.history)]
        filled.sort(key=lambda row: len(queries[row].history))
        given = [queries[row] for row in filled]
        ranked = rank_queries(self.model, given, among, self._norm, batch_size) if given else []
        by_row = dict(zip(filled, ranked, strict=True))
        found = (by_row.get(n) or self._most_popular(one, among) for n, one in enumerate(queries))
        return self._named(queries, [*found])

    def _most_popular(self, query: Query, among: ItemFilter) -> Found:
        if self._popular is None:
            return NONE, np.empty(0, np.float32)
        if query.allow is not None:
            among = among.narrow(self.n_items, query.allow)
        never = np.union1d(query.block, NONE if among.masked is None else among.masked)
        return self._popular.best(query.k, kept=among.kept, masked=never)

    def _named(self, queries: Sequence[Query], found: Sequence[Found]) -> list[Recommended]:
        """The answers to queries, of items by catalogue index; decoded together."""
        codes, answers = np.concatenate([NONE, *(items for items, _ in found)]), []
        ids = self.item_ids.decode(codes)
        texts = ids if self.titles is None else self.titles.decode(codes)
        titles = (str(text or one) for text, one in zip(texts, ids, strict=True))
        rest = iter(ids)
        for query, (items, scores) in zip(queries, found, strict=True):
            own = None if self.titles is None else list(islice(titles, len(items)))
            listed, popular = list(islice(rest, len(items))), self._popular is not None
            answers.append(query.answer(listed, scores, own, popular=popular))
        return answers

    def _check(self, k: int, batch_size: int) -> None:
        check_depth(k, self.n_items)
        if batch_size < 1:
            raise InputError(f"{named('batch_size')} must be at least 1; got {batch_size}")
        check_memory(self.model.catalogue, batch_size)


def _with_weights(model: nn.Module, run: Run, device: torch.device) -> Ranker:
    """Give a model of the user's own the best weights of a run."""
    if not isinstance(model, nn.Module) or not hasattr(model, "catalogue"):
        raise InputError(
            "a model is a torch module that maps histories to states and has a `catalogue` of item "
            f"vectors; got {model if isinstance(model, type) else type(model).__name__}"
        )
    try:
        model.load_state_dict(read_weights(run))
    except RuntimeError as error:  # names what is missing, and both shapes of what does not fit
        raise InputError(
            f"{type(model).__name__} is not as it was trained in {run.path}: {error}"
        ) from error
    return cast("Ranker", model.to(device))


def weights_file(run: Run) -> Path:
    """The file that a run's weights are read from."""
    return run.best_weights if run.best_weights.is_file() else run.resume_state


def each_id(ids: Vocabulary) -> Iterator[Id]:
    """All ids of a vocabulary."""
    for first in range(0, len(ids), _IDS_AT_ONCE):
        yield from ids.decode(range(first, min(first + _IDS_AT_ONCE, len(ids))))


def _windows(given: Iterable[T], batch_size: int) -> Iterator[list[T]]:
    """Those of several batches; of one at a time where that takes long: it can be saved sooner."""
    rest, batches = iter(given), 1
    while window := list(islice(rest, batch_size * batches)):
        begun = monotonic()
        yield window
        each = (monotonic() - begun) / batches
        batches = BATCHES_TOGETHER if each * BATCHES_TOGETHER < _WINDOW_SECONDS else 1
