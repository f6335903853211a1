"""The error and the warning that are for users, how their messages name settings, and types."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from itertools import cycle
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_FLAGS = ContextVar("flags", default=False)
_WORDS: dict[Any, str] = {
    int: "a whole number of 64 bits",
    float: "a number",
    bool: "True or False",
    str: "text",
    Path: "a path",
    NoneType: "None",
    Callable: "a function",
    Iterable: "a list",
    Sequence: "a list of whole numbers",
    Mapping: "a dictionary",
}
F = TypeVar("F", bound=Callable[..., Any])


class InputError(ValueError):
    """Input that cannot work; the message says what was wrong and what to do.

    The command line shows it as one line and exits with code 2; in Python it is a `ValueError`.
    """


class RankError(RuntimeError):
    """Another rank has ended or does not answer; the message says which, and why if it said so."""


class InputWarning(UserWarning):
    """Input of which a part is of no use; the command line shows it as one line."""


class TrainingWarning(InputWarning):
    """Training, or what was trained, is perhaps not as it was meant."""


@contextmanager
def settings_as_flags() -> Iterator[None]:
    """Let messages of the block name settings as the command line does."""
    token = _FLAGS.set(True)
    try:
        yield
    finally:
        _FLAGS.reset(token)


def named(setting: str, value: object = None, *, python: str = "") -> str:
    """A setting as the caller would give it: in Python, or as a flag.

    >>> named("batch_size"), named("training.clip_norm", 1)
    ('batch_size', 'clip_norm=1')
    >>> with settings_as_flags():
    ...     named("batch_size"), named("training.clip_norm", 1), named("resume", True)
    ('--batch-size', '--training.clip-norm 1', '--resume')
    """
    if _FLAGS.get():
        flag = "--" + setting.replace("_", "-")
        return flag if value is None or value is True else f"{flag} {value}"
    name = setting.rpartition(".")[2]
    return python or (name if value is None else f"{name}={value!r}")


@contextmanager
def needing(extra: str, doing: str, remedy: str = "") -> Iterator[None]:
    """Say how to install the libraries of an extra, where one that the block imports is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("sce", "torch"):  # which no extra brings
            raise
        raise InputError(
            f"{doing} needs {error.name}, which is not installed; install it with: "
            f"pip install 'scalable-cross-entropy[{extra}]'{remedy}"
        ) from error


def checked(function: F) -> F:
    """Refuse arguments of other types than the function's annotations say: see `check_types`."""
    signature, hints = inspect.signature(function), cache(lambda: get_type_hints(function))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments |= check_types(bound.arguments, hints())
        return function(*bound.args, **bound.kwargs)

    return cast("F", call)


def check_types(
    given: Mapping[str, Any], hints: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Refuse values of other types than annotated: see `fits`.

    The `prefix` is of the settings' names on the command line. Returns the values, numbers of numpy
    as Python's, which JSON can hold.
    """
    for name, value in given.items():
        if not fits(value, hints.get(name, Any)):
            setting = named(f"{prefix}{name}")
            raise InputError(f"{setting} must be {allowed(hints[name])}; got {show_value(value)}")
    return {name: _plain(value) for name, value in given.items()}


def show_value(value: object) -> str:
    """A value in few characters; one that takes several lines by its type.

    >>> show_value("x"), len(show_value("x" * 1000)), show_value(10**5000)
    ("'x'", 60, 'an integer of thousands of digits')
    """
    try:
        text = repr(value)
    except ValueError:  # of Python
        return "an integer of thousands of digits"
    if "\n" in text:  # a frame, a module
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    kind = next((kind for kind in (int, float) if fits(value, kind)), None)
    return value if kind is None else kind(value)


def fits(value: Any, hint: Any) -> bool:
    """True if a value is of an annotated type: True is no number, and 2.5 no whole one."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind in (tuple, Sequence):
        sized = isinstance(value, Sequence) and (kind is Sequence or len(value) == len(inner))
        return sized and all(fits(*pair) for pair in zip(value, cycle(inner), strict=False))
    hint = kind or hint
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real)
        huge = isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63
        return number and not huge and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def allowed(hint: Any) -> str:
    """An annotated type in words."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(allowed, inner)))
    if kind is Literal:
        return f"one of {', '.join(inner)}"
    if kind is tuple:
        return f"{len(inner)} {'texts' if str in inner else 'numbers'}"
    name = str(_WORDS.get(kind or hint, (kind or hint).__name__))
    if getattr(hint, "_is_protocol", False):  # a name that nobody imports
        said = str(hint.__doc__).partition("\n")[0].rstrip(".")
        return f"{name}, {said[0].lower()}{said[1:]}"
    return name
