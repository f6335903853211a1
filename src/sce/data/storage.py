"""Atomic files and directories, locks, JSON with checksums."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sce.data.shapes import misfit, parse_json
from sce.errors import InputError

LOCK = ".lock"
CHECKSUM = "checksum"  # last member of a JSON object
_WHOLE = re.compile(rb'"checksum": "[0-9a-f]{32}"}')  # in a line that has all but its end
# 256 bits of BLAKE2b, about a gigabyte a second on one core; `b2sum -l 256 FILE` shows the same.
new_digest = partial(hashlib.blake2b, digest_size=32)
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2


@contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a hidden directory beside `path` to fill, then put it in place in one step.

    Whatever goes wrong inside the block, nothing of it remains. A directory that is replaced
    exchanges names with the new one. Where the system cannot do that it is moved aside first, and
    back by whoever asks for it next if we are killed before the new one is there: see `tidy`.
    """
    # A link is followed: the directory it names is the one to be replaced, not the link.
    place = path.resolve()
    token = secrets.token_hex(4)
    partial_, aside = (
        place.with_name(f".{place.name}.{word}-{token}") for word in ("partial", "replaced")
    )
    made = [parent for parent in place.parents if not parent.exists()]  # the innermost first
    lock = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = _make_locked(partial_)
        yield partial_
        for file in (*partial_.iterdir(), partial_):
            _sync(file)
        if not (replace and _exchange(partial_, place)):
            if replace:
                place.rename(aside)
            partial_.rename(place)  # fails if anything but an empty directory is there
        with suppress(OSError):  # it is there, whole: too late to fail
            _sync(place.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from error
    finally:
        if aside.exists() and not place.exists():
            aside.rename(place)
        if lock is not None:
            os.close(lock)  # first: it may be that no other can be opened
        for left in (partial_, aside):  # after an exchange the former is what was replaced
            shutil.rmtree(left, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # not empty
                parent.rmdir()


def tidy(path: Path) -> None:
    """Put back what an interrupted command moved aside; remove what such commands left beside it.

    A directory that is being filled is locked by the command that fills it.
    """
    with suppress(OSError, RuntimeError, ValueError):  # a loop of links; NUL in the path
        place = path.resolve()
        ours = re.compile(rf"\.{re.escape(place.name)}\.(partial|replaced)-[0-9a-f]{{8}}")
        for left in place.parent.iterdir():
            kind = ours.fullmatch(left.name)
            if kind and kind[1] == "replaced" and not place.exists():
                left.rename(place)
            elif kind and (lock := _lock(left, os.O_DIRECTORY, certain=True)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path, *, keep: str | None = None) -> Iterator[Path]:
    """Give a file to write, then put it in place once its bytes are on the disk.

    It lies in a directory of its own, with whatever temporary files come with it: what a crash
    leaves is in one place, and the next time it goes. Unless there is a file named `keep` in it:
    then it stays, also when the block is interrupted, for the next command to go on with; bad
    input ends that.
    """
    directory = partial_directory(path)
    partial = directory / path.name
    kept = None if keep is None else directory / keep
    try:
        lock = _make_locked(directory)
        try:
            if kept is None or not kept.exists():
                empty(directory)
            yield partial
            _sync(partial)
            partial.replace(path)
            kept = None
            with suppress(OSError):
                _sync(path.parent)
        except InputError:
            kept = None
            raise
        finally:
            if kept is None or not kept.exists():
                try:  # which takes no file handle: perhaps there is none
                    partial.unlink(missing_ok=True)
                    directory.rmdir()
                except OSError:
                    shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from error


def empty(directory: Path) -> None:
    """Remove all that is in a directory."""
    for left in directory.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def partial_directory(path: Path) -> Path:
    """Directory of a file while it is being written."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def locked(
    directory: Path,
    doing: str = "trained in",
    *,
    patience: float = 0.0,
    inherited: bool = False,
    place: Path | None = None,
) -> Iterator[int]:
    """Hold a directory's lock for the block, and yield its descriptor; it goes with the process.

    Another process is waited for as many seconds as there is `patience`. Where it is `inherited`,
    the descriptor is passed on to child processes, the last of which gives the lock up; the lock's
    file stays. `place` is where the directory will be by the end, if not where it is.
    """
    file = directory / LOCK
    until = time.monotonic() + patience
    while (descriptor := _lock(file, os.O_RDWR | os.O_CREAT)) is None:
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
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} on {platform.node()}".encode())
        yield descriptor
    finally:
        # Else the whole directory was replaced. Removed before it is given up: who opened it
        # meanwhile sees that it is gone.
        file = (place or directory) / LOCK
        if not inherited and is_same(descriptor, file):
            file.unlink()
        os.close(descriptor)


def own_file(path: Path | str, flags: int) -> int:
    """Open a file to write, for `open(..., opener=own_file)`; a symbolic link is refused.

    In a directory that others can write, a link would lead to any file of the user's.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError:
        if not Path(path).is_symlink():
            raise
        raise InputError(
            f"{path} is a symbolic link, and another file would be written through it; remove it"
        ) from None


def check_writable(path: Path, *, replaced: bool = False) -> None:
    """Refuse early a directory that could not be made; tidy up after interrupted commands.

    `replaced`: What is there goes, and must not be the current directory: names that are relative
    to it would lead nowhere.
    """
    try:
        place = path.resolve()
        if replaced and place.exists() and place.samefile(Path()):
            raise InputError(f"{path} is the current directory; name one inside it, or another")
        if ".." in path.parts and not path.parent.exists():
            raise InputError(f"cannot write {path}: there is no {path.parent}; name it without ..")
        with suppress(FileNotFoundError, NotADirectoryError):  # rather now than when all is done
            place.with_name(f".{place.name}.replaced-01234567").stat()
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from error
    above = next((parent for parent in place.parents if parent.exists()), place)
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: not allowed to write in {above}")
    tidy(path)


def json_checksum(value: Mapping[str, Any]) -> str:
    """Checksum of a JSON object, however it is laid out."""
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object with its checksum as last member, whole or not at all."""
    write_text(path, json_line(value, indent=2))


def read_json(path: Path, shape: Any = dict) -> dict[str, Any]:
    """Read what `write_json` wrote; refused if altered, or not of this shape: see `misfit`."""
    return _load(path.read_bytes(), str(path), shape)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a file and wait until it is on the disk; a half-written last line goes."""
    try:
        with open(path, "ab+", opener=own_file) as file:
            file.seek(0)
            content = file.read()
            tail = content.rpartition(b"\n")[2]
            if _WHOLE.search(tail):
                file.write(b"\n")
            else:
                file.truncate(len(content) - len(tail))
            file.write(json_line(record).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason(error)}") from error


def read_json_lines(path: Path, shape: Any = dict) -> list[dict[str, Any]]:
    """Read lines of `json_line` as `read_json` does; a half-written last one is passed over."""
    *lines, tail = path.read_bytes().split(b"\n")
    if _WHOLE.search(tail):  # only its end is missing, or altered
        lines.append(tail)
    return [_load(line, f"{path}, line {number},", shape) for number, line in enumerate(lines, 1)]


def json_line(value: Mapping[str, Any], indent: int | None = None) -> str:
    """An object with its checksum as last member, and its end; in one line unless indented."""
    content = {key: inner for key, inner in value.items() if key != CHECKSUM}
    content[CHECKSUM] = json_checksum(content)
    text = json.dumps(content, ensure_ascii=False, indent=indent, allow_nan=False)
    # File names may hold bytes that are not UTF-8, which Python has as lone surrogates.
    return text.encode(errors="backslashreplace").decode() + "\n"


def _load(data: bytes, where: str, shape: Any) -> dict[str, Any]:
    try:
        content = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is half-written or altered: it is not JSON") from error
    if not isinstance(content, dict) or CHECKSUM not in content:
        raise InputError(f"{where} has no checksum: it was altered, or is of an older sce")
    if content.pop(CHECKSUM) != json_checksum(content):
        raise InputError(f"{where} was altered: its checksum does not fit")
    if (wrong := misfit(content, shape)) is not None:
        raise InputError(f"{where} was altered: {wrong} is missing, or of another kind")
    return content


def digest_bytes(data: bytes) -> str:
    """Digest of bytes."""
    return new_digest(data).hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0)


def reason(error: BaseException) -> str:
    """The reason why something could not be written, and the remedy."""
    of_polars = re.search(r"(os error |Os { code: )(\d+)", str(error))
    number = int(of_polars[2]) if of_polars else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk; free some, or write elsewhere"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "not allowed to write there; choose another directory, or change its permissions"
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many open files; allow more with: ulimit -n 1024"
    return f"{getattr(error, 'strerror', None) or error}"


def _make_locked(directory: Path) -> int:
    """Make a directory, or take over a dead command's, and lock it."""
    while True:
        directory.mkdir(exist_ok=True)
        try:
            if (lock := _lock(directory, os.O_DIRECTORY)) is not None:
                return lock
            raise InputError(f"another command is writing in {directory}; wait for it to end")
        except FileNotFoundError:  # somebody took it for a leftover
            continue
        except OSError:
            with suppress(OSError):  # not empty
                directory.rmdir()
            raise


def _lock(path: Path, flags: int, *, certain: bool = False) -> int | None:
    """Descriptor of a file or directory, locked; None if another process has it.

    Where the file system has no locks nobody is kept apart, unless it must be `certain`.
    """
    while True:
        descriptor = own_file(path, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if certain or isinstance(error, BlockingIOError):
                os.close(descriptor)
                return None
        if is_same(descriptor, path):
            return descriptor
        os.close(descriptor)  # removed meanwhile by the process that had it


def is_same(descriptor: int, path: Path) -> bool:
    """True if the path is still the one that was opened, and not another in its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
