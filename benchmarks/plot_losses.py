"""Draw time and memory of the losses against catalog size, from the measured rows.

python benchmarks/plot_losses.py            # results/loss_gpu.jsonl -> docs/figures/losses.svg
"""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from rows import RESULTS

NAMES = {
    "CE, torch": ("full cross-entropy", "#9aa0a6", "-"),
    "CE, Liger, room": ("full cross-entropy, Liger, large chunks", "#3c9a5f", "-"),
    "CE, cut-cross-entropy": ("full cross-entropy, cut-cross-entropy", "#8e5bb5", "-"),
    "SCE, tensor code": ("SCE, tensor code", "#d9822b", "-"),
    "SCE": ("SCE, this package", "#1a6dd6", "-"),
    "SCE, CUDA graph": ("SCE, this package, as a CUDA graph", "#1a6dd6", "--"),
    "SCE, sparse gradient": ("SCE, this package, sparse gradient", "#1a6dd6", ":"),
}
SHAPE = {"batch": 128, "dim": 64, "bucket_size_y": 256, "dtype": "bfloat16"}


def main() -> None:
    rows = [json.loads(line) for line in (RESULTS / "loss_gpu.jsonl").read_text().splitlines()]
    rows = [row for row in rows if all(row.get(name) == SHAPE[name] for name in SHAPE)]
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sce", "font.size": 10})
    figure, (time, memory) = plt.subplots(1, 2, figsize=(9, 3.8))
    figure.set_layout_engine("constrained", wspace=0.08)
    for name, (label, colour, line) in NAMES.items():
        here = [row for row in rows if row["loss"] == name and not row.get("failed")]
        here.sort(key=lambda row: row["items"])
        if not here:
            continue
        items = [row["items"] for row in here]
        style = {"color": colour, "linestyle": line, "marker": "o", "markersize": 4}
        time.plot(items, [row["ms"] for row in here], label=label, **style)
        memory.plot(items, [row["extra MiB"] for row in here], **style)
        if any(row.get("failed") for row in rows if row["loss"] == name):
            memory.annotate(
                "then out of memory",
                (items[-1], here[-1]["extra MiB"]),
                xytext=(8, -3),
                textcoords="offset points",
                color=colour,
                fontsize=9,
            )
    time.set_ylabel("milliseconds, forward + backward")
    memory.set_ylabel("MiB beyond inputs and gradients")
    for axes in (time, memory):
        axes.set(xscale="log", yscale="log", xlabel="items in the catalog")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    path = Path(__file__).parent.parent / "docs" / "figures" / "losses.svg"
    figure.savefig(path, metadata={"Date": None})
    print(path)


if __name__ == "__main__":
    main()
