"""A sweep and what came of it: what the page and the tables in Markdown are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sce.experiments.place import Sweep
from sce.experiments.rows import FAILED, FINISHED, Row
from sce.experiments.summary import Setting, as_setting, describe, group_settings, varied
from sce.experiments.views import View
from sce.units import plural


@dataclass(frozen=True)
class Comparison:
    """A sweep and the rows of its runs."""

    sweep: Sweep
    rows: Sequence[Row]

    @property
    def settings(self) -> list[Setting]:
        """The finished runs, over seeds."""
        return group_settings(self.rows)

    @property
    def failed(self) -> list[Row]:
        """The runs that came to nothing."""
        return [row for row in self.rows if row["status"] == FAILED]

    def settings_of(self, view: View) -> list[Setting]:
        """The settings that a view is about; a table is about whole trainings."""
        return [
            setting
            for setting in self.settings
            if (not view.losses or setting.loss in view.losses)
            and (view.kind != "table" or setting.rows[0]["measure"] == "training")
        ]


def is_verdict(view: View) -> bool:
    """Whether it puts all losses side by side, in numbers."""
    return view.kind == "table" and view.by == ("loss.name",) and not view.losses


def all_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """The rows of all, each once."""
    return once([row for one in comparisons for row in one.rows])


def once(rows: Iterable[Row]) -> list[Row]:
    """Each run once: of two rows about one, the first that finished, else the last."""
    found: dict[str, Row] = {}
    for row in rows:
        before = found.get(row["key"])
        if before is None or before["status"] != FINISHED:
            found[row["key"]] = row
    return list(found.values())


def count_runs(comparisons: Sequence[Comparison]) -> str:
    """How many runs on how many datasets, how they ended, and how many are still missing."""
    rows = all_rows(comparisons)
    names = {row["dataset"]["name"] for row in rows}
    failed: dict[str, int] = {}
    for row in rows:
        if row["status"] == FAILED:
            kind = row["failure"]["kind"]
            failed[kind] = failed.get(kind, 0) + 1
    words = f"{plural(len(rows), 'run')} on {plural(len(names), 'dataset')}"
    told = [f"{count} {kind}" for kind, count in failed.items()]
    words += f"; of these, {', '.join(told)}." if told else ", all finished."
    planned = {key for one in comparisons for key in one.sweep.keys}
    missing = len(planned - {row["key"] for row in rows})
    have = "has" if missing == 1 else "have"
    return words + (f" {missing:,} more of the sweep {have} not been run yet." if missing else "")


def name_failed(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The runs that failed, each with what tells it from the other runs."""
    names = varied([as_setting([row]) for row in rows])
    return [
        (
            f"{row['dataset']['name']}, {describe(as_setting([row]), names)}, seed {row['seed']} "
            f"({row['key']})",
            row,
        )
        for row in rows
        if row["status"] == FAILED
    ]
