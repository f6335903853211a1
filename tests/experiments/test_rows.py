import json
from pathlib import Path

import pytest

from sce.errors import InputError
from sce.experiments.rows import append_row, read_rows


def test_of_two_rows_about_one_run_the_later_counts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3}]
    for row in rows:
        append_row(file, row)
    assert read_rows(file) == [{"key": "a", "n": 3}, {"key": "b", "n": 2}]
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_row_that_was_cut_off_harms_no_other(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "rows.jsonl"
    append_row(file, {"key": "a"})
    with file.open("a") as out:
        out.write(json.dumps({"key": "b"})[:cut])
    append_row(file, {"key": "c"})
    assert [row["key"] for row in read_rows(file)] == ["a", "c"]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        append_row(tmp_path / "none" / "rows.jsonl", {"key": "a"})
