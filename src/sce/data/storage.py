"""Atomic files and directories, locks, digests, arrays and manifests."""

import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
    """
    # A link is followed: the directory it names is the one to be replaced, not the link.
    place = path.resolve()
    token = secrets.token_hex(4)
    partial_, aside = (
        place.with_name(f".{place.name}.{word}-{token}") for word in ("partial", "replaced")
    )
    made = [parent for parent in place.parents if not parent.exists()]  # the innermost first
    try:
        partial_.mkdir(parents=True)
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
    """
    directory = partial_directory(path)
    partial = directory / path.name
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        yield partial
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def partial_directory(path: Path) -> Path:
    """Directory of a file while it is being written."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def locked(
    directory: Path, doing: str = "trained in", *, patience: float = 0.0, inherited: bool = False
) -> Iterator[int | None]:
    """Hold a directory's lock for the block; it goes with the process that has it.

    Args:
        directory: The directory.
        doing: Past participle of the work, for the message.
        patience: Seconds to wait for another process.
        inherited: The descriptor is passed on to child processes, the last of which gives the lock
            up; the lock's file stays.

    Yields:
        The lock's descriptor; None where the system has no such locks.
    """
    file = directory / LOCK
    until = time.monotonic() + patience
    while (descriptor := _take(file)) == -1:
        if time.monotonic() >= until:
            holder = ""
            with suppress(OSError):  # given up at this moment
                holder = file.read_text(errors="replace").strip()
            raise InputError(
                f"{directory} is being {doing} by process {holder or '(starting)'}"
                f"{', or what it left running' if inherited else ''}; wait for it to end, or "
                "choose another directory"
            )
        time.sleep(0.2)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            # Else the whole directory was replaced. Removed before it is given up: who opened it
            # meanwhile sees that it is gone.
            if not inherited and _same(descriptor, file):
                file.unlink()
            os.close(descriptor)


def check_writable(path: Path) -> None:
    """Refuse early a directory that could not be made."""
    place = path.resolve()
    above = next((parent for parent in place.parents if parent.exists()), place)
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: not allowed to write in {above}")


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a .npy file; unlike `numpy.save`, a full disk is reported as such."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(array))
        file.write(array.data)


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file, read-only."""
    mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped.view(np.ndarray)  # indexing a memmap costs more than indexing an array


def digest_file(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def digest_bytes(data: bytes) -> str:
    """Digest of bytes."""
    return new_digest(data).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A kind of directory, described by a JSON file with the size and digest of every other."""

    file: str
    format: str
    version: int
    noun: str  # "prepared dataset"
    command: str  # that makes one: "sce prepare INPUT"
    remedy: str  # "prepare it again"
    is_ours: Callable[[str], object]  # true for the names of its files

    def read(self, path: Path) -> dict[str, Any]:
        """The manifest of a directory; refused unless of this format and version."""
        if not path.exists():
            raise InputError(f"{path} does not exist; make it with: {self.command} --out {path}")
        if not path.is_dir():
            raise InputError(f"{path} is a file, not a {self.noun} (a directory)")
        if not (path / self.file).is_file():
            if any(self.is_ours(entry.name) for entry in path.iterdir()):
                raise self.damaged(path, f"{self.file} is missing")
            raise InputError(
                f"{path} is not a {self.noun}: it has no {self.file}; make one with: {self.command}"
            )
        try:
            manifest = json.loads((path / self.file).read_bytes())
        except ValueError as error:
            raise self.damaged(path, f"{self.file} cannot be read") from error
        if not isinstance(manifest, dict) or manifest.get("format") != self.format:
            raise InputError(f"{path} is not a {self.noun}: its {self.file} is of something else")
        if manifest.get("version") != self.version:
            raise InputError(
                f"{path} has format version {manifest.get('version')}, and this sce reads version "
                f"{self.version}; install the sce that wrote it, or {self.remedy}"
            )
        return manifest

    def check_file(
        self, path: Path, name: str, written: Mapping[str, Any], *, verify: bool = True
    ) -> None:
        """Refuse a file that is missing, or has another size or digest than it was written with."""
        file = path / name
        if not file.is_file():
            raise self.damaged(path, f"{name} is missing")
        size = file.stat().st_size
        if size != written["bytes"]:
            what = f"{name} has {size:,} bytes and was written with {written['bytes']:,}"
            raise self.damaged(path, what)
        if verify and digest_file(file) != written["blake2b"]:
            raise self.damaged(path, f"the content of {name} was altered")

    def damaged(self, path: Path, what: str) -> InputError:
        """The error of a directory that is not as it was written."""
        return InputError(f"{path} is half-written or altered: {what}; {self.remedy}")


def describe_file(file: Path) -> dict[str, Any]:
    """Size and digest of a file, for a manifest."""
    return {"bytes": file.stat().st_size, "blake2b": digest_file(file)}


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


def _take(file: Path) -> int | None:
    """Descriptor of the file, locked; -1 if another process has it, None without locks."""
    try:
        import fcntl
    except ImportError:
        return None  # Windows: nothing is kept apart there
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    except OSError:
        pass  # a file system without locks: better trained without than not at all
    if not _same(descriptor, file):  # removed meanwhile by the process that had it
        os.close(descriptor)
        return _take(file)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()} on {platform.node()}".encode())
    return descriptor


def _same(descriptor: int, file: Path) -> bool:
    """True if the file is still the one that was opened, and not another in its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
