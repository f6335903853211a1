"""`sce similar`: the items whose vectors are closest to those of others."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.cli import say
from sce.cli.lists import MAY_BE_STDIN, read_items, titles_for
from sce.cli.rows import Format, open_rows
from sce.data.columns import ITEM
from sce.data.lines import STDIN
from sce.errors import InputError
from sce.recommend import Recommender
from sce.units import plural


def similar(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *items: Annotated[str, Parameter(name="ITEM", required=True)],
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 10,
    allow: Annotated[Path | None, MAY_BE_STDIN] = None,
    block: Annotated[Path | None, MAY_BE_STDIN] = None,
    out: Path | None = None,
    format: Format | None = None,  # noqa: A002 - the name of the option
    titles: Path | None = None,
    titles_columns: tuple[str, str] | None = None,
    device: str = "auto",
    force: bool = False,
) -> None:
    """Name similar items: columns item_id, similar_id, score (a cosine), rank, title if known.

    Popular items, whose vectors are long, have no advantage by the cosine.

    Args:
        run: Directory that "sce train" wrote.
        items: Ids of items.
        k: How many similar items for each; itself is not among them.
        allow: File of the items that may be named: one id a line, or a csv, jsonl or parquet file
            with a column item_id, or named as "sce prepare" was told that of the log is; - is
            standard input.
        block: Likewise, of items not to be named.
        out: File to write: .csv, .jsonl or .parquet. [default: csv to standard output]
        format: Format of the output, if the file's name does not tell.
        titles: File of item ids and titles, instead of those that "sce prepare" was given. An item
            without one has its id there.
        titles_columns: Its columns of ids and titles, if they have no usual names.
        device: auto, cpu, cuda or cuda:N.
        force: Replace the file that is there already.
    """
    if allow == block == STDIN:
        raise InputError("standard input can be read but once; name a file instead of one -")
    recommender = Recommender.load(run, device)
    if named_items := titles_for(recommender.item_ids, titles, titles_columns):
        recommender = replace(recommender, titles=named_items)
    given, column = {"allow": allow, "block": block}, recommender.columns.item
    lists = {name: read_items(path, f"--{name}", column) for name, path in given.items()}
    found = recommender.similar(items, k, **lists)
    titled = recommender.titles is not None
    with open_rows(out, format, force=force, whose=ITEM, titles=titled) as rows:
        for item, one in zip(found.users or (), found, strict=True):
            rows.add(item, one)
    if short := sum(len(one) < k for one in found):
        say(f"{short:,} of {plural(len(found), 'item')} got fewer than {k:,}: no more may be named")
