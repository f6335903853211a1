"""Docstrings of fields, where `help()` and notebooks show them."""

import ast
import inspect
from itertools import pairwise
from textwrap import fill, indent
from typing import TypeVar

T = TypeVar("T", bound=type)


def documented(settings: T) -> T:
    """Add the docstrings below the fields of a class, and of its bases, to its own: a decorator."""
    lines: dict[str, str] = {}
    for each in reversed(settings.__mro__):
        try:
            source = ast.parse(inspect.getsource(each))
        except (OSError, TypeError):  # installed without it; Python's own
            continue
        for pair in pairwise(getattr(source.body[0], "body", ())):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=default),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    given = "" if default is None else f" = {ast.unparse(default)}"
                    text = f"{name} ({ast.unparse(kind)}{given}): {' '.join(text.split())}"
                    lines[name] = fill(text, 84, subsequent_indent=" " * 4)
    if lines:
        listed = indent("\n".join(lines.values()), " " * 4)
        settings.__doc__ = f"{settings.__doc__}\n\nAttributes:\n{listed}"
    return settings
