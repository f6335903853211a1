"""Requests, as files of the command line hold them."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sce.data.lines import name_of, parse_line
from sce.data.requests import Id, list_ids
from sce.errors import InputError
from sce.recommend import Recommended, Recommender, Request

_MEMBERS = {"user_id", "history", "k", "keep_seen", "allow", "block", "times"}


def stream_requests(
    recommender: Recommender, lines: Iterable[tuple[int, str]], path: Path, options: dict[str, Any]
) -> Iterator[tuple[Id, Recommended]]:
    """Recommend for lines of JSON, as they come."""
    waiting: deque[Id] = deque()  # users whose histories are being ranked

    def each_request() -> Iterator[Request]:
        for number, text in lines:
            try:
                user, request = _parse(text, number)
            except ValueError as error:
                raise InputError(f"{name_of(path)}, line {number}: {error}") from error
            waiting.append(user)
            yield replace(request, where=f"{name_of(path)}, line {number}")

    found = recommender.stream(each_request(), **options)
    return ((waiting.popleft(), one) for one in found)


def _parse(line: str, number: int) -> tuple[Id, Request]:
    """User and request of a line of JSON; without a user, the line's number."""
    record = parse_line(line, _MEMBERS)
    if not isinstance(record, dict) or not isinstance(record.get("history"), list):
        raise ValueError(f'expected {{"user_id": ..., "history": [item ids]}}, got {line:.80}')
    given = record.pop("user_id", None)
    [user] = list_ids([number if given is None else given], "user_id")
    str(user).encode()  # half a surrogate pair could be read, but not written
    return user, Request(**record)
