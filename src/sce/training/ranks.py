"""Where each test user's target stood with the best weights, kept beside result.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sce.data.manifest import describe_file, map_array, write_array
from sce.data.storage import atomic_file
from sce.errors import InputError

RANKS = "test_ranks.npy"


def write_ranks(directory: Path, ranks: NDArray[np.int32]) -> dict[str, Any]:
    """Store ranks from 1 (0: not ranked), in the dataset's order; return size and digest."""
    with atomic_file(directory / RANKS) as file:
        write_array(file, ranks)
    return describe_file(directory / RANKS)


def read_ranks(directory: Path, written: Mapping[str, Any]) -> NDArray[np.int32] | None:
    """Read ranks of this size and digest; None where they were taken away."""
    file = directory / RANKS
    if not file.is_file():
        return None
    if file.stat().st_size != written.get("bytes") or describe_file(file) != written:
        raise _altered(file)
    try:
        with file.open("rb") as opened:
            found: NDArray[np.int32] = map_array(opened)
        if found.dtype != np.int32 or found.ndim != 1:
            raise ValueError(f"{found.dtype} of shape {found.shape}")
    except ValueError as error:
        raise _altered(file) from error
    return found


def _altered(file: Path) -> InputError:
    return InputError(f"{file} was altered; sce evaluate {file.parent} writes it again")
