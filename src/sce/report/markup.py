"""HTML and SVG from Python values, escaped unless they are markup already."""

from collections.abc import Iterable
from html import escape

_WITHOUT_END = {"meta"}


class Markup(str):
    """Text that is HTML already, made by `element`; any other text is escaped."""

    __slots__ = ()


Child = str | Iterable[str] | None  # text, markup, several of them, or nothing


def element(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Make an element.

    >>> element("td", "<script>", class_="id")
    '<td class="id">&lt;script&gt;</td>'

    Args:
        name: Of the tag.
        children: Text is escaped, markup is not.
        attributes: Underscores become hyphens, except one at the end, which goes; None leaves the
            attribute out, and numbers are rounded to what a screen can show.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _WITHOUT_END:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Put markup, and text as markup, end to end."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Markup) else escape(child))
        elif child is not None:
            parts.append(join(*child))
    return Markup("".join(parts))


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
