"""Requests and lists of items, as files of the command line hold them."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from sce.data.formats import COMPRESSIONS, ENDINGS
from sce.data.lines import name_of, parse_line, read_lines
from sce.errors import InputError
from sce.evaluation.ranking import check_depth
from sce.recommend import Recommended, Recommender, Request
from sce.requests import Id
from sce.serving.engine import check_times

_WISHES = ("k", "keep_seen", "allow", "block", "times")
_MEMBERS = {"user_id", "history", *_WISHES}


def read_items(path: Path | None, option: str, column: str | None = None) -> list[Id] | None:
    """Ids of a file: one a line, or the column of items where its name tells a table.

    `column` is what the items of the log were said to be called; the file may call them so too.
    """
    if path is None:
        return None
    name = path.name.lower()
    ending = Path(name.removesuffix(next(filter(name.endswith, COMPRESSIONS), ""))).suffix
    if ending not in ENDINGS:
        listed: list[Id] = [text for _, text in read_lines(path)]
    else:
        try:
            from sce.data.reading import read_item_column
        except ModuleNotFoundError as error:
            raise InputError(
                f"reading {path} needs polars, which is not installed; install it with: pip "
                "install 'scalable-cross-entropy[prepare]', or write one id a line into a .txt file"
            ) from error
        listed = read_item_column(path, column)
    if not listed:
        raise InputError(f"{name_of(path)} ({option}) names no item")
    return listed


def stream_requests(
    recommender: Recommender,
    lines: Iterable[tuple[int, str]],
    path: Path,
    options: dict[str, Any],
) -> Iterator[tuple[Id, Recommended]]:
    """Recommend for lines of JSON, as they come."""
    waiting: deque[Id] = deque()  # users whose histories are being ranked

    def each_request() -> Iterator[Request]:
        for number, text in lines:
            try:
                user, request = _parse(text, number, recommender.n_items)
            except ValueError as error:
                raise InputError(f"{name_of(path)}, line {number}: {error}") from error
            waiting.append(user)
            yield request

    found = recommender.stream(each_request(), **options)
    return ((waiting.popleft(), one) for one in found)


def _parse(line: str, number: int, n_items: int) -> tuple[Id, Request]:
    """User and request of a line of JSON; without a user, the line's number."""
    record = parse_line(line, _MEMBERS)
    history = record.get("history") if isinstance(record, dict) else None
    if not isinstance(history, list):
        raise ValueError(f'expected {{"user_id": ..., "history": [item ids]}}, got {line:.80}')
    user = number if record.get("user_id") is None else record["user_id"]
    request = Request(history, *(record.get(name) for name in _WISHES))
    for name, some in (("allow", request.allow), ("block", request.block)):
        if not isinstance(some, list | None):
            raise ValueError(f"{name} must be a list of ids, got {json.dumps(some):.80}")
    for one in (user, *history, *(request.allow or ()), *(request.block or ())):
        if type(one) not in (int, str):
            raise ValueError(f"ids are integers or strings, got {json.dumps(one)}")
    if type(request.k) not in (int, NoneType) or type(request.keep_seen) not in (bool, NoneType):
        raise ValueError("k must be a whole number, and keep_seen true or false")
    if request.times is not None:
        check_times(request.times, history)
    if request.k is not None:
        check_depth(request.k, n_items)
    str(user).encode()  # half a surrogate pair could be read, but not written
    return user, request
