"""A comparison as Markdown: its tables, and what was chosen for them."""

from collections.abc import Iterator, Sequence

from sce.experiments.comparison import Comparison, count_runs, name_failed
from sce.experiments.conditions import WHOLE_PROCESS, is_resident, left_out, measure_alike
from sce.experiments.summary import (
    LOSSES,
    Setting,
    datasets_of,
    describe,
    varied,
    with_spread,
)
from sce.experiments.tables import caveats, chosen_lines, make_table, to_markdown
from sce.experiments.views import View
from sce.units import show_memory


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables, and what was chosen for them, as Markdown."""
    parts = []
    for comparison in comparisons:
        parts.append(f"## {comparison.sweep.title}\n\n{count_runs([comparison])}\n")
        tables = [view for view in comparison.sweep.views if view.kind == "table"]
        for view in tables or [View("table")]:
            settings = comparison.settings_of(view)
            if not settings:
                continue
            made = make_table(settings, view)
            parts.append(to_markdown(made))
            told = "Chosen by validation NDCG@10: " + "; ".join(chosen_lines(made)) + "."
            parts.append(" ".join([*caveats(made), told]) + "\n")
        if comparison.sweep.measure == "steps":
            parts += _memory_markdown(comparison.settings)
        for name, row in name_failed(comparison.rows):
            parts.append(f"- {name}: {row['failure']['kind']}\n")
    return "\n".join(parts)


def _memory_markdown(settings: Sequence[Setting]) -> Iterator[str]:
    """Peak memory of measured steps: rows for losses and their settings, columns for datasets."""
    names, alike, nothing = datasets_of(settings), measure_alike(settings), show_memory(None)
    lines = ["| loss | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for loss in LOSSES:
        ours = [setting for setting in alike if setting.loss == loss]
        differing = varied(ours)
        found: dict[str, dict[str, Setting]] = {}
        for setting in sorted(ours, key=lambda s: s.mean("memory") or 0.0):
            if setting.mean("memory") is not None:
                # Of two that have one name, the larger.
                found.setdefault(describe(setting, differing), {})[setting.dataset] = setting
        for label, cells in sorted(found.items()):
            row = [
                with_spread(cells[name], "memory", show_memory) if name in cells else nothing
                for name in names
            ]
            lines.append(f"| {label} | " + " | ".join(row) + " |")
    yield "\n".join(lines) + "\n"
    told = [WHOLE_PROCESS] if is_resident(alike) else []
    told += left_out(settings)
    if told:
        yield " ".join(told) + "\n"
