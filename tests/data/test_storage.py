import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sce.data.storage import atomic_directory, digest_bytes, digest_file, map_array, write_array
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
    np.testing.assert_array_equal(map_array(tmp_path / "ours.npy"), array, strict=True)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"Python objects|allow_pickle"):
        map_array(tmp_path / "objects.npy")


def test_digests_are_those_of_b2sum(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    expected = hashlib.blake2b(data, digest_size=32).hexdigest()
    assert digest_bytes(data) == digest_file(tmp_path / "file") == expected


def test_nothing_is_seen_before_all_is_written(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "a" / "b") as directory:
        (directory / "file").write_text("content")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "content"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_what_came_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_directory(tmp_path / "a") as directory:
            (directory / "file").write_text("ours")
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "file").write_text("theirs")

    with pytest.raises(InputError, match=r"cannot write .*/a: "):
        write()
    assert (tmp_path / "a" / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
