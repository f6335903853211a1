"""One training at a time in a run's directory."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sce.errors import InputError

LOCK = ".lock"


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
