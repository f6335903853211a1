"""Tables on the console."""

from collections.abc import Iterable, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from sce.evaluation.metrics import too_few
from sce.progress import PipedConsole
from sce.units import plural


def output_console() -> Console:
    """A console for what is meant to be read or piped on: plain, and unwrapped in a pipe."""
    console = PipedConsole(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no edge to wrap at
    return console


def show_lines(lines: Iterable[tuple[str, str]], width: int) -> None:
    """Show facts by name, the names in a column of so many characters."""
    console = output_console()
    for name, value in lines:
        console.print(f"{name:<{width - 1}} {value}", soft_wrap=True, markup=False)


def plain_table(*headings: str) -> Table:
    """A table without edges; columns are added, or named here and aligned to the left."""
    return Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def show_metrics(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    users: int,
    apart: Mapping[str, Mapping[str, float]],
) -> None:
    """Compare a model with popularity, in one line, and then in a table of metric and depth.

    The line has a factor where as many users were tested as can tell. `apart` are the model's
    metrics for popular and for rare targets, of which a line is told.
    """
    names = list(next(iter(rows.values())))  # such as "ndcg@10"
    depths = [name.partition("@")[2] for name in names if name.startswith("ndcg@")]
    model, popularity = rows.values()
    name = f"ndcg@{'10' if '10' in depths else depths[-1]}"
    value, other = model[name], popularity[name]
    times = f": {value / other:.2f} times as much" if other else ""
    times += ", worse than popularity" if value < other else ""
    if too_few(users, value, other):
        times = f": on {plural(users, f'{title} user')}, too few to tell"
    table = plain_table(title, "")
    for depth in depths:
        table.add_column(f"@{depth}", justify="right", no_wrap=True)
    for metric in dict.fromkeys(name.partition("@")[0] for name in names):
        for number, (ranker, values) in enumerate(rows.items()):
            cells = [f"{values[f'{metric}@{depth}']:.4f}" for depth in depths]
            table.add_row("" if number else metric, ranker, *cells)
        table.add_section()
    console = output_console()
    console.print(
        f"{name.upper()} {value:.4f} against {other:.4f} of popularity{times}\n",
        soft_wrap=True,
        markup=False,
    )
    console.print(table)
    console.print()
    told = [
        f"{part[name]:.4f} of {plural(int(part['users']), 'user')} with a {kind} target"
        for kind, part in apart.items()
        if name in part
    ]
    if told:
        console.print(f"{name.upper()} {', '.join(told)}\n", soft_wrap=True, markup=False)
