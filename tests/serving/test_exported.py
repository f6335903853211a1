"""Exports that were edited and given right digests: one sentence, or the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from sce.data.manifest import describe_file
from sce.errors import InputError
from sce.serving.exported import MANIFEST, TABLE, open_export
from tests.serving.tiny_export import write_export

SIZE = 4 * 40 * 8


def header(**changes: Any) -> bytes:
    table = {"dtype": "F32", "shape": [40, 8], "data_offsets": [0, SIZE]} | changes
    return json.dumps({"catalogue": table}).encode()


def write_forged(path: Path, table: bytes | None = None, **changes: Any) -> None:
    write_export(path)
    if table is not None:
        (path / TABLE).write_bytes(len(table).to_bytes(8, "little") + table + bytes(SIZE))
    content = MANIFEST.read(path) | changes
    content["files"][TABLE] = describe_file(path / TABLE)
    MANIFEST.write(path, content)


def test_a_table_as_it_should_be(tmp_path: Path) -> None:
    write_forged(tmp_path / "export", header())
    assert open_export(tmp_path / "export").table.shape == (40, 8)


@pytest.mark.parametrize(
    "table",
    [
        b"[]",
        b"null",
        b"[" * 50_000,
        header(dtype="F16"),
        header(shape=[320]),
        header(shape=[-1, 8]),
        header(shape=[True, 8]),
        header(data_offsets=[-8, SIZE - 8]),
        header(data_offsets=[0, SIZE, 0]),
    ],
    ids=lambda table: table[-60:].decode(),
)
def test_a_table_that_is_none_is_refused(table: bytes, tmp_path: Path) -> None:
    write_forged(tmp_path / "export", table)
    with pytest.raises(InputError, match="export is half-written or altered"):
        open_export(tmp_path / "export")


def test_a_length_that_is_none_is_refused(tmp_path: Path) -> None:
    write_forged(tmp_path / "export", max_length=0)
    with pytest.raises(InputError, match="altered: its max_length is 0"):
        open_export(tmp_path / "export")
