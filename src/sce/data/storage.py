"""Atomic files and directories, locks, digests and arrays: everything that touches the disk."""

import errno
import hashlib
import os
import platform
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

LOCK = ".lock"
# 256 bits of BLAKE2b, about a gigabyte a second on one core; `b2sum -l 256 FILE` shows the same.
new_digest = partial(hashlib.blake2b, digest_size=32)


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
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


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a file to write, then put it in place once its bytes are on the disk.

    It lies in a directory of its own, with whatever temporary files come with it: what a crash
    leaves is in one place, and the next time it goes.

    Raises:
        InputError: When it cannot be written; what was there before is still there.
    """
    directory = partial_directory(path)
    partial = directory / path.name
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        directory.rmdir()
        _sync(path.parent)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def partial_directory(path: Path) -> Path:
    """Where a file lies while it is being written."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have a run's directory to oneself for the block; the lock goes with the process that has it.

    Raises:
        InputError: When another training has it.
    """
    file = directory / LOCK
    descriptor = _take(file, directory)
    try:
        yield
    finally:
        if descriptor is not None:
            if _same(descriptor, file):  # else the whole directory was replaced
                file.unlink()  # before it is given up: who opened it meanwhile sees that it is gone
            os.close(descriptor)


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


def _take(file: Path, directory: Path) -> int | None:
    try:
        import fcntl
    except ImportError:
        return None  # Windows: nothing is kept apart there
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise InputError(
                f"{directory} is being trained in by process {holder or '(starting)'}; wait for "
                "it to end, or choose another directory"
            ) from error
        except OSError:
            pass  # a file system without locks: better trained without than not at all
        if _same(descriptor, file):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {platform.node()}".encode())
            return descriptor
        os.close(descriptor)


def _same(descriptor: int, file: Path) -> bool:
    """Whether the file is still that which was opened, and not another in its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
