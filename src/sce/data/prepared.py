"""The prepared dataset on disk: flat integer arrays that training memory-maps; numpy only.

    DIR/dataset.json       format, settings, counts, the size and hash of every file
    DIR/train_items.npy    int32 [n]          catalogue indices, sequence after sequence
    DIR/train_offsets.npy  int64 [users + 1]  where each sequence begins
    DIR/train_users.npy    int32 [users]      whose it is: codes into the user vocabulary
    DIR/test_*.npy         the same for the test sequences
    DIR/user_ids_*.npy     the user vocabulary
    DIR/item_ids_*.npy     the item vocabulary: row i is the id of catalogue index i

Nothing in it depends on when, where or from which files it was made: the same log prepared in the
same way gives the same bytes, and `content_hash` names them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.storage import (
    atomic_directory,
    check_writable,
    digest_bytes,
    digest_file,
    map_array,
    write_array,
)
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

MANIFEST = "dataset.json"
_OF_DATASET = re.compile(
    r"dataset\.json|(train|test)_(items|offsets|users)\.npy|(user|item)_ids_\w+\.npy"
)
FORMAT = "sce prepared dataset"
VERSION = 1
MIN_EVALUATED = 3  # a history of at least one event, the validation target, the test target

_SEQUENCES = ("train", "test")
_VOCABULARIES = ("user_ids", "item_ids")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of items in time order, one per user, end to end in one array."""

    items: NDArray[np.int32]  # [n] catalogue indices
    offsets: NDArray[np.int64]  # [users + 1]; sequence i is items[offsets[i]:offsets[i + 1]]
    users: NDArray[np.int32]  # [users] codes into the user vocabulary, ascending

    def __post_init__(self) -> None:
        wanted = {"items": np.int32, "offsets": np.int64, "users": np.int32}
        for name, dtype in wanted.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(
                    f"{name} must be one-dimensional {np.dtype(dtype)}, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        if len(self.offsets) != len(self.users) + 1:
            raise ValueError(
                f"{len(self.users)} users need one offset more, got {len(self.offsets)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.items):
            raise ValueError(
                f"offsets must run from 0 to the {len(self.items)} items, "
                f"got {self.offsets[0]} to {self.offsets[-1]}"
            )

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """The items of one sequence; for looking, not for batches."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many items each sequence has."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class PreparedDataset:
    """What training, evaluation and recommending read: made by `sce prepare`."""

    path: Path
    settings: dict[str, Any]  # how the log was filtered and split
    counts: dict[str, Any]  # users, items, interactions after each step, and what was left out
    content_hash: str
    train: Sequences
    test: Sequences  # history ..., validation target, test target: three events or more each
    user_ids: Vocabulary
    item_ids: Vocabulary

    @property
    def n_items(self) -> int:
        """How many items the catalogue has."""
        return len(self.item_ids)

    @classmethod
    def load(cls, path: Path | str, verify: bool = True) -> "PreparedDataset":
        """Open a prepared dataset, memory-mapped.

        Args:
            path: The directory that `sce prepare` wrote.
            verify: Compare every file with the hash it was written with: about a second per
                gigabyte. Without it, presence, sizes and shapes are still checked.

        Raises:
            InputError: When there is no prepared dataset, or it is not as it was written.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, written in files.items():
            _check_file(path, name, written, verify)
        try:
            arrays = {Path(name).stem: map_array(path / name) for name in files}
            train, test = (Sequences(**_with_prefix(arrays, f"{name}_")) for name in _SEQUENCES)
            user_ids, item_ids = (
                Vocabulary.from_arrays(
                    manifest["vocabularies"][name], _with_prefix(arrays, f"{name}_")
                )
                for name in _VOCABULARIES
            )
        except (TypeError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        return cls(
            path=path,
            settings=manifest["settings"],
            counts=manifest["counts"],
            content_hash=manifest["content_hash"],
            train=train,
            test=test,
            user_ids=user_ids,
            item_ids=item_ids,
        )


def write_prepared(
    path: Path | str,
    *,
    train: Sequences,
    test: Sequences,
    user_ids: Vocabulary,
    item_ids: Vocabulary,
    settings: Mapping[str, Any],
    counts: Mapping[str, Any],
    force: bool = False,
) -> PreparedDataset:
    """Write a prepared dataset, whole or not at all, and open it.

    Args:
        path: The directory to make.
        train: Training sequences.
        test: Sequences to evaluate on, each of three events or more.
        user_ids: The users that the sequences name.
        item_ids: The catalogue.
        settings: How it was made, to be kept beside the data: anything JSON can hold.
        counts: What was counted on the way, likewise.
        force: Replace a prepared dataset that is already there.

    Raises:
        InputError: When something else is there already, or it cannot be written.
    """
    for sequences in (train, test):
        _check_codes(sequences, len(user_ids), len(item_ids))
    if len(test) and int(test.lengths.min()) < MIN_EVALUATED:
        raise ValueError(f"a test sequence needs at least {MIN_EVALUATED} items")
    replace = check_target(path, force=force)
    arrays = {
        f"{name}_{part}": array
        for name, owner in [("train", train), ("test", test)]
        for part, array in vars(owner).items()
    } | {
        f"{name}_{part}": array
        for name, vocabulary in [("user_ids", user_ids), ("item_ids", item_ids)]
        for part, array in vocabulary.arrays().items()
    }
    with atomic_directory(Path(path), replace=replace) as directory:
        files = {}
        for name, array in arrays.items():
            file = directory / f"{name}.npy"
            write_array(file, array)
            files[file.name] = {"bytes": file.stat().st_size, "blake2b": digest_file(file)}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "content_hash": "",
            "settings": dict(settings),
            "counts": dict(counts),
            "vocabularies": {"user_ids": user_ids.kind, "item_ids": item_ids.kind},
            "files": files,
        }
        manifest["content_hash"] = _content_hash(manifest)
        text = json.dumps(manifest, ensure_ascii=False, indent=2, allow_nan=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return PreparedDataset.load(path, verify=False)


def check_target(path: Path | str, *, force: bool = False) -> bool:
    """Refuse early to write where something is that must not be lost.

    Returns:
        Whether a prepared dataset is there, to be replaced.

    Raises:
        InputError: When something is there, and not a prepared dataset or not to be replaced.
    """
    path = Path(path)
    if not path.exists():
        check_writable(path)
        return False
    if not path.is_dir():
        raise InputError(f"{path} is a file; name a directory that is not there yet")
    if path.resolve() == Path.cwd():
        raise InputError(f"{path} is the current directory; name one inside it, or another")
    check_writable(path)
    found = {file.name for file in path.iterdir()}
    if not found:
        return False
    # Whole or damaged, a dataset is known by the names of its files.
    others = sorted(name for name in found if not _OF_DATASET.fullmatch(name))
    if others:
        raise InputError(
            f"{path} exists and holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}; "
            "choose another directory (--force replaces nothing but prepared datasets)"
        )
    if not force:
        raise InputError(f"{path} exists; choose another directory, or replace it with --force")
    return True


def _read_manifest(path: Path, whole: bool = True) -> dict[str, Any]:
    """Read dataset.json; unless it need not be whole, it must be as it was written."""
    if not path.exists():
        raise InputError(f"{path} does not exist; make it with: sce prepare INPUT --out {path}")
    if not path.is_dir():
        raise InputError(f"{path} is a file, not a prepared dataset (a directory)")
    file = path / MANIFEST
    if not file.is_file():
        if any(_OF_DATASET.fullmatch(entry.name) for entry in path.iterdir()):
            raise _damaged(path, f"{MANIFEST} is missing")
        raise InputError(
            f"{path} is not a prepared dataset: it has no {MANIFEST}; make one with: sce prepare"
        )
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST} cannot be read") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not a prepared dataset: its {MANIFEST} is of something else")
    if manifest.get("version") != VERSION:
        raise InputError(
            f"{path} has format version {manifest.get('version')}, and this sce reads version "
            f"{VERSION}; install the sce that wrote it, or prepare it again"
        )
    if whole and manifest.get("content_hash") != _content_hash(manifest):
        raise _damaged(path, f"{MANIFEST} was altered")
    return manifest


def _check_file(path: Path, name: str, written: Mapping[str, Any], verify: bool) -> None:
    file = path / name
    if not file.is_file():
        raise _damaged(path, f"{name} is missing")
    size = file.stat().st_size
    if size != written["bytes"]:
        raise _damaged(path, f"{name} has {size:,} bytes and was written with {written['bytes']:,}")
    if verify and digest_file(file) != written["blake2b"]:
        raise _damaged(path, f"the content of {name} was altered")


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is half-written or altered: {what}; prepare it again")


def _check_codes(sequences: Sequences, n_users: int, n_items: int) -> None:
    for name, codes, size in [
        ("items", sequences.items, n_items),
        ("users", sequences.users, n_users),
    ]:
        if len(codes) and not (codes.min() >= 0 and codes.max() < size):
            raise ValueError(f"{name} must lie between 0 and {size - 1}")


def _with_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _content_hash(manifest: Mapping[str, Any]) -> str:
    """The hash of everything: dataset.json without this hash, and by its hashes every array."""
    rest = {key: value for key, value in manifest.items() if key != "content_hash"}
    return digest_bytes(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode())
