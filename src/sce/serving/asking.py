"""What clients ask, read from JSON and checked against limits."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sce.data.lines import unique_keys
from sce.data.requests import Id, Request, check_times, list_ids
from sce.errors import InputError, show_value

_KNOWN = {"user", "history", "k", "allow", "block", "keep_seen", "times"}


@dataclass(frozen=True)
class OfUser(Request):
    """A request for a user of the log, whose history is looked up."""

    history: Iterable[Id] = ()
    user: Id = ""


@dataclass(frozen=True)
class Limits:
    """What is refused beyond."""

    body: int = 1 << 20
    """Bytes of a request's body."""
    k: int = 1000
    """Items asked for."""
    ids: int = 10_000
    """Ids in a history, an allow-list or a block-list."""
    requests: int = 256
    """Requests in a list."""
    items: int = 10_000
    """Items asked for by all requests of a list together."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InputError(f"--limits.{name} must be at least 1; got {value}")


def read_requests(body: bytes, limits: Limits) -> tuple[list[Request], bool]:
    """The requests in a body of JSON: one, or a list of them (True)."""
    try:
        given = json.loads(body, object_pairs_hook=unique_keys)
    except RecursionError:
        raise InputError("the body is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(given, list):
        return [read_request(given, limits)], False
    if not 1 <= len(given) <= limits.requests:
        raise InputError(
            f"a list has 1 to {limits.requests:,} requests (--limits.requests); got {len(given):,}"
        )
    found = []
    for number, one in enumerate(given):
        try:
            found.append(read_request(one, limits))
        except InputError as error:
            raise InputError(f"request {number}: {error}") from None
    wanted = sum(one.k or 0 for one in found)
    if wanted > limits.items:
        raise InputError(
            f"a list asks for up to {limits.items:,} items in all (--limits.items); got {wanted:,}"
        )
    return found, True


def read_request(given: Any, limits: Limits) -> Request:
    """One request, checked."""
    if not isinstance(given, dict):
        raise InputError(
            f'a request is an object such as {{"history": [1, 2]}}; got {show_value(given)}'
        )
    if unknown := given.keys() - _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise InputError(f"{show_value(min(unknown))} is no part of a request: {known}")
    if "history" in given and "user" in given:
        raise InputError("a request has a history or a user, whose history is known; got both")
    if "history" not in given and "user" not in given:
        raise InputError(
            "a request needs a history, a list of item ids, the oldest first, or instead a user"
        )
    if "user" in given and type(given["user"]) not in (int, str):
        raise InputError(f"user is an id, integer or string; got {show_value(given['user'])}")
    for name in ("history", "allow", "block"):
        needed = name == "history" and "user" not in given
        size = len(list_ids(given[name], name)) if needed or given.get(name) is not None else 0
        if size > limits.ids:
            raise InputError(
                f"{name} has {size:,} ids; at most {limits.ids:,} are taken "
                "(--limits.ids of the server, whose own --allow and --block have no limit)"
            )
    if (times := given.get("times")) is not None:
        check_times(times, given.get("history", ()))
    if not isinstance(keep_seen := given.get("keep_seen", False), bool):
        raise InputError(f"keep_seen is true or false; got {show_value(keep_seen)}")
    kind = OfUser if "user" in given else Request
    return kind(**given | {"k": read_k(given.get("k", 10), limits)})


def read_k(given: Any, limits: Limits) -> int:
    """How many items."""
    if type(given) is not int or not 1 <= given <= limits.k:
        raise InputError(
            f"k is a whole number from 1 to {limits.k:,} (--limits.k); got {show_value(given)}"
        )
    return given
