"""From the directories of sweeps to what is compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from sce.errors import InputError
from sce.experiments.comparison import Comparison, is_verdict, once
from sce.experiments.place import Place
from sce.experiments.rows import FAILED, FINISHED, Row, read_rows
from sce.experiments.summary import name_apart

# What every row has, whatever came of its run.
_OF_ROW: dict[str, type] = {
    "status": str,
    "measure": str,
    "dataset": Mapping,
    "seed": int,
    "settings": Mapping,
    "versions": Mapping,
}
_OF_DATASET = ("name", "content_hash", "n_items")


def gather(places: Sequence[Path], only: Sequence[str] = ()) -> list[Comparison]:
    """Read the sweeps of directories; what compares the losses comes first.

    The same settings swept into several directories are one comparison, of all their seeds. Other
    settings under the same name are another, numbered.

    Args:
        places: Directories that sweeps wrote.
        only: Names of settings files, to read only these; all by default.

    Raises:
        InputError: When one is no such directory, or there is nothing to compare.
    """
    written = {path: _read(path) for path in places}
    apart = iter(name_apart(row for rows in written.values() for row in rows))
    found: dict[tuple[str, str], Comparison] = {}
    paths: dict[tuple[str, str], list[Path]] = {}
    for path, there in written.items():
        rows = {row["key"]: row for row in islice(apart, len(there))}
        for sweep in Place(path).read_sweeps():
            if only and sweep.name not in only:
                continue
            key = (sweep.name, sweep.variant)
            here = [rows[one] for one in sweep.keys if one in rows]
            before = found.get(key)
            if before is not None:
                keys = tuple(dict.fromkeys([*before.sweep.keys, *sweep.keys]))
                sweep, here = replace(before.sweep, keys=keys), once([*before.rows, *here])
            found[key] = Comparison(sweep, here)
            paths.setdefault(key, []).append(path)
    if not found:
        raise InputError(f"there is no sweep called {' or '.join(only)} in {places[0]}")
    if not any(one.rows for one in found.values()):
        raise InputError(f"{places[0]} has no rows yet: no run has ended")
    told = _tell_apart([(one, paths[key]) for key, one in found.items()])
    return sorted(told, key=lambda one: not any(map(is_verdict, one.sweep.views)))


def _tell_apart(found: Sequence[tuple[Comparison, Sequence[Path]]]) -> list[Comparison]:
    """Give no two the same name, and number the titles of those that had one."""
    names = [one.sweep.name for one, _ in found]
    taken = set(names)
    counts: dict[str, int] = {}
    told = []
    for one, paths in found:
        sweep = one.sweep
        if names.count(sweep.name) > 1:
            count = counts[sweep.name] = counts.get(sweep.name, 0) + 1
            where = ", ".join(map(str, paths))
            name = sweep.name if count == 1 else _free(sweep.name, count, taken)
            taken.add(name)
            sweep = replace(sweep, name=name, title=f"{sweep.title} ({count}: {where})")
        told.append(Comparison(sweep, one.rows))
    return told


def _free(name: str, count: int, taken: Iterable[str]) -> str:
    numbered = f"{name}-{count}"
    return numbered if numbered not in taken else _free(numbered, 2, taken)


def _read(path: Path) -> list[Row]:
    file = Place(path).rows
    rows = read_rows(file)
    for row in rows:
        wrong = _fault(row)
        if wrong:
            raise InputError(
                f"{file}: the row of run {row['key']} {wrong}, so it is not as a sweep wrote it; "
                "take the line out, and sweep again if the run is missing then"
            )
    return rows


def _fault(row: Row) -> str:
    """What a row lacks that a comparison needs; empty when nothing."""
    for name, kind in _OF_ROW.items():
        if not isinstance(row.get(name), kind):
            return f"has no {name}" if row.get(name) is None else f"has a strange {name}"
    for name in _OF_DATASET:
        if name not in row["dataset"]:
            return f"has no {name} of its dataset"
    if "loss.name" not in row["settings"]:
        return "does not say its loss"
    if row["status"] not in (FINISHED, FAILED):
        return f"has the unknown status {row['status']!r}"
    failure = row.get("failure")
    if row["status"] == FAILED and not (
        isinstance(failure, Mapping) and {"kind", "message"} <= set(failure)
    ):
        return "does not say why it failed"
    return ""
