"""The datasets of a sweep: prepared ones, and synthetic ones that are generated once."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.prepared import MIN_EVALUATED, PreparedDataset, Sequences, write_prepared
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError


@dataclass(frozen=True)
class Synthetic:
    """A log from the generator, split by leave-one-out, over a catalogue of exactly `items`.

    Items that do not occur are in the catalogue too: its size is what is swept over.
    """

    items: int
    users: int
    seed: int = 0
    mean_events: float = 40.0
    min_events: int = 20
    test_users: int | None = None
    """How many of the users are evaluated. [default: all]"""

    def __post_init__(self) -> None:
        least = 2 * SyntheticSettings.cluster_size
        if self.items < least:
            raise InputError(
                f"items must be at least {least}: they come in clusters of "
                f"{SyntheticSettings.cluster_size}, and it takes two; got {self.items}"
            )
        self.log()
        if self.min_events < MIN_EVALUATED:
            raise InputError(f"min_events must be at least {MIN_EVALUATED}; got {self.min_events}")
        if self.test_users is not None and not 0 <= self.test_users <= self.users:
            raise InputError(f"test_users are some of the {self.users}; got {self.test_users}")

    def log(self) -> SyntheticSettings:
        """The settings of the generator."""
        return SyntheticSettings(
            items=self.items,
            users=self.users,
            seed=self.seed,
            mean_events=self.mean_events,
            min_events=self.min_events,
        )


@dataclass(frozen=True)
class Dataset:
    """A dataset of the sweep, by name."""

    name: str
    prepared: PreparedDataset
    expected_events: int | None = None
    """In training, where it is not made yet."""

    @property
    def n_events(self) -> int:
        """Training events, or about as many as there will be."""
        if self.expected_events is not None:
            return self.expected_events
        return len(self.prepared.train.items)

    @property
    def content_hash(self) -> str:
        """Of everything in it."""
        return self.prepared.content_hash

    @property
    def n_items(self) -> int:
        """The size of its catalogue."""
        return self.prepared.n_items


def open_dataset(given: str) -> Dataset:
    """Open a prepared dataset, given as PATH or NAME=PATH; its name is that of its directory.

    Raises:
        InputError: When there is none.
    """
    name, equals, place = given.rpartition("=")
    if not equals or Path(given).exists():
        name, place = Path(given).resolve().name, given
    if not name or not set(name).isdisjoint("/\\ "):
        raise InputError(f"the name of a dataset is one word; got {name!r} in {given!r}")
    # The runs verify the files; here the manifest, which holds their hashes, is enough.
    return Dataset(name, PreparedDataset.load(place, verify=False))


def synthesize(name: str, made: Synthetic, place: Path, *, write: bool = True) -> Dataset:
    """Generate a dataset, unless it lies at `place` already.

    Args:
        name: Of the dataset.
        made: What it is like.
        place: Where it lies.
        write: Without it nothing is generated: a stand-in has the items, and no users.

    Raises:
        InputError: When something else lies there.
    """
    settings: dict[str, Any] = {"synthetic": asdict(made), "split": "leave-one-out"}
    if place.exists():
        found = PreparedDataset.load(place, verify=False)
        if found.settings != settings:
            raise InputError(
                f"{place} was generated with {found.settings.get('synthetic')}, and "
                f"{asdict(made)} are asked for; name the dataset otherwise, or choose another --out"
            )
        return Dataset(name, found)
    tested = made.users if made.test_users is None else made.test_users
    if not write:
        nobody = Sequences(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))
        ids = [Vocabulary.from_integers(np.arange(count)) for count in (0, made.items)]
        stand_in = PreparedDataset(place, settings, {}, f"not made: {place}", nobody, nobody, *ids)
        return Dataset(name, stand_in, round(made.users * made.mean_events) - 2 * tested)
    items, lengths = _events(made)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    users = np.arange(made.users, dtype=np.int32)
    trained = lengths - 2 * (users < tested)  # the last two events are the targets
    rows = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)  # place within a user
    train = Sequences(items[rows < np.repeat(trained, lengths)], _offsets(trained), users)
    test = Sequences(items[: offsets[tested]], offsets[: tested + 1].copy(), users[:tested])
    return Dataset(
        name,
        write_prepared(
            place,
            train=train,
            test=test,
            user_ids=Vocabulary.from_integers(np.arange(made.users)),
            item_ids=Vocabulary.from_integers(np.arange(made.items)),
            settings=settings,
            counts={},
        ),
    )


def _events(made: Synthetic) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The items of all users, end to end, and how many each has."""
    items: list[NDArray[np.int32]] = []
    lengths: list[NDArray[np.int64]] = []
    for block in generate(made.log()):
        items.append(block.items.astype(np.int32))
        lengths.append(np.unique(block.users, return_counts=True)[1].astype(np.int64))
    return np.concatenate(items), np.concatenate(lengths)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def check_names(datasets: list[Dataset]) -> Iterator[Dataset]:
    """Yield them, refusing two of one name, and one under two names.

    Raises:
        InputError: When two have the same name, or the same content.
    """
    seen: dict[str, Path] = {}
    names: dict[str, str] = {}  # by content
    for dataset in datasets:
        path = dataset.prepared.path
        if dataset.name in seen:
            raise InputError(
                f"{seen[dataset.name]} and {path} are both called {dataset.name}; give one another "
                f"name: --data other={path}"
            )
        if dataset.content_hash in names:
            raise InputError(
                f"{names[dataset.content_hash]} and {dataset.name} are the same data; leave one out"
            )
        seen[dataset.name], names[dataset.content_hash] = path, dataset.name
        yield dataset
