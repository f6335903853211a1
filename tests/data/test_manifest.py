from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sce.data.manifest import Manifest, map_array, write_array
from sce.errors import InputError


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.int64),
        np.arange(12, dtype=np.uint8)[::2],
        np.array([[1.5, 2.5], [3.5, 4.5]]),
    ],
    ids=["plain", "empty", "strided", "two dimensions"],
)
def test_arrays_are_written_as_numpy_writes_them(tmp_path: Path, array: NDArray[Any]) -> None:
    write_array(tmp_path / "ours.npy", array)
    np.save(tmp_path / "theirs.npy", np.ascontiguousarray(array))
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    with (tmp_path / "ours.npy").open("rb") as file:
        np.testing.assert_array_equal(map_array(file), array, strict=True)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with (tmp_path / "objects.npy").open("rb") as file, pytest.raises(ValueError, match="object"):
        map_array(file)


@pytest.mark.parametrize("head", ["-" * 9000 + "1", "1+" * 4000 + "1", "[" * 9000])
def test_a_head_that_is_nested_deeply_is_a_damaged_file(tmp_path: Path, head: str) -> None:
    size = len(head).to_bytes(2, "little")
    (tmp_path / "deep.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + head.encode())
    with (tmp_path / "deep.npy").open("rb") as file, pytest.raises(ValueError, match="not the hea"):
        map_array(file)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    kind = Manifest("x.json", "x", 1, "x", "sce x", "make it again")
    kind.write(tmp_path, {"files": {300 * "n": {"bytes": 1, "blake2b": ""}}})
    with pytest.raises(InputError, match=rf"cannot read {tmp_path}/n+: File name too long"):
        kind.open(tmp_path)
