"""Free memory of the host. Allocations never fail on Linux by default: the process is killed."""

import re
from collections.abc import Iterator
from pathlib import Path

from sce.errors import InputError
from sce.units import show_size

REMEDY = "free some, or use a machine that has more"
_RAN_OUT = re.compile(
    r"(?i)out of memory|not enough memory|can.?t allocate memory|memory allocation"
    r"|failed to map segment"
)
_ROOT = Path("/")  # of the system's files; tests have their own


def free_memory() -> int | None:
    """Bytes that this process could still allocate; None where the system does not tell.

    The least of what the host has, and what every control group above this process may still take.
    """
    found = [*_numbers("proc/meminfo", r"MemAvailable:\s+(\d+) kB", unit=1024), *_groups()]
    return max(0, min(found)) if found else None


def require_memory(needed: float, doing: str, remedy: str = REMEDY) -> None:
    """Refuse a step such as "sorting 20,000,000 rows" that needs more bytes than are free."""
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{doing} needs about {show_size(needed)} of memory, and {show_size(free)} is free; "
            f"{remedy}"
        )


def ran_out(error: BaseException) -> str | None:
    """The first line of an error which says that memory ran out; None for any other error.

    It may be of Python, numpy, torch (of a GPU or not), or a panic of polars: no `Exception`.
    """
    while isinstance(error, ImportError) and error.__cause__ is not None:
        error = error.__cause__
    said = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return said or "an allocation failed"
    panic = type(error).__name__ == "PanicException"
    known = panic or isinstance(error, RuntimeError | ImportError)  # a library is mapped too
    return said if known and _RAN_OUT.search(said) else None


def _groups() -> Iterator[int]:
    """Limit less use of every control group of this process, of either version of the interface."""
    for line in _text("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, limit, used = "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"
        elif not controllers:
            root, limit, used = "sys/fs/cgroup", "max", "current"
        else:
            continue
        names = Path(path.lstrip("/"))
        for group in (names, *names.parents):
            folder = f"{root}/{group}"
            most, taken = (_numbers(f"{folder}/memory.{n}", r"\A(\d+)$") for n in (limit, used))
            if most and taken:
                # Files in the page cache count as used and make room when it is wanted.
                kinds = r"(?m)^(?:in)?active_file (\d+)"
                cached = _numbers(f"{folder}/memory.stat", kinds)
                yield most[0] - taken[0] + sum(cached)


def _numbers(file: str, pattern: str, unit: int = 1) -> list[int]:
    return [int(found) * unit for found in re.findall(pattern, _text(file))]


def _text(file: str) -> str:
    try:
        return (_ROOT / file).read_text(errors="replace")
    except OSError:
        return ""
