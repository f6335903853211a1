"""A log of interactions, in memory or in parts on disk, and counts of it.

A part has whole users, in their order. What works on parts takes a list with one part for a log in
memory.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from sce.data.manifest import map_array, write_array, write_header
from sce.data.vocabulary import WORD, Kind, Vocabulary

T = TypeVar("T")
Arrays: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Interactions:
    """An encoded log of interactions.

    The rows are sorted by user code, then timestamp; rows of one user at the same time keep the
    order of the input: that of the files given, then of the lines in them.
    """

    users: NDArray[np.int32]  # [n] codes into user_ids
    items: NDArray[np.int32]  # [n] codes into item_ids
    timestamps: NDArray[np.int64]  # [n] microseconds since 1970-01-01 UTC
    user_ids: Vocabulary
    item_ids: Vocabulary
    dropped: int = 0  # rows of the input that were left out, as they lack a user, item or time

    def __len__(self) -> int:
        return len(self.users)

    def where(self, kept: NDArray[np.bool_]) -> "Interactions":
        """Some of the rows, with the vocabularies of all."""
        rows = (self.users[kept], self.items[kept], self.timestamps[kept])
        return Interactions(*rows, self.user_ids, self.item_ids, self.dropped)


@dataclass(frozen=True)
class Tally:
    """Counts of distinct users, distinct items and interactions, as in the paper's table."""

    name: str
    users: int
    items: int
    interactions: int


class TallyOfParts:
    """Counts of parts of a log that have no user in common."""

    def __init__(self, n_items: int) -> None:
        self._users = self._interactions = 0
        self._present = np.zeros(n_items, bool)

    def add(self, part: Interactions) -> None:
        """Count one part more."""
        self._users += int(np.count_nonzero(np.diff(part.users, prepend=np.int32(-1))))
        self._present[part.items] = True
        self._interactions += len(part)

    def tally(self, name: str) -> Tally:
        """Counts of all parts."""
        return Tally(name, self._users, int(np.count_nonzero(self._present)), self._interactions)


class DiskList(Generic[T]):
    """Parts whose arrays lie in files; a part is mapped anew each time that it is used."""

    def __init__(
        self, directory: Path, pack: Callable[[T], Arrays], unpack: Callable[[Arrays], T]
    ) -> None:
        """Make an empty list in a directory of its own; `pack` gives the arrays of a part."""
        directory.mkdir()
        self._directory, self._pack, self._unpack = directory, pack, unpack
        self._parts: list[dict[str, Path]] = []
        self._copied: list[dict[str, Path]] = []
        self._written = 0

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[T]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> T:
        arrays = {}
        for name, path in self._parts[index].items():
            with path.open("rb") as file:
                arrays[name] = map_array(file)
        return self._unpack(arrays)

    def __setitem__(self, index: int, part: T) -> None:
        # Into new files: the old ones may be mapped.
        old, self._parts[index] = self._parts[index], self._write(part)
        if old not in self._copied:
            _unlink(old)

    def append(self, part: T) -> None:
        """Add a part behind the others."""
        self._parts.append(self._write(part))

    def clear(self) -> None:
        """Remove all parts."""
        while self._parts:
            _unlink(self._parts.pop())

    def copy(self) -> "DiskList[T]":
        """A list of the same files, to be read: they stay when parts of this one are replaced."""
        other = copy(self)
        other._parts = self._copied = self._parts.copy()
        return other

    def _write(self, part: T) -> dict[str, Path]:
        self._written += 1
        arrays = self._pack(part)
        files = {name: self._directory / f"{self._written:06}-{name}.npy" for name in arrays}
        for name, array in arrays.items():
            write_array(files[name], array)
        return files


def _unlink(files: Mapping[str, Path]) -> None:
    for path in files.values():
        path.unlink()


Parts: TypeAlias = list[T] | DiskList[T]


def tally_parts(name: str, parts: Parts[Interactions]) -> Tally:
    """Counts of all parts, of which there is at least one."""
    tally = TallyOfParts(len(next(iter(parts)).item_ids))
    for part in parts:
        tally.add(part)
    return tally.tally(name)


def stored_log(directory: Path, user_kind: Kind, item_ids: Vocabulary) -> DiskList[Interactions]:
    """A list for parts of one log, each with a vocabulary of its own users."""

    def pack(part: Interactions) -> Arrays:
        ids = part.user_ids.arrays("id_")
        return {"users": part.users, "items": part.items, "timestamps": part.timestamps, **ids}

    def unpack(arrays: Arrays) -> Interactions:
        rows = (arrays["users"], arrays["items"], arrays["timestamps"])
        return Interactions(*rows, Vocabulary.from_arrays(user_kind, arrays, "id_"), item_ids)

    return DiskList(directory, pack, unpack)


class GrowingArrays:
    """Arrays that grow at their end: in memory, or in .npy files of a directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._arrays: dict[str, NDArray[Any]] = {}  # in memory; there is one part, as a rule
        self._sizes: dict[str, int] = {}

    def append(self, name: str, array: NDArray[Any], *, over: int = 0) -> None:
        """Add values to an array, or begin it; the first of them replace the last `over`."""
        begins = name not in self._sizes
        self._sizes[name] = len(array) if begins else self._sizes[name] - over + len(array)
        if self._directory is None:
            if not begins:
                array = np.concatenate([self._arrays[name][: -over or None], array])
            self._arrays[name] = array
            return
        with self._path(name).open("wb" if begins else "r+b") as file:
            write_header(file, array.dtype, (self._sizes[name],))
            file.seek(0 if begins else -over * array.itemsize, os.SEEK_END)
            file.write(np.ascontiguousarray(array).data)

    def append_ids(self, owner: str, ids: Vocabulary) -> None:
        """Add ids that come behind all that are there to a vocabulary."""
        if ids.offsets is not None:
            begin = self._sizes.get(f"{owner}_values", WORD) - WORD
            self.append(f"{owner}_offsets", ids.offsets + begin, over=1)
        self.append(f"{owner}_values", ids.values, over=0 if ids.offsets is None else WORD)

    def take(self, owner: str) -> dict[str, NDArray[Any]]:
        """Take arrays named owner_... out, by the rest of their names."""
        found = {}
        for name in self._sizes:
            if name.startswith(f"{owner}_"):
                if self._directory is None:
                    array = self._arrays.pop(name)
                else:
                    with self._path(name).open("rb") as file:
                        array = map_array(file)
                found[name.removeprefix(f"{owner}_")] = array
        return found

    def _path(self, name: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{name}.npy"
