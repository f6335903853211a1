"""A comparison as Markdown: its tables, and what was chosen for them."""

from collections.abc import Sequence

from sce.experiments.comparison import Comparison, count_runs, name_failed
from sce.experiments.summary import LOSSES, Setting, datasets_of
from sce.experiments.tables import caveats, chosen_lines, make_table, to_markdown
from sce.experiments.views import View
from sce.report.formatting import show_memory


def make_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables, and what was chosen for them, as Markdown."""
    parts = []
    for comparison in comparisons:
        parts.append(f"## {comparison.sweep.title}\n\n{count_runs(comparison.rows)}\n")
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
            parts.append(_memory_markdown(comparison.settings))
        for name, row in name_failed(comparison.rows):
            parts.append(f"- {name}: {row['failure']['kind']}\n")
    return "\n".join(parts)


def _memory_markdown(settings: Sequence[Setting]) -> str:
    """Peak memory of measured steps: a row for each loss, a column for each dataset."""
    names = datasets_of(settings)
    lines = ["| loss | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for loss, shown in LOSSES.items():
        peaks = [
            max(
                (s.mean("memory") or 0.0 for s in settings if (s.loss, s.dataset) == (loss, name)),
                default=None,
            )
            for name in names
        ]
        if any(peaks):
            lines.append(f"| {shown} | " + " | ".join(map(show_memory, peaks)) + " |")
    return "\n".join(lines) + "\n"
