"""The prepared dataset on disk: flat integer arrays that training memory-maps; numpy only.

    DIR/dataset.json       format, settings, counts, the size and hash of every file; its checksum
    DIR/train_items.npy    int32 [n]          catalogue indices, sequence after sequence
    DIR/train_offsets.npy  int64 [users + 1]  where each sequence begins
    DIR/train_users.npy    int32 [users]      whose it is: codes into the user vocabulary
    DIR/train_times.npy    int32 [n]          seconds since the first event of the sequence; none if
                           the log has no times
    DIR/test_*.npy         the same for the test sequences
    DIR/user_ids_*.npy     the user vocabulary
    DIR/item_ids_*.npy     the item vocabulary: row i is the id of catalogue index i
    DIR/everyone_*.npy     the vocabulary of all users of the log, also those that filters or the
                           split left out
    DIR/whole_*.npy        whole histories, of those users of whom train and test have less; codes
                           into the vocabulary of all users
    DIR/titles_*.npy       titles of items, if given, by catalogue index; empty where there is none

Nothing in it depends on when, where or from which files it was made: the same log prepared in the
same way gives the same bytes. `content_hash` is the checksum of the arrays before everyone_*, but
for times: of what is trained on and measured. `times_hash` is that of the times, for models that
use them.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sce.data.manifest import Manifest, describe_file, write_array
from sce.data.popular import count_items, popular_half
from sce.data.storage import atomic_directory, check_writable, json_checksum
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, checked, named
from sce.units import plural

MANIFEST = Manifest(
    file="dataset.json",
    format="sce prepared dataset",
    version=2,
    noun="prepared dataset",
    command="sce prepare INPUT",
    remedy="prepare it again",
    shape={
        "settings": {"split?": str},
        "counts": {"order?": dict, "steps?": list},
        "vocabularies": {"user_ids": str, "item_ids": str, "everyone": str},
    },
)
_SEQUENCES = ("train", "test", "whole")
_PARTS = ("train", "test", "user_ids", "item_ids", "everyone", "whole", "titles")  # as in `files`
FEW_USERS = 200  # tested: some percent of error in a metric, and no telling of two apart
_BESIDE = ("everyone_", "whole_", "titles_")  # files that are not part of content_hash
_TIMES = "_times.npy"  # likewise
NO_TIMES = (
    "{} has no times of events (prepared in the order of rows), and this model uses them; prepare "
    "a log with times, or choose a model without (hstu: times none)"
)
MIN_EVALUATED = 3  # a history of at least one event, the validation target, the test target


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of items in time order, one per user, end to end in one array."""

    items: NDArray[np.int32]  # [n] catalogue indices
    offsets: NDArray[np.int64]  # [users + 1]; sequence i is items[offsets[i]:offsets[i + 1]]
    users: NDArray[np.int32]  # [users] codes into the user vocabulary, ascending
    times: NDArray[np.int32] | None = None  # [n] seconds since the first event of the sequence

    def __post_init__(self) -> None:
        dtypes = {"items": np.int32, "offsets": np.int64, "users": np.int32, "times": np.int32}
        for name, dtype in dtypes.items():
            array = getattr(self, name)
            if array is not None and (array.dtype != dtype or array.ndim != 1):
                raise ValueError(
                    f"{name} must be one-dimensional {np.dtype(dtype)}, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        ends = [*self.offsets[:1], *self.offsets[-1:]]
        if len(self.offsets) != len(self.users) + 1 or ends != [0, len(self.items)]:
            raise ValueError(
                f"{len(self.users) + 1} offsets run from 0 to {len(self.items)} items, "
                f"not {self.offsets}"
            )
        if self.times is not None and len(self.times) != len(self.items):
            raise ValueError(f"{len(self.times)} times of {len(self.items)} items")

    def __repr__(self) -> str:
        return f"Sequences({plural(len(self), 'user')}, {plural(len(self.items), 'interaction')})"

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """The items of one sequence; for looking, not for batches."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of items of each sequence."""
        return np.diff(self.offsets)


_NOBODY = Sequences(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """Training and test sequences with their ids, memory-mapped; made by `sce prepare`."""

    path: Path
    settings: dict[str, Any]  # how the log was filtered and split
    counts: dict[str, Any]  # users, items, interactions after each step, and what was left out
    content_hash: str
    train: Sequences
    test: Sequences  # history ..., validation target, test target: three events or more each
    user_ids: Vocabulary
    item_ids: Vocabulary
    everyone: Vocabulary  # all users of the log
    whole: Sequences  # of those of whom train and test have less; codes of everyone
    titles: Vocabulary | None = None  # by catalogue index, unsorted: to decode, not to look up
    times_hash: str = ""  # of the times of train and test; empty: there are none

    def __repr__(self) -> str:
        sizes = f"{plural(len(self.user_ids), 'user')}, {plural(self.n_items, 'item')}"
        lines = [f"PreparedDataset({str(self.path)!r}: {sizes}, split {self.settings.get('split')}"]
        lines += [f"  train: {self.train}", f"  test: {self.test})"]
        return "\n".join(lines)

    @property
    def split(self) -> str:
        """The split in words: "temporal, quantile 0.95, test_history after-cut"; empty: unknown."""
        options = (name for name in ("quantile", "test_history") if name in self.settings)
        told = [f"{name} {self.settings[name]}" for name in options]
        return ", ".join([self.settings.get("split", ""), *told])

    @property
    def order(self) -> dict[str, Any]:
        """Order of each user's events: by, ties, seed, found (`describe_order`), warning."""
        return dict(self.counts.get("order", {}))

    @property
    def n_items(self) -> int:
        """Number of items in the catalogue."""
        return len(self.item_ids)

    @cached_property
    def popular_items(self) -> NDArray[np.bool_]:
        """Which items are popular, by their training events: see `popular_half`."""
        return popular_half(count_items(self.train.items, self.n_items))

    @classmethod
    @checked
    def load(cls, path: Path | str, verify: bool = True) -> "PreparedDataset":
        """Open a prepared dataset, memory-mapped.

        Args:
            path: The directory that `sce prepare` wrote.
            verify: Compare every file with the hash it was written with: about a second per
                gigabyte. Without it, presence, sizes and shapes are still checked.
        """
        path = Path(path)
        manifest, files = MANIFEST.open(path, verify=verify)
        # From train_items to train: items; from user_ids_values to user_ids: values.
        arrays: dict[str, dict[str, NDArray[Any]]] = defaultdict(dict)
        for name, array in files.items():
            owner, _, part = Path(name).stem.rpartition("_")
            arrays[owner][part] = array
        kinds = {"titles": "string", **manifest["vocabularies"]}
        try:
            parts: dict[str, Any] = {name: Sequences(**arrays[name]) for name in _SEQUENCES}
            for name in kinds.keys() & arrays.keys():
                parts[name] = Vocabulary.from_arrays(kinds[name], arrays[name])
            loaded = cls(
                path=path,
                settings=manifest["settings"],
                counts=manifest["counts"],
                **_hashes(manifest["files"]),
                **parts,
            )
            if loaded.titles is not None and len(loaded.titles) != loaded.n_items:
                raise ValueError(f"{len(loaded.titles)} titles of {loaded.n_items} items")
            if verify:
                _check_codes(loaded)
            return loaded
        except (TypeError, ValueError) as error:
            raise MANIFEST.damaged(path, str(error)) from error

    def check_content(
        self, wanted: str | None, times: str, trained: object, remedy: str = "give that one"
    ) -> None:
        """Refuse a dataset of other content, or other times, than something was trained on.

        `times` is a `times_hash`, empty where times were not used.
        """
        misfit = None
        if self.content_hash != wanted:
            known = str(wanted)[:12]
            misfit = f"its content is {self.content_hash[:12]}, and should be {known}"
        elif times not in ("", self.times_hash):
            misfit = f"it has {'other' if self.times_hash else 'no'} times of events"
        if misfit:
            raise InputError(
                f"{self.path} is not the dataset that {trained} was trained on: {misfit}; {remedy}"
            )

    def histories(
        self, users: NDArray[np.int64], part: Literal["items", "times"] = "items"
    ) -> list[NDArray[np.int32]]:
        """Every event with an item of the catalogue, of these users: codes into `everyone`."""
        found = [np.empty(0, np.int32) for _ in users]
        there = np.flatnonzero(users >= 0)
        codes = np.full_like(users, -1)  # most are in the split too, under another code
        codes[there] = self.user_ids.lookup(self.everyone.decode(users[there]))
        # A test sequence has what is trained on of its user, too.
        for sequences, of in ((self.train, codes), (self.test, codes), (self.whole, users)):
            if len(sequences):
                wanted = of.astype(np.int32)  # else the search copies what it searches
                rows = np.searchsorted(sequences.users, wanted).clip(max=len(sequences) - 1)
                if (values := getattr(sequences, part)) is None:
                    raise InputError(NO_TIMES.format(self.path))
                for place in np.flatnonzero(sequences.users[rows] == wanted):
                    begin, end = sequences.offsets[rows[place] : rows[place] + 2]
                    found[place] = values[begin:end]
        return found

    def unite(self, item_ids: Vocabulary, titles: Vocabulary | None = None) -> "PreparedDataset":
        """The dataset in a catalogue that also has the items of another, and their titles.

        Its own items keep the titles that it has, if it has any.
        """
        missing = np.flatnonzero(self.item_ids.lookup_all(item_ids) < 0)
        united, others = self.item_ids, item_ids.decode(missing)
        if not others and (titles is None or self.titles is not None):
            return self
        if others:
            own = united.as_strings() if item_ids.kind == "string" else united
            united, _ = own.insert(others)
        if self.titles is None:
            named = titles and titles.spread(item_ids.lookup_all(united))
        else:
            texts = [""] * len(others) if titles is None else map(str, titles.decode(missing))
            places = dict(zip(united.lookup(others).tolist(), texts, strict=True))
            named = self.titles.spread(self.item_ids.lookup_all(united), places)
        return self.with_items(united, named)

    def with_items(
        self, item_ids: Vocabulary, titles: Vocabulary | None = None
    ) -> "PreparedDataset":
        """The dataset in the codes of a vocabulary that has all of its items, and others too."""
        if item_ids is self.item_ids:
            return replace(self, titles=titles)
        codes = item_ids.lookup_all(self.item_ids).astype(np.int32)
        if (codes < 0).any():
            raise InputError(f"{self.path} has items that are not in the catalogue")
        parts = {name: getattr(self, name) for name in _SEQUENCES}
        recoded: Any = {name: replace(one, items=codes[one.items]) for name, one in parts.items()}
        return replace(self, **recoded, titles=titles, item_ids=item_ids)


def write_prepared(path: Path | str, *, force: bool = False, **content: Any) -> PreparedDataset:
    """Write a prepared dataset, whole or not at all, and open it.

    `content` is that of `fill_prepared`; by default, the users of the log are those of the split,
    of whom it has all. `force` replaces a prepared dataset that is already there.
    """
    exists = check_target(path, force=force)
    content = {"everyone": content["user_ids"], "whole": _NOBODY} | content
    with atomic_directory(Path(path), replace=exists) as directory:
        # Opened before it is put in place: what fails, fails while nothing is there.
        dataset = fill_prepared(directory, **content)
        _check_codes(dataset)
    return replace(dataset, path=Path(path))


def fill_prepared(
    directory: Path,
    *,
    settings: Mapping[str, Any],
    counts: Mapping[str, Any],
    **parts: Sequences | Vocabulary | None,
) -> PreparedDataset:
    """Write what a prepared dataset lacks: the manifest, and arrays that are not there yet.

    `parts` are its sequences and vocabularies, by the names that it has for them. Test sequences
    have three events or more each. `settings` of filters and split and `counts` after each step are
    kept as JSON.
    """
    files: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for owner in _PARTS:
        part = parts.get(owner)
        arrays: dict[str, Any] = {} if part is None else vars(part)
        if isinstance(part, Vocabulary):
            arrays = part.arrays()
            kinds |= {owner: part.kind} if owner != "titles" else {}
        for name, array in arrays.items():
            if array is None:
                continue
            file = directory / f"{owner}_{name}.npy"
            if not file.exists():
                write_array(file, array)
            files[file.name] = describe_file(file)
    content = {"settings": dict(settings), "counts": dict(counts)}
    MANIFEST.write(directory, content | {"vocabularies": kinds, "files": files})
    return PreparedDataset.load(directory, verify=False)


def _hashes(files: Mapping[str, Any]) -> dict[str, Any]:
    """Of content and times: see above."""
    names = [n for n in files if not n.startswith(_BESIDE) and not n.endswith(_TIMES)]
    content = json_checksum({"files": {name: files[name] for name in names}})
    times = [files.get(f"{owner}{_TIMES}") for owner in ("train", "test")]
    known = json_checksum({"files": times}) if None not in times else ""
    return {"content_hash": content, "times_hash": known}


def _check_codes(dataset: PreparedDataset) -> None:
    """Refuse codes without an id or order, sequences that overlap, test sequences too short."""
    for known in (dataset.user_ids, dataset.item_ids, dataset.everyone, dataset.titles):
        if known is not None:
            known.check(titles=known is dataset.titles)
    for sequences, user_ids, least in (
        (dataset.train, dataset.user_ids, 0),
        (dataset.test, dataset.user_ids, MIN_EVALUATED),
        (dataset.whole, dataset.everyone, 0),
    ):
        for name, ids in (("items", dataset.item_ids), ("users", user_ids)):
            codes = getattr(sequences, name)
            if len(codes) and not (codes.min() >= 0 and codes.max() < len(ids)):
                raise ValueError(f"{name} must lie between 0 and {len(ids) - 1}")
        if len(sequences) and int(sequences.lengths.min()) < least:
            raise ValueError(f"a test sequence needs at least {MIN_EVALUATED} items, others 0")
        if np.any(sequences.users[1:] <= sequences.users[:-1]):
            raise ValueError("users must ascend")


def check_target(path: Path | str, *, force: bool = False, manifest: Manifest = MANIFEST) -> bool:
    """Refuse early to write over anything but a directory of this kind that may be replaced.

    Returns:
        True if a prepared dataset, or what the manifest is of, is there, to be replaced.
    """
    path = Path(path)
    check_writable(path, replaced=True)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; name a directory that is not there yet")
    found = {entry.name: entry.is_dir() for entry in path.iterdir()} if path.exists() else {}
    if not found:
        return False
    # By its manifest, not by names: a file of the user's may have any name.
    ours = manifest.listed(path)
    others = sorted(name for name in found if name not in ours or found[name])
    if others:
        raise InputError(
            f"{path} exists and holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}; "
            f"choose another directory ({named('force', True)} replaces nothing but what a "
            f"{manifest.file} of {manifest.command.rpartition(' ')[0]} lists)"
        )
    if not force:
        raise InputError(
            f"{path} exists; choose another directory, or replace it with {named('force', True)}"
        )
    return True
