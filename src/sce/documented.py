"""Docstrings of fields, where `help()` and notebooks show them."""

import ast
import inspect
from itertools import pairwise
from textwrap import fill
from typing import TypeVar

T = TypeVar("T", bound=type)


def documented(settings: T) -> T:
    """Add the docstrings that stand below the fields of a class to its own: a class decorator."""
    try:
        source = ast.parse(inspect.getsource(settings))
    except OSError:  # installed without it
        return settings
    lines = [f"{settings.__doc__}", "", "Attributes:"]
    for pair in pairwise(getattr(source.body[0], "body", ())):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=default),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                given = "" if default is None else f" = {ast.unparse(default)}"
                text = f"{name} ({ast.unparse(kind)}{given}): {' '.join(text.split())}"
                lines.append(fill(text, 88, initial_indent=" " * 4, subsequent_indent=" " * 8))
    settings.__doc__ = "\n".join(lines)
    return settings
