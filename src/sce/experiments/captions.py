"""What a figure says in words: under its title, at a point, and to those who do not see it."""

from collections.abc import Iterator, Sequence

from sce.experiments.charts import Curve
from sce.experiments.conditions import (
    WHOLE_PROCESS,
    is_resident,
    left_out,
    measure_alike,
    ways_of,
)
from sce.experiments.summary import Setting, is_validated, with_spread
from sce.experiments.views import MEASURES, View
from sce.units import (
    plural,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
)


def tell_caveats(
    settings: Sequence[Setting], view: View, *, several: bool = False
) -> Iterator[str]:
    """What a reader of a figure must know, in sentences.

    Args:
        settings: That the figure is of, before any memory and time were left out.
        view: What it shows.
        several: Whether some place has more than one of them.
    """
    if several and is_validated(settings):
        yield "Of settings at one place, the best by validation is drawn."
    elif several:
        yield "Of settings at one place, the one that reaches highest is drawn."
    alike = measure_alike(settings)
    if (view.kind == "pareto" or view.y == "memory") and is_resident(alike):
        yield WHOLE_PROCESS
    if view.kind == "pareto" or view.y in MEASURES:
        yield from left_out(settings)
        gone = sum(
            bool(ways_of([before])) and not ways_of([after])
            for before, after in zip(settings, alike, strict=True)
        )
        if gone:
            yield f"{plural(gone, 'setting')} with no other run cannot be drawn."


def about_components(settings: Sequence[Setting]) -> str:
    """What memory by component is of."""
    text = f"At the peak of a step; {show_count(settings[0].items)} items."
    if is_resident(settings):
        text += " Bytes of live tensors, not of the process: there was no GPU."
    return text


def tell_setting(setting: Setting) -> tuple[tuple[str, str], ...]:
    """What a point says of itself."""
    found = [
        (f"{split} NDCG@10", with_spread(setting, f"{split}.ndcg@10", show_metric))
        for split in ("test", "validation")
        if setting.mean(f"{split}.ndcg@10") is not None
    ]
    found.append(("peak memory", with_spread(setting, "memory", show_memory)))
    found.append(("training time", with_spread(setting, "time", show_duration)))
    found.append(("seeds", str(len(setting.rows))))
    return tuple(found)


def tell_curves(curves: Sequence[Curve], what: str) -> str:
    """A figure for those who do not see it: how far each curve reaches."""
    words = []
    for curve in curves:
        values = [p.y for p in curve.points if not p.faint]
        if curve.level is not None:
            words.append(f"{curve.name} {show_digits(curve.level)}")
        elif values:
            low, high = show_digits(min(values)), show_digits(max(values))
            words.append(f"{curve.name} {low if low == high else f'{low} to {high}'}")
    return f"{what}: {'; '.join(words)}."
