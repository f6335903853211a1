"""`sce evaluate`: unsampled metrics of a run, beside popularity."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from sce.errors import InputError
from sce.evaluation.evaluate import Metrics
from sce.evaluation.evaluate import evaluate as measure
from sce.evaluation.ranking import Popularity, Ranker
from sce.recommend import Recommender
from sce.training.device import resolve_device
from sce.training.progress import PipedConsole
from sce.training.run import Run, describe_divergence

METRICS = ("ndcg", "hr", "mrr", "cov")


def evaluate(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    split: Literal["test", "validation"] = "test",
    keep_seen: Annotated[bool, Parameter(show_default=False)] = False,
    k: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    data: Path | None = None,
    device: str = "auto",
    batch_size: int = 512,
    as_json: Annotated[bool, Parameter(name="--json", show_default=False)] = False,
) -> None:
    """Rank the whole catalogue for every test user, and see where the held-out items stand.

    Args:
        run: Directory that "sce train" wrote.
        split: Which event is to be predicted: a user's last (test) or last but one (validation).
        keep_seen: Rank also what a user has had before; without it, that is left out.
        k: Depths of the metrics. [default: 1 5 10 20 50]
        data: The run's dataset, if it was moved.
        device: auto (a GPU if there is one), cpu, cuda, or cuda:N.
        batch_size: Users at once.
        as_json: Print JSON instead of a table.
    """
    if k is not None and not k:
        raise InputError("--k names no depth; leave it out for 1 5 10 20 50")
    opened = Run.open(run)
    place = resolve_device(device)
    dataset = opened.load_dataset(data)
    if not len(dataset.test):
        raise InputError(f"{dataset.path} has no test users: there is nothing to evaluate")
    loss = opened.loss
    rankers: dict[str, Ranker] = {
        loss: Recommender.load(opened, str(place)).model,
        "popularity": Popularity(dataset.train, dataset.n_items, device=place),
    }
    say_divergence(opened)
    with _progress(len(dataset.test)) as tell:
        found = {
            name: measure(
                ranker,
                dataset,
                split=split,
                ks=sorted(set(k)) if k else None,
                keep_seen=keep_seen,
                batch_size=batch_size,
                progress=partial(tell, name),
            )
            for name, ranker in rankers.items()
        }
    if as_json:
        facts = {"run": str(run), "split": split, "keep_seen": keep_seen}
        of_users = {"users": found[loss].users, "seen_targets": found[loss].seen_targets}
        values = {"model": found[loss].values, "popularity": found["popularity"].values}
        print(json.dumps(facts | of_users | values))
        return
    show_metrics({name: m.values for name, m in found.items()}, title=split)
    console = output_console()
    console.print(_closing_line(found[loss], keep_seen), soft_wrap=True, markup=False)


def say_divergence(run: Run) -> None:
    """Say on standard error that a run did not end well, if so."""
    if diverged := describe_divergence(run):
        print(f"sce: warning: {diverged}", file=sys.stderr)


def show_metrics(rows: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Say how a model compares with popularity, in one line, and then in a table."""
    console = output_console()
    console.print(_verdict(*rows.values()), soft_wrap=True, markup=False)
    console.print()
    console.print(_metrics_table(rows, title=title))
    console.print()


def _verdict(model: Mapping[str, float], popularity: Mapping[str, float]) -> str:
    names = [name for name in model if name.startswith("ndcg@")]
    name = "ndcg@10" if "ndcg@10" in names else names[-1]
    value, other = model[name], popularity[name]
    times = f": {value / other:.2f} times as much" if other else ""
    worse = ", worse than popularity" if value < other else ""
    return f"{name.upper()} {value:.4f} against {other:.4f} of popularity{times}{worse}"


def _metrics_table(rows: Mapping[str, Mapping[str, float]], *, title: str) -> Table:
    """Lay out metrics by name (such as "ndcg@10") of several rankers: a column for each depth."""
    ks = [int(name.partition("@")[2]) for name in next(iter(rows.values())) if "ndcg@" in name]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(title)
    table.add_column("")
    for k in ks:
        table.add_column(f"@{k}", justify="right", no_wrap=True)
    for metric in METRICS:
        for number, (ranker, values) in enumerate(rows.items()):
            cells = [f"{values[f'{metric}@{k}']:.4f}" for k in ks]
            table.add_row("" if number else metric, ranker, *cells)
        table.add_section()
    return table


def output_console() -> Console:
    """A console for what is meant to be read or piped on: plain, and unwrapped in a pipe."""
    console = PipedConsole(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no edge to wrap at
    return console


def _closing_line(metrics: Metrics, keep_seen: bool) -> str:
    line = f"{metrics.users:,} users; "
    if keep_seen:
        return line + "items that a user has had before are ranked as well"
    line += "items that a user has had before are left out"
    if metrics.seen_targets:
        line += f", and so are targets among them: {metrics.seen_targets:,} misses"
    return line


@contextmanager
def _progress(users: int) -> Iterator[Callable[[str, int], None]]:
    """On a terminal, say how far an evaluation is."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda name, done: None
        return
    with console.status("evaluating") as status:
        yield lambda name, done: status.update(f"evaluating {name}: {done:,} of {users:,} users")
