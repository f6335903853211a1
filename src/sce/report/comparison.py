"""Sweeps and their rows, read from directories, as the page and the tables need them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sce.config import setting_names
from sce.errors import InputError
from sce.experiments.figure_spec import COSTS, ORIGINS, FigureSpec
from sce.experiments.store import FAILED, FINISHED, Row, Sweep, SweepDirectory, read_rows, row_of
from sce.report import frame
from sce.report.tables import ComparisonTable, make_table
from sce.training.run import MANIFEST
from sce.units import plural


@dataclass(frozen=True)
class Comparison:
    """A sweep and the rows of its runs."""

    sweep: Sweep
    rows: Sequence[Row]

    @cached_property
    def _comparable(self) -> tuple[list[Row], list[str]]:
        return frame.comparable(self.rows)

    @cached_property
    def groups(self) -> list[frame.SeedGroup]:
        """The finished runs, over seeds; memory and time as far as they compare."""
        return frame.group_seeds(self._comparable[0])

    @cached_property
    def tables(self) -> list[tuple[str, ComparisonTable]]:
        """Tables of whole trainings, with their titles."""
        found = []
        for spec in self.sweep.figures:
            groups = [
                one
                for one in self.groups
                if one.value("measure") == "training" and one.loss in (spec.losses or [one.loss])
            ]
            if spec.kind == "table" and groups:
                found.append((spec.title or self.sweep.title, make_table(groups, spec)))
        return found

    def caveats(self) -> Iterator[str]:
        """Sentences that a reader of the data, of memory and of time needs."""
        splits = {row["dataset"]["name"]: row["dataset"].get("split") for row in self.rows}
        if told := [f"{name} {split}" for name, split in splits.items() if split]:
            yield f"Split: {'; '.join(told)}."
        done = [row for row in self._comparable[0] if row["status"] == FINISHED]
        if frame.shared_device(done):
            yield (
                "Runs shared the device, or may have: their times are longer than those of a run "
                "alone, compare only roughly, and are not ranked."
            )
        if frame.is_resident(done):
            yield f"{frame.WHOLE_PROCESS} It is not ranked."
        yield from self._comparable[1]
        places = {row["dataset"]["name"] for row in done}
        if len(done) > 1 and len(places) == len(done):
            yield "No two runs are on the same data, split in the same way: they stand apart."


def compares_losses(spec: FigureSpec) -> bool:
    """True for a table of all losses side by side."""
    return spec.kind == "table" and spec.by == ("loss.name",) and not spec.losses


def gather(places: Sequence[Path], only: Sequence[str] = ()) -> list[Comparison]:
    """Read sweeps and runs from directories; what compares all losses comes first.

    The same settings swept into several directories are one comparison, of all their seeds. Other
    settings under the same name are another, told apart by directory. `only` names settings files.
    Runs are a comparison by themselves, together with what was swept.
    """
    labels: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], Comparison] = {}
    paths: dict[tuple[str, str], list[str]] = {}
    runs: dict[str, Row] = {}
    for path in places:
        if (path / MANIFEST.file).is_file():
            row = _name_dataset(row_of(path), labels)
            if row["dataset"]["split"] == "none":
                raise InputError(
                    f"{path} was trained on everything (split none) and measured on nothing: there "
                    "is nothing to compare; compare the runs whose settings it has"
                )
            _check_other(row, runs)
            runs[row["key"]] = row
            continue
        sweeps = SweepDirectory(path).read_sweeps()
        rows = {row["key"]: row for row in read_rows(SweepDirectory(path).rows)}
        for key, row in rows.items():
            rows[key] = _name_dataset(row, labels) | {"directory": str(path / row["run"])}
        for sweep in sweeps:
            if only and sweep.name not in only:
                continue
            name = (sweep.name, sweep.variant)
            here = [rows[one] for one in sweep.keys if one in rows]
            if name in found:
                before = found[name]
                keys = tuple(dict.fromkeys([*before.sweep.keys, *sweep.keys]))
                sweep, here = replace(before.sweep, keys=keys), once([*before.rows, *here])
            found[name] = Comparison(sweep, here)
            paths.setdefault(name, []).append(str(path))
    names = Counter(name for name, _ in found)
    for key, one in found.items():
        if names[key[0]] > 1:  # other settings under the same name
            title = f"{one.sweep.title} ({', '.join(paths[key])})"
            found[key] = replace(one, sweep=replace(one.sweep, title=title))
    swept = sorted(found.values(), key=lambda o: not any(map(compares_losses, o.sweep.figures)))
    done = {row["key"]: row for row in all_rows(swept) if row["status"] == FINISHED}
    for run in runs.values():
        _check_other(run, done)
    every = once([*runs.values(), *all_rows(swept)])
    if not found and not runs:
        raise InputError(f"there is no sweep called {' or '.join(only)} in {places[0]}")
    if not every:
        raise InputError(f"{places[0]} has no rows yet: no run has ended")
    return [*([_side_by_side(every, apart=not found)] if runs else []), *swept]


def _check_other(run: Row, rows: Mapping[str, Row]) -> None:
    """Refuse a run that is there already."""
    if same := rows.get(run["key"]):
        raise InputError(
            f"{same['directory']} and {run['directory']} have the same settings, seed and data; "
            "leave one out"
        )


def _side_by_side(rows: Sequence[Row], *, apart: bool) -> Comparison:
    """Runs as a sweep that nobody planned; each setting has a column of its own, or each loss."""
    names = frame.varied(frame.group_seeds(rows)) if apart else []
    by = ("loss.name", *(name for name in names if name in (*ORIGINS, *setting_names())))
    fronts = (FigureSpec("pareto", x=cost, by=by) for cost in COSTS)
    figures = (FigureSpec("table", by=by), FigureSpec("epochs", y=frame.SCORE, by=by), *fronts)
    keys = tuple(row["key"] for row in rows)
    return Comparison(Sweep("runs", "Runs side by side", keys, figures), rows)


def _name_dataset(row: Row, labels: dict[tuple[str, str], str]) -> Row:
    """Give each content one name, and two contents never the same: "beauty", "beauty (2)".

    To a model that uses times, other times are another content.
    """
    data = row["dataset"]
    content, times = key = data["content_hash"], data.get("times") or ""
    if key not in labels:
        own = {other: label for (one, other), label in labels.items() if one == content}
        name = data["name"].encode(errors="backslashreplace").decode()  # charts are Unicode
        label, count = name, 1
        if own and (not times or own.keys() == {""}):
            label = next(iter(own.values()))
        else:
            while label in labels.values():
                count += 1
                label = f"{name} ({count})"
        labels[key] = label
    return row | {"dataset": data | {"name": labels[key]}}


def all_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    """The rows of all comparisons, each once."""
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
    """A sentence: runs, datasets, failures by kind, and runs still missing."""
    rows = all_rows(comparisons)
    names = {row["dataset"]["name"] for row in rows}
    failed = Counter(row["failure"]["kind"] for row in rows if row["status"] == FAILED)
    words = f"{plural(len(rows), 'run')} on {plural(len(names), 'dataset')}"
    told = [f"{count} {kind}" for kind, count in failed.items()]
    words += f"; of these, {', '.join(told)}." if told else ", all finished."
    planned = {key for one in comparisons for key in one.sweep.keys}
    missing = len(planned - {row["key"] for row in rows})
    have = "has" if missing == 1 else "have"
    return words + (f" {missing:,} more of the sweep {have} not been run yet." if missing else "")


def name_failed(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The failed runs, named by their differences from the other runs; kind and message."""
    groups = [frame.SeedGroup((row,)) for row in rows]
    names = frame.varied(groups)
    return [
        (
            f"{one.dataset}, {frame.describe(one, names)}, seed {row['seed']} ({row['key']})",
            row["failure"]["kind"],
            row["failure"]["message"],
        )
        for one, row in zip(groups, rows, strict=True)
        if row["status"] == FAILED
    ]
