"""Places of faults in files, for the person who has to mend them.

Reading is fast and says little when it fails; here the file is read once more, slowly, line by
line, up to the fault. None of this runs when the file is sound.
"""

import csv
import gzip
import io
import itertools
import json
import math
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import polars as pl

from sce.data.columns import CONVERT, encoding_hint
from sce.data.formats import Format
from sce.errors import InputError

_CHUNK = 1 << 18
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd's without content


def explain(path: Path, fmt: Format, error: BaseException) -> InputError:
    """The error for a file that could not be read, with the line of its first fault."""
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, OSError):
        unopened = isinstance(error, FileNotFoundError | PermissionError)
        if not unopened and (compression := _compression(path)):
            return InputError(
                f"{path}: this {compression} file is truncated or corrupt ({reason}); "
                "fetch it again, or compress it again"
            )
        return InputError(f"{path}: cannot be read: {reason}")
    if fmt.layout == "parquet":
        return InputError(f"{path}: no parquet file, or truncated ({reason})")
    fault = _first_fault(path, fmt, "utf" in reason.lower())
    if fault:
        return InputError(f"{path}, line {fault[0]}: {fault[1]}")
    return InputError(f"{path}: malformed {fmt.name} ({reason})")


def check_compression(path: Path) -> None:
    """Refuse what pzstd writes: it begins with a frame that is to be skipped, and polars reads."""
    with path.open("rb") as file:
        if _SKIPPED.match(file.read(4)):
            raise InputError(
                f"{path}: zstd as pzstd writes it; compress it again: zstd -dc FILE | zstd > OTHER"
            )


def first_lines(path: Path) -> list[bytes]:
    """The first hundred lines of a file that is no parquet."""
    return list(itertools.islice(_raw_lines(path, 100), 100))


def first_objects(path: Path) -> list[dict[str, Any]]:
    """Objects on the first hundred lines of a jsonl file, blank ones aside."""
    objects = [_load(line.decode(errors="replace")) for line in first_lines(path) if line.strip()]
    if not objects or not all(isinstance(one, dict) for one in objects):
        raise json.JSONDecodeError("no object", "", 0)
    return objects


def check_json_ids(path: Path, column: str) -> None:
    """Refuse a line in which an id is neither an integer nor a string of Unicode."""
    for number, line in enumerate(_lines(path), 1):
        value = _load(line).get(column) if line.strip() else None
        if (
            isinstance(value, list | dict | bool)
            or (isinstance(value, float) and not (value.is_integer() and abs(value) < 2**53))
            or (isinstance(value, str) and value.encode(errors="ignore").decode() != value)
        ):
            raise InputError(
                f"{path}, line {number}, column {column!r}: ids must be integers or strings, not "
                f"{json.dumps(value)[:40]}"
            )


def count_names(path: Path, columns: Sequence[str]) -> list[float]:
    """How often the name of each column occurs in a jsonl file, quoted: as a key, or otherwise.

    Infinitely often where escapes may spell it.
    """
    counts, escaped = [0.0] * len(columns), _escaped(columns)
    with open_log(path) as file:
        while chunk := file.read(_CHUNK):
            chunk += file.readline()
            counts = [
                count + sum(map(chunk.count, _quoted(column)))
                for count, column in zip(counts, columns, strict=True)
            ]
            if b"\\" in chunk and escaped.search(chunk):
                return [math.inf] * len(columns)
    return counts


def check_json_keys(path: Path, columns: Sequence[str]) -> None:
    """Refuse a line in which a column occurs twice."""
    escaped = _escaped(columns)
    for number, line in enumerate(_raw_lines(path), 1):
        for column in columns:
            if sum(map(line.count, _quoted(column))) > 1 or escaped.search(line):
                keys = [key for key, _ in json.loads(line, object_pairs_hook=list)]
                if keys.count(column) > 1:
                    raise InputError(
                        f"{path}, line {number}: the key {column!r} occurs twice; remove one"
                    )


def _quoted(column: str) -> set[bytes]:
    """A name as JSON writes it, in ASCII or in UTF-8."""
    return {json.dumps(column, ensure_ascii=ascii_).encode() for ascii_ in (True, False)}


def _escaped(columns: Sequence[str]) -> re.Pattern[bytes]:
    """A character of the names, in ASCII, that is escaped and need not be."""
    signs = {sign for sign in "".join(columns) if sign.isascii()}
    codes = sorted(f"u{ord(sign):04x}" for sign in signs) + ["/"] * ("/" in signs)
    return re.compile(rb"\\(?i:%s)" % "|".join(codes).encode())


def place_of_row(path: Path, fmt: Format, row: int) -> str:
    """Line on which a row begins, the first after the header being row 0."""
    if fmt.layout == "parquet":
        return f"row {row + 1}"
    if fmt.layout == "jsonl":
        numbers = (n for n, line in enumerate(_lines(path), 1) if line.strip())
    else:
        rows = _csv_rows(path, fmt)
        numbers = (n for n, _ in itertools.islice(rows, int(fmt.fields is None), None))
    try:
        return f"line {next(itertools.islice(numbers, row, None))}"
    except (csv.Error, pl.exceptions.PolarsError, StopIteration):
        return f"row {row + 1} after the header"  # Python's csv is stricter than polars


def _first_fault(path: Path, fmt: Format, encoding: bool) -> tuple[int, str] | None:
    number, empty, text = 0, True, ""
    try:
        if encoding:
            for line in _raw_lines(path):
                number += 1
                line.decode()
        elif fmt.layout == "jsonl":
            for number, text in enumerate(_lines(path), 1):
                if text.lstrip().startswith("["):
                    return number, "no JSON object but an array; write a line for each: jq -c '.[]'"
                if text.strip() and not isinstance(_load(text), dict):
                    return number, f"{text.strip()[:40]!r} is no JSON object"
                empty = empty and not text.strip()
            if empty:
                return number, "the end, and no JSON object so far"
        else:
            columns = len(fmt.fields or next(_csv_rows(path, fmt))[1])
            for number, fields in _csv_rows(path, fmt):
                if any(fields[columns:]):
                    return number, f"{len(fields)} fields where there are {columns} columns"
            for number, text in enumerate(_lines(path), 1):
                if fmt.quote and text.count(fmt.quote) % 2:
                    told = "inside a field it is doubled, and the field quoted"
                    return number, f"a {fmt.quote} without another on its line; {told}"
    except UnicodeDecodeError as error:
        return number, f"not UTF-8 ({error.reason}); {CONVERT}"
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at column {error.colno}"
        hint = encoding_hint(text) or "; every line must hold one whole object: jq -c . writes so"
        return number, f"malformed JSON ({fault}){hint}"
    except RecursionError:
        return number, "nested too deeply to be read"
    except csv.Error as error:
        begin, fault = error.args
        return begin, f"malformed csv from here on ({fault})"
    except pl.exceptions.PolarsError:
        pass  # the lines cannot even be told apart
    return None


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # of Python, for thousands of digits
        raise json.JSONDecodeError("A number with too many digits", text, 0) from error


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no JSON", name, 0)


def _csv_rows(path: Path, fmt: Format) -> Iterator[tuple[int, list[str]]]:
    """Rows from the first that is not blank, each with the number of the line it begins on."""
    reader = csv.reader(
        _lines(path),
        delimiter=fmt.separator,
        quotechar=fmt.quote,
        quoting=csv.QUOTE_NONE if fmt.quote is None else csv.QUOTE_MINIMAL,
        strict=True,
    )
    begin, started = 1, False
    usual = csv.field_size_limit(2**31 - 1)  # else a long text is taken for a fault
    try:
        for fields in reader:
            started = started or bool(fields)
            if started:
                yield begin, fields
            begin = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(begin, str(error)) from error
    finally:
        csv.field_size_limit(usual)


def _lines(path: Path) -> Iterator[str]:
    return (line.decode(errors="replace") for line in _raw_lines(path))


def _raw_lines(path: Path, most: int | None = None) -> Iterator[bytes]:
    try:
        with open_log(path, most) as file:
            yield from file
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


@contextmanager
def open_log(path: Path, most: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file that is no parquet, decompressed and after its byte order mark.

    `most` lines are enough where it is zstd, which Python reads only from 3.14 on.
    """
    compression = _compression(path)
    if compression == "zstd":
        lines = pl.scan_lines(path, glob=False, n_rows=most).collect(engine="streaming")
        text = lines.to_series().str.join("\n").cast(pl.Binary).item()
        opened: Any = io.BytesIO(text + b"\n")
    else:
        opened = (gzip.open if compression == "gzip" else open)(path, "rb")
    with opened as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        yield file


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        start = file.read(4)
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
