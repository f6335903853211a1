"""From settings with their means to the figures that a settings file asks for."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sce.experiments.axes import cost_axis, dot_radius, is_wide, name_measure, value_axis
from sce.experiments.captions import about_components, tell_caveats, tell_curves, tell_setting
from sce.experiments.charts import COLOURS, DASHES, Chart, Curve, Drawn, Point, draw_chart
from sce.experiments.conditions import left_out, measure_alike
from sce.experiments.stacks import Stack, Stacks, draw_stacks
from sce.experiments.summary import (
    LOSSES,
    Group,
    Setting,
    best,
    datasets_of,
    describe,
    front,
    group_by,
    is_validated,
    name_group,
    varied,
)
from sce.experiments.views import View
from sce.report.figures import Caption
from sce.report.scales import Axis
from sce.units import (
    is_number,
    show_compact,
    show_count,
    show_digits,
    show_memory,
    show_metric,
    show_share,
)

PARTS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gradients": "gradients",
    "loss": "loss (logits)",
    "backward": "rest of backward",
}
_COURSES = {
    "picked_once": "states picked once",
    "placed": "states in any bucket",
    "correct_in_bucket": "correct items in their buckets",
    "loss": "training loss",
    "validation.ndcg@10": "validation NDCG@10",
}
_OWN_COLOURS = {"sce": 1, "ce": 2, "ce-": 3, "gbce": 4, "bce+": 5, "bce": 6}


def make_figures(settings: Sequence[Setting], view: View) -> Iterator[Drawn]:
    """Draw a view: a figure for each dataset, or one across all of them."""
    chosen = [s for s in settings if not view.losses or s.loss in view.losses]
    if view.kind == "line" and view.x == "items":
        yield from _line(chosen, view, "")
        return
    draw: dict[str, Callable[[Sequence[Setting], View, str], Iterator[Drawn]]] = {
        "pareto": _pareto,
        "line": _line,
        "epochs": _epochs,
        "components": _components,
    }
    for dataset in datasets_of(chosen):
        yield from draw[view.kind]([s for s in chosen if s.dataset == dataset], view, dataset)


def _pareto(settings: Sequence[Setting], view: View, dataset: str) -> Iterator[Drawn]:
    cost = view.x or "memory"
    alike = measure_alike(settings)
    groups = group_by(alike, view.by)
    names, curves = varied(alike), []
    prices = [price for s in alike if (price := s.mean(cost)) is not None]
    largest = max((s.mean("memory") or 0.0 for s in alike), default=0.0)
    for place, (group, members) in enumerate(groups.items()):
        chosen = front(members, cost)
        points = []
        for setting in sorted(members, key=lambda s: s.mean(cost) or 0.0):
            price, value = setting.mean(cost), setting.mean(view.y)
            if price is None or value is None:
                continue
            on_front = any(setting is other for other in chosen)
            size = 3.5 if cost == "memory" else dot_radius(setting.mean("memory"), largest)
            points.append(
                Point(
                    price,
                    value,
                    describe(setting, names),
                    tell_setting(setting),
                    setting.spread(view.y) or 0.0,
                    radius=size,
                    faint=not on_front,
                )
            )
        colour, dash = _style(groups, group, place)
        name = name_group(view.by, group, groups)
        curves.append(Curve(name, points, colour, dash, extended=True))
    if not any(curve.points for curve in curves):
        return
    x = cost_axis(cost, log="x" in view.log or is_wide(prices))
    text = "Joined: no setting as cheap did better on validation events."
    if cost == "time":
        text += " The area of a dot is in proportion to its memory."
    yield draw_chart(
        Chart(
            Caption(
                view.title or f"{dataset}: {name_measure(view.y)} against {name_measure(cost)}",
                " ".join([view.text or text, *tell_caveats(settings, view)]),
                tell_curves(curves, name_measure(view.y)),
            ),
            x,
            value_axis(view.y, log="y" in view.log),
            curves,
        )
    )


def _line(settings: Sequence[Setting], view: View, dataset: str) -> Iterator[Drawn]:
    alike = measure_alike(settings)
    groups = group_by(alike, view.by)
    names, curves = varied(alike), []
    several = False
    for place, (group, members) in enumerate(groups.items()):
        colour, dash = _style(groups, group, place)
        name = name_group(view.by, group, groups)
        by_x: dict[float, list[Setting]] = {}
        for setting in members:
            at = setting.value(view.x)
            if is_number(at):
                by_x.setdefault(at, []).append(setting)
        if not by_x:
            several |= len(members) > 1
            one = _shown(members, view)
            level = None if one is None else one.mean(view.y)
            if one is not None and level is not None:
                wide = one.spread(view.y) or 0.0
                curves.append(Curve(name, (), colour, dash, level=level, level_spread=wide))
            continue
        points = []
        several |= any(len(members_at) > 1 for members_at in by_x.values())
        for at, members_at in sorted(by_x.items()):
            one = _shown(members_at, view)
            value = None if one is None else one.mean(view.y)
            if one is None or value is None:
                continue
            label = describe(one, names) if dataset else f"{name}, {show_count(at)} items"
            points.append(Point(at, value, label, tell_setting(one), one.spread(view.y) or 0.0))
        curves.append(Curve(name, points, colour, dash))
    if not any(curve.points for curve in curves):
        return
    short = view.x.rpartition(".")[2]
    label = "items in the catalogue" if view.x == "items" else short
    title = f"{name_measure(view.y)} against {label}"
    yield draw_chart(
        Chart(
            Caption(
                view.title or (f"{dataset}: {title}" if dataset else title.capitalize()),
                " ".join([view.text, *tell_caveats(settings, view, several=several)]).strip(),
                tell_curves(curves, name_measure(view.y)),
            ),
            Axis(label, show_compact, show_digits, log="x" in view.log),
            value_axis(view.y, log="y" in view.log),
            curves,
        )
    )


def _epochs(settings: Sequence[Setting], view: View, dataset: str) -> Iterator[Drawn]:
    groups = group_by(settings, view.by)
    curves = []
    for place, (group, members) in enumerate(groups.items()):
        one = best(members)
        columns = [] if one is None else [
            row["history"][view.y] for row in one.rows if view.y in (row.get("history") or {})
        ]  # fmt: skip
        if not columns:
            continue
        name = name_group(view.by, group, groups)
        points = []
        for epoch in range(min(map(len, columns))):  # as long as all seeds went on
            values = [column[epoch] for column in columns if column[epoch] is not None]
            if values:
                mean = statistics.fmean(values)
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                told = (("epoch", str(epoch + 1)), (_COURSES[view.y], _show_course(view.y)(mean)))
                points.append(Point(epoch + 1, mean, name, told, spread))
        colour, dash = _style(groups, group, place)
        curves.append(Curve(name, points, colour, dash, area=True))
    if not any(curve.points for curve in curves):
        return
    yield draw_chart(
        Chart(
            Caption(
                view.title or f"{dataset}: {_COURSES[view.y]}",
                view.text,
                tell_curves(curves, _COURSES[view.y]),
            ),
            Axis("epoch", show_count, whole=True),
            Axis(_COURSES[view.y], _show_course(view.y), from_zero=view.y != "loss"),
            curves,
        )
    )


def _components(settings: Sequence[Setting], view: View, dataset: str) -> Iterator[Drawn]:
    stacks, words = [], []
    alike = measure_alike(settings)
    groups = group_by(alike, view.by)
    for group, members in groups.items():
        parts = [[s.mean(f"components_mib.{part}") for part in PARTS] for s in members]
        known = [[value or 0.0 for value in one] for one in parts if any(one)]
        if known:
            largest = max(known, key=sum)
            name = name_group(view.by, group, groups)
            stacks.append(Stack(name, largest))
            words.append(f"{name} {show_memory(sum(largest))}")
    if stacks:
        yield draw_stacks(
            Stacks(
                Caption(
                    view.title or f"{dataset}: memory by component",
                    " ".join([view.text or about_components(alike), *left_out(settings)]),
                    "; ".join(words) + ".",
                ),
                show_memory,
                list(PARTS.values()),
                stacks,
            )
        )


def _shown(settings: Sequence[Setting], view: View) -> Setting | None:
    """Which of settings at one place is drawn; without validation, the one that reaches highest."""
    if is_validated(settings):
        return best(settings)
    return max(settings, key=lambda setting: setting.mean(view.y) or 0.0, default=None)


def _style(groups: dict[Group, list[Setting]], group: Group, place: int) -> tuple[int, int]:
    """The colour and the dashes of a group: losses have their own; two settings have one each."""
    if len(group) == 1 and group[0] in LOSSES:
        return _OWN_COLOURS[group[0]], 0
    if len(group) > 1:
        firsts = list(dict.fromkeys(one[0] for one in groups))
        others = list(dict.fromkeys(one[1:] for one in groups))
        dash = others.index(group[1:]) % len(DASHES)
        colour = _OWN_COLOURS.get(group[0]) if isinstance(group[0], str) else None
        return colour or firsts.index(group[0]) % COLOURS + 1, dash
    return place % COLOURS + 1, 0


def _show_course(name: str) -> Callable[[Any], str]:
    if name == "loss":
        return show_digits
    return show_metric if name.startswith("validation") else show_share
