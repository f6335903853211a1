"""One row of JSON per run: its settings, where and how it ran, and what came of it.

DIR/rows.jsonl is all that a comparison needs. Rows are added, never changed; of two rows about one
run the later counts.
"""

import json
import os
from pathlib import Path
from typing import Any

from sce.errors import InputError

Row = dict[str, Any]

ROWS = "rows.jsonl"
FINISHED, FAILED = "finished", "failed"
OVER_BUDGET = "over the memory budget"  # a kind of failure; not one when the budget is larger


def read_rows(path: Path) -> list[Row]:
    """Read rows, of each run the latest; a line that was cut off by a crash is passed over."""
    found: dict[str, Row] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "key" in row:
                found[row["key"]] = row
    return list(found.values())


def append_row(path: Path, row: Row) -> None:
    """Add a row in one write, and wait until it is on the disk.

    Raises:
        InputError: When it cannot be written.
    """
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with path.open("ab+") as file:
            if file.tell() and not _ends_a_line(file):
                line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
