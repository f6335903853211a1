"""Recommend from a trained run: for raw histories of anybody, or for the users of a dataset.

    recommender = Recommender.load("runs/first")
    for found in recommender.recommend([["apple", "pear"], ["plum"]], k=10):
        print(found.items, found.scores)
    best = recommender.recommend(frame, k=10).to_frame()  # frame: columns user_id, item_id

Histories come and go in batches, and the catalogue is scored in chunks: memory grows with neither
the number of histories nor that of users × items, when the `stream` methods are used.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar, cast, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sce.data.batches import DeviceSequences, history_batch, seen_items
from sce.data.columns import BY_NAME, ITEM, USER, Columns
from sce.data.frames import histories_of
from sce.data.prepared import PreparedDataset, Sequences
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, check_types, checked, named
from sce.evaluation.ranking import (
    NOTHING,
    Ranker,
    check_depth,
    check_memory,
    largest_norm,
    last_states,
    top_k,
)
from sce.memory import require_memory
from sce.models.registry import BACKBONES
from sce.training.device import resolve_device
from sce.training.run import Run, load_model, read_weights, warn_of
from sce.units import plural

BATCH_SIZE = 256
# Histories are collected for so many batches, and those of like length put together: less padding.
BATCHES_TOGETHER = 8
_WINDOW_SECONDS = 10.0  # for these, at most
_IDS_AT_ONCE = 1 << 12
_SHOWN = 3  # in a repr

Id = int | str
Histories = Iterable[Any]  # sequences or arrays of ids
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Recommended:
    """The best items for one history, best first.

    There are fewer than k where the user has seen nearly everything, and none where nothing is
    known of the user: an empty history, one of unknown items only, or a user not in the dataset.
    """

    items: list[Id]
    """Ids of the items."""
    scores: NDArray[np.float32]
    """Their scores; comparable within this history only."""
    known: int
    """Number of events of the history that are in the catalogue."""
    unknown: tuple[Id, ...] = ()
    """The other events, in their order: they were skipped."""

    def __repr__(self) -> str:
        best = ", ".join(map(repr, self.items[:_SHOWN]))
        return f"Recommended({plural(len(self), 'item')}: {best}{' ...' * (len(self) > _SHOWN)})"

    def __len__(self) -> int:
        return len(self.items)

    @property
    def ranks(self) -> NDArray[np.int64]:
        """1 for the best item, 2 for the next, and so on."""
        return np.arange(1, len(self.items) + 1)


class Recommendations(list[Recommended]):
    """Recommendations in the order of the histories."""

    def __init__(
        self, found: Iterable[Recommended], users: Sequence[Id] | None, backend: Any
    ) -> None:
        super().__init__(found)
        self._users, self._backend = users, backend

    def __repr__(self) -> str:
        lines = [f"  {found}" for found in self[:_SHOWN]] + ["  ..."] * (len(self) > _SHOWN)
        return "\n".join([f"Recommendations for {plural(len(self), 'user')}", *lines])

    @checked
    def to_frame(self, kind: Literal["pandas", "polars"] | None = None) -> Any:
        """A data frame with the columns user_id, item_id, score, rank, the rank from 1.

        Args:
            kind: The library; by default that of the frame of histories. Where these were lists,
                polars, and user_id is the number of the history, the first 0.
        """
        import narwhals as nw

        users = range(len(self)) if self._users is None else self._users
        columns = {
            USER: [user for user, found in zip(users, self, strict=True) for _ in found.items],
            ITEM: [item for found in self for item in found.items],
            "score": np.concatenate([np.empty(0, np.float32), *(found.scores for found in self)]),
            "rank": np.concatenate([np.empty(0, np.int64), *(found.ranks for found in self)]),
        }
        return nw.from_dict(columns, backend=kind or self._backend).to_native()


@dataclass(frozen=True, eq=False)
class Recommender:
    """A trained model and the ids of the items that it ranks."""

    model: Ranker
    item_ids: Vocabulary
    content_hash: str | None = None
    """Content of the dataset whose users it may recommend for; None for any."""
    columns: Columns = BY_NAME
    """Columns of data frames, if they have no usual names."""

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
        if model is not None:
            ranker = _with_weights(model, opened, place)
        elif opened.model in BACKBONES:
            ranker = load_model(opened, place)
        else:
            name = opened.model.rpartition(".")[2]
            raise InputError(
                f"the model of {opened.path} is {opened.model}, which sce cannot build; in Python, "
                f"recommender = Recommender.load({str(opened.path)!r}, model={name}(...)) can, and "
                'sce.evaluate(recommender.model, dataset, split="test") measures it'
            )
        warn_of(opened)
        columns = Columns(*map((opened.dataset.columns or {}).get, Columns._fields))
        return cls(ranker, opened.item_ids, opened.dataset.content_hash, columns)

    @cached_property
    def _norm(self) -> Tensor:
        return largest_norm(self.model.catalogue.detach())

    @property
    def n_items(self) -> int:
        """Number of items that are ranked."""
        return len(self.item_ids)

    def recommend(
        self, histories: Any, k: int = 10, *, keep_seen: bool = False, batch_size: int = BATCH_SIZE
    ) -> Recommendations:
        """Recommend for histories of item ids.

        Args:
            histories: One sequence of item ids per user, trained on or not, the oldest event first.
                Or a data frame of pandas or polars with a row per event: a column each of users and
                items and, unless the rows are in order, of times, by their usual names or those
                that `prepare` was given; ids and times are read as there. Of a history longer than
                the model takes, the last events count, but all are left out of the result.
            k: Items for each.
            keep_seen: Recommend items of the history too.
            batch_size: Histories at once.

        Returns:
            A list in the order of the histories, users of a data frame in that of their first rows,
            with a method `to_frame`.
        """
        users, backend = None, cast("Any", "polars")
        if hasattr(histories, "columns"):
            by_user, backend = histories_of(histories, self.columns)
            users, histories = _ids(list(by_user), None), by_user.values()
        ranked = self.stream(histories, k, keep_seen=keep_seen, batch_size=batch_size)
        found = Recommendations(ranked, users, backend)
        if nothing := sum(not one.known for one in found):
            warnings.warn(
                f"nothing is recommended for {nothing:,} of {plural(len(found), 'user')}: none of "
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
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Recommended]:
        """Yield what `recommend` gives for sequences of ids, a few batches at a time."""
        self._check(k, batch_size)

        def each_window() -> Iterator[Recommended]:
            done = 0
            for window in _windows(histories, batch_size):
                listed = [_ids(given, done + n) for n, given in enumerate(window)]
                done += len(window)
                ends = np.cumsum([len(history) for history in listed])[:-1]
                codes = np.split(self.item_ids.lookup(list(chain(*listed))), ends)
                known = [found[found >= 0] for found in codes]
                ranked = self._rank(known, k, keep_seen, batch_size)
                for one, found, history in zip(ranked, codes, listed, strict=True):
                    unknown = tuple(history[n] for n in np.flatnonzero(found < 0))
                    yield Recommended(*one, known=len(found) - len(unknown), unknown=unknown)

        return each_window()

    @checked
    def stream_users(
        self,
        dataset: PreparedDataset,
        users: Iterable[Id] | None = None,
        k: int = 10,
        *,
        keep_seen: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[tuple[Id, Recommended]]:
        """Yield what may come next for users of the dataset, after all that is known of them.

        Args:
            dataset: The dataset that the run was trained on.
            users: The users' own ids; all users by default. One who is not there gets no items.
            k: Items for each.
            keep_seen: Recommend items that a user has had before too.
            batch_size: Users at once.
        """
        self._check(k, batch_size)
        if self.content_hash not in (None, dataset.content_hash):
            raise InputError(
                f"{dataset.path} is not the dataset that the run was trained on: its content is "
                f"{dataset.content_hash[:12]}, the run's {str(self.content_hash)[:12]}"
            )

        def each_window() -> Iterator[tuple[Id, Recommended]]:
            chosen = each_id(dataset.user_ids) if users is None else users
            for window in _windows(chosen, batch_size):
                ids = _ids(window, None)
                known = dataset.histories(dataset.user_ids.lookup(ids))
                found = self._rank(known, k, keep_seen, batch_size)
                for user, one, events in zip(ids, found, known, strict=True):
                    yield user, Recommended(*one, known=len(events))

        return each_window()

    def _rank(
        self,
        histories: Sequence[NDArray[np.integer[Any]]],
        k: int,
        keep_seen: bool,
        batch_size: int,
    ) -> list[tuple[list[Id], NDArray[np.float32]]]:
        """Rank for histories of catalogue indices; empty ones get nothing."""
        found: list[Any] = [([], np.empty(0, np.float32)) for _ in histories]
        filled = [row for row, history in enumerate(histories) if len(history)]
        by_length = sorted(filled, key=lambda row: len(histories[row]))
        for first in range(0, len(by_length), batch_size):
            rows = by_length[first : first + batch_size]
            scores, items = self._rank_batch([histories[row] for row in rows], k, keep_seen)
            real = items != NOTHING
            ids = self.item_ids.decode(items[real])
            ends = np.cumsum(real.sum(1)).tolist()
            for n, (row, begin) in enumerate(zip(rows, [0, *ends], strict=False)):
                found[row] = ids[begin : ends[n]], scores[n][real[n]]
        return found

    @torch.no_grad()
    def _rank_batch(
        self, histories: Sequence[NDArray[np.integer[Any]]], k: int, keep_seen: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        catalogue = self.model.catalogue.detach()
        lengths = [len(history) for history in histories]
        sequences = DeviceSequences.place(
            Sequences(
                items=np.concatenate(histories).astype(np.int32, copy=False),
                offsets=np.cumsum([0, *lengths], dtype=np.int64),
                users=np.arange(len(histories), dtype=np.int32),
            ),
            catalogue.device,
        )
        rows = torch.arange(len(histories))
        most = getattr(self.model, "max_length", None)
        given = history_batch(sequences, rows, max_length=most or max(lengths), held_out=0)
        seen = None if keep_seen else seen_items(sequences, rows, held_out=0)
        states = last_states(self.model, given.histories, most)
        ranking = top_k(states, catalogue, k, seen=seen, norm=self._norm)
        return ranking.scores.cpu().numpy(), ranking.items.cpu().numpy()

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


def _ids(given: Any, place: int | None) -> list[Id]:
    """A list of ids; anything else would be looked up as something that nobody meant."""
    where = "users" if place is None else f"history {place} (the first is 0)"
    if isinstance(given, np.ndarray):
        given = given.tolist()
    unordered = isinstance(given, Set | Mapping)
    if unordered or isinstance(given, str | bytes | int) or not isinstance(given, Iterable):
        raise InputError(f"{where} must be a list of ids; got {given!r}")
    listed = list(given)
    for kind in {type(one) for one in listed} - {int, str}:
        if kind is bool or not issubclass(kind, int | str | np.integer):
            wrong = next(one for one in listed if type(one) is kind)
            raise InputError(
                f"{where}: ids are integers or strings; got {wrong!r} ({kind.__name__})"
            )
    return listed
