"""What runs and exports keep of their items, in files of the same names.

DIR/items_*.npy     the item vocabulary: row i is the id of catalogue index i
DIR/titles_*.npy    titles by catalogue index, laid out as the strings of a vocabulary, if any
DIR/popularity.npy  training events of each item, by catalogue index; older ones have none
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.manifest import write_array
from sce.data.vocabulary import Kind, Vocabulary


class Items(NamedTuple):
    """The items of a catalogue."""

    ids: Vocabulary
    titles: Vocabulary | None = None  # not sorted, only to be decoded
    popularity: NDArray[np.int64] | None = None

    @classmethod
    def read(cls, kind: Kind, files: Mapping[str, NDArray[Any]]) -> "Items":
        """The items in arrays by the names of their files; ValueError when they are of none."""
        arrays = {name.removesuffix(".npy"): array for name, array in files.items()}
        ids, titles = Vocabulary.from_arrays(kind, arrays, "items_"), None
        if "titles_values" in arrays:
            titles = Vocabulary.from_arrays("string", arrays, "titles_")
            if len(titles) != len(ids):
                raise ValueError(f"there are {len(titles):,} titles of {len(ids):,} items")
        counts = arrays.get("popularity")
        if counts is not None and (counts.shape != (len(ids),) or counts.dtype != np.int64):
            raise ValueError(f"popularity.npy is not a count of {len(ids)} items")
        return cls(ids, titles, counts)

    def write(self, directory: Path) -> list[Path]:
        """Write all there is; return the files."""
        arrays = self.ids.arrays("items_")
        if self.titles is not None:
            arrays |= self.titles.arrays("titles_")
        if self.popularity is not None:
            arrays["popularity"] = self.popularity
        files = {directory / f"{name}.npy": array for name, array in arrays.items()}
        for file, array in files.items():
            write_array(file, array)
        return [*files]

    def insert(
        self, ids: Sequence[int | str], titles: Mapping[int | str, str]
    ) -> tuple["Items", NDArray[np.int64]]:
        """The same with new items, of which there is no event, and of each its index here or -1.

        `titles` are by id, of new or old items.
        """
        united, sources = self.ids.insert(ids)
        named, counts = self.titles, self.popularity
        if named is None and titles:
            named = Vocabulary.from_sorted_text(b"", np.zeros(len(self.ids), np.int64))
        if named is not None:
            places = united.lookup([*titles]).tolist()
            named = named.spread(sources, dict(zip(places, titles.values(), strict=True)))
        if counts is not None:
            counts = np.where(sources >= 0, counts[sources], 0)
        return Items(united, named, counts), sources
