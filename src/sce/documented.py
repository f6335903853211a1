"""Docstrings of fields, where `help()`, notebooks and `--help` show them."""

from functools import cache
from textwrap import fill, indent
from typing import TypeVar

from docstring_parser import DocstringParam, parse_from_object

T = TypeVar("T", bound=type)


@cache
def fields_of(settings: type) -> dict[str, DocstringParam]:
    """The documented fields of a class and its bases, by name; none where there is no source."""
    bases = [base for base in reversed(settings.__mro__) if base.__module__ != "builtins"]
    return {field.arg_name: field for base in bases for field in parse_from_object(base).params}


def documented(settings: T) -> T:
    """Add the docstrings that stand below the fields of a class to its own: a class decorator."""
    lines = []
    for name, field in fields_of(settings).items():
        given = "" if field.default is None else f" = {field.default}"
        text = f"{name} ({field.type_name}{given}): {' '.join(str(field.description).split())}"
        lines.append(fill(text, 84, subsequent_indent=" " * 4))
    if lines:
        listed = indent("\n".join(lines), " " * 4)
        settings.__doc__ = f"{settings.__doc__}\n\nAttributes:\n{listed}"
    return settings
