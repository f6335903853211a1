"""Draw time and memory of the losses against catalogue size, from the measured rows.

python benchmarks/plot_losses.py            # results/loss_gpu.jsonl -> docs/figures/losses.svg
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import altair as alt

from rows import kept
from sce.experiments.figure_spec import FigureSpec
from sce.report.charts import make_figures
from sce.report.drawing import Figure
from sce.report.frame import group_seeds

NAMES = {
    "CE, fused": "full cross-entropy, this package",
    "CE, Liger, tuned": "full cross-entropy, Liger, large chunks",
    "CE, cut-cross-entropy": "full cross-entropy, cut-cross-entropy",
    "SCE, tensor code": "SCE, tensor code",
    "SCE": "SCE, this package",
    "SCE, CUDA graph": "SCE, this package, as a CUDA graph",
}
SHAPE = {"batch": 128, "dim": 64, "bucket_size_y": 256, "dtype": "bfloat16"}


def rows_shown() -> list[dict[str, Any]]:
    rows = kept("loss_gpu")
    return [row for row in rows if row["loss"] in NAMES and row.items() >= SHAPE.items()]


def digest(rows: list[dict[str, Any]]) -> str:
    """By which a test knows a figure of other rows."""
    shown = [[row[name] for name in ("loss", "items", "ms", "extra MiB")] for row in rows
             if not row.get("failed")]  # fmt: skip
    return hashlib.sha256(json.dumps(sorted(shown)).encode()).hexdigest()[:16]


def main() -> None:
    rows = rows_shown()
    failed = {row["loss"] for row in rows if row.get("failed")}
    groups = group_seeds(as_run(row, failed) for row in rows if not row.get("failed"))
    specs = [FigureSpec("line", x="items", y=y, log="xy") for y in ("step", "workspace")]
    charts: list[Any] = [one.chart for spec in specs for one in make_figures(groups, spec)]
    figure = Figure("Time and memory of the losses", "", "", alt.hconcat(*charts))
    path = Path(__file__).parent.parent / "docs" / "figures" / "losses.svg"
    path.write_text(f"{figure.file.strip()}<!-- {digest(rows)} -->\n", encoding="utf-8")
    print(path)


def as_run(row: dict[str, Any], failed: set[str]) -> dict[str, Any]:
    """A measured row as one of a sweep."""
    name = NAMES[row["loss"]] + (", then out of memory" if row["loss"] in failed else "")
    dataset = {"name": f"{row['items']}", "content_hash": row["items"], "n_items": row["items"]}
    kind = {"status": "finished", "measure": "steps", "seed": 0, "dataset": dataset}
    return row | kind | {"settings": {"loss.name": name}}


if __name__ == "__main__":
    main()
