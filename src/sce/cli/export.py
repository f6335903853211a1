"""`sce export`: a run for use without torch."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sce.cli import telling
from sce.export import Format
from sce.export import export as write_export


def export(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    out: Path,
    format: Format = "onnx",  # noqa: A002
    index: bool = False,
    data: Path | None = None,
    force: bool = False,
) -> None:
    """Write the encoder, the item table and the ids of a run, and compare them with it.

    Args:
        run: Directory that "sce train" wrote.
        out: Directory to write; it appears only when it was found to be equal to the run.
        format: Of the encoder: onnx, or pt2 (torch.export), which sce.export.load_pt2 loads.
        index: Add an index for approximate search, of catalogues with 2,000,000 items or more; its
            recall@10 is measured.
        data: The run's dataset, if it was moved; its histories are compared. Without it, random
            ones are.
        force: Replace an export that is there.
    """
    found = write_export(run, out, format, index=index, data=data, force=force)
    with telling():
        print(
            f"{out}: compared with {run} on {found['histories']} histories "
            f"({'of its dataset' if found['of'] == 'dataset' else 'random'}): scores of up to "
            f"{found['scale']:.3g} differ by at most {found['difference']:.1e}; "
            f"{found['overlap@10']:.2%} of the ten best are the same"
        )
        if searched := found.get("index"):
            print(
                f"the index finds {searched['recall@10']:.1%} of the ten best (recall@10), "
                f"looking at {searched['effort']} items"
            )
        if format == "onnx":
            print(f"next: sce serve {shlex.quote(str(out))}")
