"""Pieces that the sections of a page are put together from."""

from collections.abc import Callable, Iterable, Sequence

from sce.report.markup import Child, Markup, element
from sce.units import is_number


def section(title: str, *children: Child) -> Markup:
    """A part of the page under a heading."""
    return element("section", element("h2", title), *children)


def figures(drawn: Sequence[Markup]) -> Markup | None:
    """Figures side by side, or one under the other where there is no room."""
    return element("div", drawn, class_="figures") if drawn else None


def tiles(named: Sequence[tuple[str, str]]) -> Markup | None:
    """Numbers to be read from afar, each with its name."""
    if not named:
        return None
    return element(
        "dl",
        [element("div", element("dt", name), element("dd", value)) for name, value in named],
        class_="tiles",
    )


def table(
    name: str, head: Sequence[Markup], body: Sequence[Markup], *, wide: bool = False
) -> Markup:
    """A table of rows; where it is too wide for the page, it scrolls by itself."""
    made = element(
        "table",
        element("thead", head) if head else None,
        element("tbody", body),
        class_="wide" if wide else None,
        aria_label=name,
    )
    return element("div", made, class_="scroll", role="region", tabindex="0", aria_label=name)


def folded(summary: str, *children: Child) -> Markup:
    """Something shown only when asked for."""
    return element("details", element("summary", summary), *children)


def notice(text: str) -> Markup:
    """A sentence that must not be overlooked."""
    return element("p", text, class_="notice", role="note")


def any_number(values: Iterable[float | None]) -> bool:
    """Whether there is anything to show."""
    return any(is_number(value) for value in values)


def course(
    name: str, x: Sequence[float], y: Sequence[float | None], show: Callable[[float], str]
) -> str:
    """A line in words: where it begins and ends, and how far it reaches."""
    points = [(at, value) for at, value in zip(x, y, strict=True) if value is not None]
    (first, begin), (last, end) = points[0], points[-1]
    values = [value for _, value in points]
    return (
        f"{name}: {show(begin)} at epoch {first:g}, {show(end)} at epoch {last:g}; "
        f"lowest {show(min(values))}, highest {show(max(values))}."
    )
