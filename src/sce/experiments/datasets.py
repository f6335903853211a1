"""The datasets of a sweep: prepared ones, and synthetic ones that are generated once."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sce.data.prepared import MIN_EVALUATED, PreparedDataset, Sequences, write_prepared
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError


@dataclass(frozen=True)
class Synthetic(SyntheticSettings):
    """A log from the generator, split by leave-one-out, over a catalogue of exactly `items`.

    Items that do not occur are in the catalogue too: its size is what is swept over.
    """

    test_users: int | None = None
    """Users that are evaluated. [default: all]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_events < MIN_EVALUATED:
            raise InputError(f"min_events must be at least {MIN_EVALUATED}; got {self.min_events}")
        if self.test_users is not None and not 0 <= self.test_users <= self.users:
            raise InputError(f"test_users are some of the {self.users}; got {self.test_users}")


@dataclass(frozen=True)
class DatasetEntry:
    """A table [datasets.NAME] of a sweep file."""

    settings: Mapping[str, Mapping[str, Any]]  # over those of base, for runs on this dataset
    path: str | None = None
    synthetic: Synthetic | None = None


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset, by name."""

    name: str
    path: Path
    content_hash: str
    n_items: int
    split: str = ""
    times_hash: str = ""

    @classmethod
    def of(cls, name: str, prepared: PreparedDataset) -> "Dataset":
        """Name a prepared dataset."""
        about = prepared.content_hash, prepared.n_items, prepared.split, prepared.times_hash
        return cls(name, prepared.path, *about)

    def times_for(self, settings: Mapping[str, Any]) -> str:
        """Hash of the times, if the model of these settings uses them."""
        return self.times_hash if settings.get("model.times", "none") != "none" else ""


def open_datasets(
    entries: Mapping[str, DatasetEntry], given: Sequence[str], place: Path, *, write: bool = True
) -> list[Dataset]:
    """Open the datasets that are given (as PATH or NAME=PATH), or else those of the sweep file.

    Synthetic ones that are missing in `place` are generated; without `write`, only described.
    """
    found = [open_dataset(one) for one in given]
    for one, other in itertools.combinations(found, 2):
        if one.name == other.name:
            raise InputError(
                f"{one.path} and {other.path} are both called {one.name}; give one another name: "
                f"--data other={other.path}"
            )
        if one.content_hash == other.content_hash:
            raise InputError(f"{one.name} and {other.name} are the same data; leave one out")
    for name, entry in entries.items() if not given else ():
        if entry.synthetic is not None:
            found.append(synthesize(name, entry.synthetic, place / name, write=write))
        elif entry.path is not None:
            found.append(Dataset.of(name, PreparedDataset.load(entry.path, verify=False)))
    if not found:
        raise InputError("the settings file names no dataset; give prepared ones with --data")
    return found


def open_dataset(given: str) -> Dataset:
    """Open a prepared dataset, given as PATH or NAME=PATH; its name is that of its directory."""
    name, equals, path = given.rpartition("=")
    if not equals or Path(given).exists():
        name, path = Path(given).resolve().name, given
    if not name or not set(name).isdisjoint("/\\ "):
        raise InputError(f"the name of a dataset is one word; got {name!r} in {given!r}")
    # The runs verify the files; here the manifest, which holds their hashes, is enough.
    return Dataset.of(name, PreparedDataset.load(path, verify=False))


def synthesize(name: str, made: Synthetic, path: Path, *, write: bool = True) -> Dataset:
    """Generate a dataset, unless it lies at `path` already; without `write`, only describe it."""
    settings: dict[str, Any] = {"synthetic": asdict(made), "split": "leave-one-out"}
    if path.exists():
        found = PreparedDataset.load(path, verify=False)
        if found.settings != settings:
            raise InputError(
                f"{path} was generated with {found.settings.get('synthetic')}, and "
                f"{asdict(made)} are asked for; name the dataset otherwise, or choose another --out"
            )
        return Dataset.of(name, found)
    if not write:
        return Dataset(name, path, f"not made: {path}", made.items)
    blocks = list(generate(made))
    items = np.concatenate([block.items.astype(np.int32) for block in blocks])
    lengths = np.concatenate([np.unique(b.users, return_counts=True)[1] for b in blocks])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tested = made.users if made.test_users is None else made.test_users
    users = np.arange(made.users, dtype=np.int32)
    trained = lengths - 2 * (users < tested)  # the last two events are the targets
    position = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)  # within a user
    train_offsets = np.concatenate([[0], np.cumsum(trained)]).astype(np.int64)
    prepared = write_prepared(
        path,
        train=Sequences(items[position < np.repeat(trained, lengths)], train_offsets, users),
        test=Sequences(items[: offsets[tested]], offsets[: tested + 1].copy(), users[:tested]),
        user_ids=Vocabulary.from_integers(np.arange(made.users)),
        item_ids=Vocabulary.from_integers(np.arange(made.items)),
        settings=settings,
        counts={},
    )
    return Dataset.of(name, prepared)
