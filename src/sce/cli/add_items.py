"""`sce add-items`: new items for a trained run or its export, without training."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sce.cli import telling
from sce.cli.output import show_lines
from sce.data.new_items import tell_added
from sce.errors import InputError
from sce.serving import exported
from sce.units import plural


def add_items(
    path: Annotated[Path, Parameter(name="RUN_OR_EXPORT")],
    items: Annotated[Path, Parameter(name="ITEMS")],
    /,
    *,
    out: Path,
    force: bool = False,
) -> None:
    """Write a run, or an export, that also ranks new items; scores of the others stay as they are.

    Args:
        path: Directory that "sce train" or "sce export" wrote; an export needs no torch for it.
        items: File with a line of JSON for each item: {"item_id": ..., "similar_to": [ids]} gives a
            new item the mean of items that are there; {"item_id": ..., "vector": [numbers]} is the
            content of an item, new or there: from the latter a linear map is learned. A line may
            have a "title", too.
        out: Directory to write, of the same kind.
        force: Replace an export that is there, which may be the one that is added to: a server
            takes it up (sce serve --watch).
    """
    is_export = (path / exported.MANIFEST.file).exists()
    if is_export:
        added = exported.add_items(path, items, out, force=force)
    elif force:
        raise InputError("--force replaces an export; to add to a run choose another directory")
    else:
        from sce.training.new_items import add_items as add  # needs torch

        added = add(path, items, out)
    with telling():
        show_lines(_lines(added, out, is_export=is_export), width=12)


def _lines(added: Mapping[str, Any], out: Path, *, is_export: bool) -> Iterator[tuple[str, str]]:
    items = plural(added["similar"] + added["content"], "item")
    yield "added", f"{items}: {tell_added(added)}"
    if added["error"] is not None:
        of = plural(added["vectors"], "content vector")
        yield "map", f"learned from {of}; held-out error {added['error']:.3f}"
        yield "", "(squared, as a share of that of the mean item: 1 is no better)"
    place = shlex.quote(str(out))
    yield "written", f"{out}"
    yield "next", f"sce serve {place}"
    if not is_export:
        yield "", f"sce recommend {place} --out FILE.csv"
        yield "", f"sce train NEWDATA --from {place}"
