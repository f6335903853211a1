"""Files of lines, and JSON in them, as users write them."""

import json
import sys
from collections.abc import Iterator, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sce.errors import InputError, show_value

STDIN = Path("-")
_LONGEST_LINE = 1 << 26  # bytes: a device has no end of line at all


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank."""
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                if len(line) == _LONGEST_LINE:
                    where = f"{name_of(path)}, line {number}"
                    raise InputError(
                        f"{where}: longer than {_LONGEST_LINE:,} bytes; is it a file of lines?"
                    )
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise InputError(f"{name_of(path)}, line {number}: not UTF-8") from error
                if text.strip():
                    yield number, text
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def parse_line(line: str, members: Set[str]) -> Any:
    """Parse a line of JSON; an object may have these members, each once; else ValueError."""
    try:
        record = json.loads(line, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(what) from error
    except RecursionError as error:
        raise ValueError("not a line of ours: nested too deeply") from error
    if isinstance(record, dict) and (unknown := record.keys() - members):
        known = ", ".join(sorted(members))
        raise ValueError(f"the key {show_value(min(unknown))} is none of {known}; remove it")
    return record


def name_of(path: Path) -> str:
    """A file as messages name it."""
    return "standard input" if path == STDIN else str(path)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the object of these pairs of JSON; a key that occurs twice is refused."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise ValueError(f"the key {show_value(twice)} occurs twice; remove one")
    return record
