"""`sce add-items`: new items for a trained run, without training."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sce.cli import telling
from sce.cli.output import show_lines
from sce.training.new_items import add_items as add
from sce.training.new_items import tell_added
from sce.units import plural


def add_items(
    run: Annotated[Path, Parameter(name="RUN")],
    items: Annotated[Path, Parameter(name="ITEMS")],
    /,
    *,
    out: Path,
) -> None:
    """Write a run that also ranks new items; the scores of the others stay as they are.

    Args:
        run: Directory that "sce train" wrote.
        items: File with a line of JSON for each item: {"item_id": ..., "similar_to": [ids]} gives a
            new item the mean of items of the run; {"item_id": ..., "vector": [numbers]} is the
            content of an item, new or of the run: from the latter a linear map is learned. A line
            may have a "title", too.
        out: Directory of the run to write.
    """
    added = add(run, items, out)
    with telling():
        show_lines(_lines(added, out), width=12)


def _lines(added: Mapping[str, Any], out: Path) -> Iterator[tuple[str, str]]:
    items = plural(added["similar"] + added["content"], "item")
    yield "added", f"{items}: {tell_added(added)}"
    if added["error"] is not None:
        of = plural(added["vectors"], "content vector")
        yield "map", f"learned from {of}; held-out error {added['error']:.3f}"
        yield "", "(squared, as a share of that of the mean item: 1 is no better)"
    place = shlex.quote(str(out))
    yield "written", f"{out}"
    yield "next", f"sce recommend {place} --out FILE.csv"
    yield "", f"sce train NEWDATA --from {place}"
