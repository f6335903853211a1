"""A digest of functions and classes of the user's own: another body is another loss or model."""

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from sce.data.storage import digest_bytes

_NOT_OWN = ("builtins", "numpy", "sce", "torch")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
CODE = "code in Python "
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"  # others have other instructions


def digest_code(values: Iterable[Any]) -> dict[str, str]:
    """Digest of functions and classes by a name with this Python's version; {} if none is own.

    It is of what Python executes: comments, docstrings, annotations and places in a file do not
    count. With it go bases of classes, and the functions, classes and plain values that the code
    names, as far as they are of the same package.
    """
    seen: set[Any] = set()
    lines = [line for value in values for line in _Reader(value, seen).lines(value)]
    return {CODE + _VERSION: digest_bytes("\n".join(lines).encode())[:16]} if lines else {}


class _Reader:
    """Reads what values do, as lines of text."""

    def __init__(self, value: Any, seen: set[Any]) -> None:
        self._package, self._seen = _package(value), seen

    def lines(self, value: Any) -> Iterator[str]:
        if isinstance(value, staticmethod | classmethod | property):
            value = value.fget if isinstance(value, property) else value.__func__
        if isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, tuple):
            for one in value:
                yield from self.lines(one)
        elif isinstance(value, frozenset):
            yield from sorted(map(repr, value))
        elif isinstance(value, CodeType):
            yield from self._steps(value, {})
        elif isinstance(value, type):
            for kind in filter(self._is_next, value.__mro__):
                yield kind.__qualname__
                for name, member in sorted(vars(kind).items()):
                    if callable(member) or not name.startswith("_"):
                        yield name
                        yield from self.lines(member)
        elif callable(value):
            found = inspect.unwrap(value)
            if isinstance(found, FunctionType) and self._is_next(found):
                yield found.__qualname__
                yield from self.lines((found.__defaults__, *(found.__kwdefaults__ or {}).items()))
                yield from self._steps(found.__code__, found.__globals__)

    def _steps(self, code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
        for step in dis.get_instructions(code):
            yield step.opname
            if isinstance(step.argval, CodeType):
                yield from self._steps(step.argval, names)
            else:
                yield from self.lines(step.argval)
            if step.opname == "LOAD_GLOBAL":
                yield from self.lines(names.get(step.argval))

    def _is_next(self, value: Any) -> bool:
        """True for what is the user's own, and was not read before."""
        own = _package(value) == self._package not in _NOT_OWN
        new = own and value not in self._seen
        self._seen |= {value} if own else set()
        return new


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
