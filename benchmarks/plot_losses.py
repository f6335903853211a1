"""Draw time and memory of the losses against catalogue size, from the measured rows.

python benchmarks/plot_losses.py            # results/loss_gpu.jsonl -> docs/figures/losses.svg
"""

import json
from pathlib import Path
from typing import Any

import altair as alt

from rows import RESULTS
from sce.report.drawing import PALETTE, Axis, Curve, Figure, Point, draw_curves

NAMES = {
    "CE, torch": ("full cross-entropy", 5, 0),
    "CE, Liger, tuned": ("full cross-entropy, Liger, large chunks", 2, 0),
    "CE, cut-cross-entropy": ("full cross-entropy, cut-cross-entropy", 3, 0),
    "SCE, tensor code": ("SCE, tensor code", 1, 0),
    "SCE": ("SCE, this package", 0, 0),
    "SCE, CUDA graph": ("SCE, this package, as a CUDA graph", 0, 1),
    "SCE, sparse gradient": ("SCE, this package, sparse gradient", 0, 2),
}
MEASURES = {
    "ms": "milliseconds, forward + backward",
    "extra MiB": "MiB beyond inputs and gradients",
}
SHAPE = {"batch": 128, "dim": 64, "bucket_size_y": 256, "dtype": "bfloat16"}


def main() -> None:
    rows = [json.loads(line) for line in (RESULTS / "loss_gpu.jsonl").read_text().splitlines()]
    rows = [row for row in rows if all(row.get(name) == SHAPE[name] for name in SHAPE)]
    failed = {row["loss"] for row in rows if row.get("failed")}
    rows = sorted((row for row in rows if not row.get("failed")), key=lambda row: row["items"])
    items = Axis("items in the catalogue", "~s", log=True)
    charts: list[Any] = []
    for measure, title in MEASURES.items():
        curves = [
            Curve(label + (", then out of memory" if name in failed else ""),
                  [Point(row["items"], row[measure]) for row in rows if row["loss"] == name],
                  PALETTE[colour], dash)
            for name, (label, colour, dash) in NAMES.items()
        ]  # fmt: skip
        charts.append(draw_curves(curves, items, Axis(title, "~s", log=True)))
    figure = Figure("Time and memory of the losses", "", "", alt.hconcat(*charts))
    path = Path(__file__).parent.parent / "docs" / "figures" / "losses.svg"
    path.write_text(figure.file, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
