"""`sce prepare`: from a log of interactions to the dataset that training reads."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sce.data.filtering import drop_repeats, keep_active
from sce.data.interactions import Interactions
from sce.data.prepared import PreparedDataset, check_target
from sce.data.splitting import (
    Kind,
    Split,
    TestHistory,
    show_time,
    split_leave_one_out,
    split_temporal,
)
from sce.data.tally import Tally
from sce.errors import InputError


@dataclass(frozen=True)
class Choices:
    """What is filtered and how it is split, once every option has its value."""

    min_item_users: int = 1
    min_user_items: int = 1
    iterate: bool = False
    drop_repeats: bool = False
    split: Kind = "temporal"
    quantile: float = 0.95
    test_history: TestHistory = "after-cut"


PRESETS = {"paper": Choices(min_item_users=5, min_user_items=20)}


def prepare(
    *inputs: Annotated[str, Parameter(name="INPUT", required=True)],
    out: Path,
    format: str = "auto",  # noqa: A002 - the name of the option
    user_column: str | None = None,
    item_column: str | None = None,
    time_column: str | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
    drop_incomplete: Annotated[bool, Parameter(show_default=False)] = False,
    preset: Literal["paper"] | None = None,
    min_item_users: int | None = None,
    min_user_items: int | None = None,
    iterate: bool | None = None,
    drop_repeats: bool | None = None,
    split: Kind | None = None,
    quantile: float | None = None,
    test_history: TestHistory | None = None,
    force: Annotated[bool, Parameter(show_default=False)] = False,
) -> None:
    """Turn a log of interactions into a filtered, split and indexed dataset.

    Args:
        inputs: csv, tsv, jsonl (each also as .gz or .zst) or parquet files, or patterns.
        out: Directory to write.
        format: Layout of the files, if their names do not tell; see "sce datasets".
        user_column: Column of user ids, if it has no usual name (user_id, userid, user ...).
        item_column: Column of item ids, if it has no usual name.
        time_column: Column of timestamps, if it has no usual name.
        time_unit: Unit of timestamps that are numbers, if their size does not tell.
        drop_incomplete: Leave out rows without user, item or readable time, instead of refusing.
        preset: "paper": filters 5 and 20, temporal split at 0.95; other options have precedence.
        min_item_users: Leave out items with fewer distinct users. [default: 1, keeps all]
        min_user_items: Then leave out users with fewer distinct items. [default: 1, keeps all]
        iterate: Repeat both filters until nothing changes.
        drop_repeats: Keep only a user's first interaction with each item.
        split: Test on users active after an instant, or on all last events. [default: temporal]
        quantile: Temporal: the share of events before the cut. [default: 0.95]
        test_history: Temporal: what a test user's history holds. [default: after-cut]
        force: Replace a prepared dataset that is there already.
    """
    choices = choose(
        preset,
        min_item_users=min_item_users,
        min_user_items=min_user_items,
        iterate=iterate,
        drop_repeats=drop_repeats,
        split=split,
        quantile=quantile,
        test_history=test_history,
    )
    check_target(out, force=force)
    read = _reader()
    steps: list[Tally] = []
    with _progress() as tell:
        log = read(
            inputs,
            format=format,
            user_column=user_column,
            item_column=item_column,
            time_column=time_column,
            time_unit=time_unit,
            drop_incomplete=drop_incomplete,
            report=tell,
        )
        if log.dropped:
            steps.append(Tally("rows without user, item or time: left out", 0, 0, log.dropped))
        steps.append(Tally.of("read", log))
        tell(f"filtering {len(log):,} interactions")
        log = _filter(log, choices, steps)
        tell(f"splitting {len(log):,} interactions")
        if choices.split == "temporal":
            parts = split_temporal(
                log, quantile=choices.quantile, test_history=choices.test_history
            )
        else:
            parts = split_leave_one_out(log)
        del log
        tell(f"writing {out}")
        dataset = parts.save(out, settings=_filter_settings(choices), steps=steps, force=force)
    _show(steps, parts, choices, dataset, out)


def choose(preset: str | None, **given: Any) -> Choices:
    """Complete what was given by the preset, or else the defaults; refuse contradictions.

    Raises:
        InputError: When an option has no meaning beside another.
    """
    explicit = {name: value for name, value in given.items() if value is not None}
    base = PRESETS[preset] if preset else Choices()
    choices = Choices(**(asdict(base) | explicit))
    if choices.split == "leave-one-out":
        for name in ("quantile", "test_history"):
            if name in explicit:
                option = name.replace("_", "-")
                raise InputError(
                    f"--{option} belongs to the temporal split, and the split is leave-one-out; "
                    "leave one of the two out"
                )
    if choices.iterate and choices.min_item_users == choices.min_user_items == 1:
        raise InputError(
            "--iterate repeats the filters, and none is set; add --min-item-users or "
            "--min-user-items"
        )
    return choices


def _reader() -> Callable[..., Interactions]:
    try:
        import polars  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        raise InputError(
            "reading logs needs polars, which is not installed; "
            "install it with: pip install 'scalable-cross-entropy[prepare]'"
        ) from error
    from sce.data.interactions import read_interactions

    return read_interactions


def _filter(log: Interactions, choices: Choices, steps: list[Tally]) -> Interactions:
    if choices.drop_repeats:
        log = drop_repeats(log, report=steps.append)
    return keep_active(
        log,
        min_item_users=choices.min_item_users,
        min_user_items=choices.min_user_items,
        iterate=choices.iterate,
        report=steps.append,
    )


def _filter_settings(choices: Choices) -> dict[str, Any]:
    names = ("drop_repeats", "min_item_users", "min_user_items", "iterate")
    return {name: getattr(choices, name) for name in names}


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Say what is going on: a spinner on a terminal, else a line per step."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(f"{escape(text)} ...")
    else:
        yield lambda text: print(f"sce: {text}", file=sys.stderr, flush=True)


def _show(
    steps: list[Tally], parts: Split, choices: Choices, dataset: PreparedDataset, out: Path
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no edge to wrap at
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("users", "items", "interactions", "density"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group, with_density in [
        (steps, True),
        ([parts.train_tally, parts.test_tally], True),
        (parts.left_out, False),
    ]:
        for row in group:
            if not row.users and not row.interactions:
                continue  # nothing was left out for this reason
            counts = (row.users, row.items, row.interactions)
            density = f"{row.density:.4%}" if with_density and row.users else ""
            table.add_row(row.name, *(f"{count:,}" if count else "" for count in counts), density)
        table.add_section()
    console.print(table)
    console.print()
    for name, value in _closing_lines(parts, choices, dataset, out):
        console.print(f"{name:<11}{value}", soft_wrap=True, markup=False)


def _closing_lines(
    parts: Split, choices: Choices, dataset: PreparedDataset, out: Path
) -> Iterator[tuple[str, str]]:
    yield "catalogue", f"{dataset.n_items:,} items"
    if parts.cut is not None:
        yield "cut", f"{show_time(parts.cut)} (quantile {choices.quantile})"
    size = sum(file.stat().st_size for file in out.iterdir())
    yield "written", f"{out} ({decimal(size)}, content {dataset.content_hash[:12]})"
    yield "next", f"sce train {shlex.quote(str(out))}"
