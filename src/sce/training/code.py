"""A digest of functions and classes of the user's own: another body is another loss or model."""

import dis
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sce.data.storage import digest_bytes

_NOT_OWN = ("builtins", "numpy", "sce", "torch")
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
CODE = "code in Python "
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"  # others have other instructions


def digest_code(values: Iterable[Any]) -> dict[str, str]:
    """Digest of functions and classes by a name with this Python's version; {} if none is own.

    It is of what Python executes: comments, docstrings, annotations and places in a file do not
    count. With it go bases of classes, and the functions, classes and plain values that the code
    names, of modules of the user's own.
    """
    seen: set[Any] = set()
    lines = [line for value in values for line in _lines(value, seen)]
    return {CODE + _VERSION: digest_bytes("\n".join(lines).encode())[:16]} if lines else {}


def _lines(value: Any, seen: set[Any]) -> Iterator[str]:
    """What a value is or does, as lines of text; of functions and classes, once."""
    if isinstance(value, staticmethod | classmethod | property):
        value = value.fget if isinstance(value, property) else value.__func__
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple):
        for one in value:
            yield from _lines(one, seen)
    elif isinstance(value, frozenset):
        yield from sorted(map(repr, value))
    elif isinstance(value, type):
        for kind in value.__mro__:
            if _is_next(kind, seen):
                yield kind.__qualname__
                for name, member in sorted(vars(kind).items()):
                    if callable(member) or not name.startswith("_"):
                        yield name
                        yield from _lines(member, seen)
    elif callable(value):
        found = inspect.unwrap(value)
        if isinstance(found, FunctionType) and _is_next(found, seen):
            yield found.__qualname__
            yield from _lines((found.__defaults__, *(found.__kwdefaults__ or {}).items()), seen)
            yield from _steps(found.__code__, found.__globals__, seen)


def _steps(code: CodeType, names: Mapping[str, Any], seen: set[Any]) -> Iterator[str]:
    """Instructions, and what they name in their module or in one that it has imported."""
    named: Any = None
    for step in dis.get_instructions(code):
        yield step.opname
        if isinstance(step.argval, CodeType):
            yield from _steps(step.argval, names, seen)
        else:
            yield from _lines(step.argval, seen)
        if step.opname == "LOAD_GLOBAL":
            named = names.get(step.argval)
        else:
            named = (
                getattr(named, str(step.argval), None) if isinstance(named, ModuleType) else None
            )
        if named is not None:
            yield from _lines(named, seen)


def _is_next(value: Any, seen: set[Any]) -> bool:
    """True for what is the user's own, and was not read before."""
    name = str(value.__module__)
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    theirs = name.partition(".")[0] in _NOT_OWN or any(part in file for part in _LIBRARIES)
    if theirs or value in seen:
        return False
    seen.add(value)
    return True
