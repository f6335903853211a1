"""Directories that are either written whole or not there, and the arrays in them."""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sce.errors import InputError

# 256 bits of BLAKE2b, about a gigabyte a second on one core; `b2sum -l 256 FILE` shows the same.
new_digest = partial(hashlib.blake2b, digest_size=32)


@contextmanager
def whole_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a hidden directory beside `path` to fill, then put it in place in one step.

    Whatever goes wrong inside the block, nothing of it remains. A directory that is replaced is
    moved aside first and removed last, so that at every instant one of the two lies there whole.

    Args:
        path: Where the directory shall be.
        replace: Take the place of the directory that is there.

    Raises:
        InputError: When the directory cannot be written.
    """
    # A link is followed: the directory it names is the one to be replaced, not the link.
    place = path.resolve()
    partial_, aside = (_sibling(place, word) for word in ("partial", "replaced"))
    made: list[Path] = []
    try:
        made = _make_parents(place)
        partial_.mkdir()
        yield partial_
        for file in partial_.iterdir():
            _sync(file)
        _sync(partial_)
        if replace:
            place.rename(aside)
        elif place.is_dir():
            place.rmdir()  # fails unless it is empty
        partial_.rename(place)
        _sync(place.parent)
    except BaseException as error:
        if aside.exists() and not place.exists():
            aside.rename(place)
        shutil.rmtree(partial_, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"cannot write {path}: {_reason(error)}") from error
        raise
    finally:
        if place.exists():
            shutil.rmtree(aside, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Refuse early a directory that could not be made.

    Raises:
        InputError: When the nearest directory above it that is there takes no new files.
    """
    place = path.resolve()
    above = next((parent for parent in place.parents if parent.exists()), place)
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: not allowed to write in {above}")


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a .npy file.

    As `numpy.save` does, except that a full disk is said to be full: numpy leaves that to C, and
    the reason is lost.
    """
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file, read-only."""
    mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped.view(np.ndarray)  # indexing a memmap costs more than indexing an array


def digest_file(path: Path) -> str:
    """The digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def digest_bytes(data: bytes) -> str:
    """The digest of these bytes."""
    return new_digest(data).hexdigest()


def _sibling(path: Path, word: str) -> Path:
    return path.with_name(f".{path.name}.{word}-{secrets.token_hex(4)}")


def _make_parents(path: Path) -> list[Path]:
    """Make the directories above `path`; return those that were not there, innermost first."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere a directory cannot be opened
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk; nothing was kept. Free some space, or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "not allowed to write there; choose another directory, or change its permissions"
    return f"{error.strerror or error}"
