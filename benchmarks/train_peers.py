r"""The same SASRec trained by sce and by other libraries: time, memory, quality by one evaluator.

    python -m venv rectools && rectools/bin/pip install 'rectools[torch]==0.19.0' torch==2.13.0
    python -m venv replay && replay/bin/pip install 'replay-rec[torch]==0.22.0' torch==2.13.0
    python -m venv recbole && recbole/bin/pip install recbole==1.2.1 torch==2.13.0 \
        'numpy<2' 'pandas<3' 'scipy<1.14' 'setuptools<81'
    sce prepare beauty_5core_ts.csv.gz --split leave-one-out --out data/beauty
    python benchmarks/train_peers.py data/beauty --python rectools=rectools/bin/python \
        --python replay=replay/bin/python --python recbole=recbole/bin/python

On the CPU. Every library trains 64 dimensions, 2 blocks, 1 head, length 50 in batches of 128
sequences; RecBole, which has a sample for each target, in batches of as many targets. Each round
runs all libraries one after another, so that what else the machine does meets all alike; figures
are medians of the rounds. An epoch is extrapolated: the mean of `--steps` steps after a warm-up,
batches included, times the steps of an epoch. Memory is the peak of the process, in training.
Recommending is the library's own way to the top 10 for all test users, without items that they had.

With `--epochs` whole epochs are trained instead, and the recommendations are scored by sce's
metrics, unsampled, on the same users and targets. Sampled negatives (ce-) are shared by a sequence
in sce, by the batch in RePlay, by nobody in RecTools; RecBole has none, and `--shared` changes sce.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rows import keep, provenance, show
from sce import PreparedDataset
from sce.evaluation.metrics import METRICS, RankCounts

WORKER = Path(__file__).with_name("train_workers.py")
LIBRARIES = ["sce", "rectools", "replay", "recbole"]
LOSSES = {"ce": LIBRARIES, "ce-": LIBRARIES[:-1], "sce": LIBRARIES[:1]}  # and who has them
IDENTITY = ["data", "library", "loss", "length", "shared", "epochs", "version", "machine"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="of sce prepare --split leave-one-out")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="who has a library"
    )
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["ce", "ce-"])
    parser.add_argument("--steps", type=int, default=40, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="of all libraries")
    parser.add_argument("--epochs", type=int, default=0, help="train so many, for quality")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--negatives", type=int, default=256)
    parser.add_argument("--shared", choices=["position", "sequence", "batch"], default="sequence")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: results/train_peers.jsonl")
    options = parser.parse_args()
    pythons = {"sce": sys.executable} | dict(each.split("=", 1) for each in options.python)
    if unknown := sorted(set(pythons) - set(LIBRARIES)):
        sys.exit(f"train_peers: --python {unknown[0]}=...; the libraries are {LIBRARIES}")
    dataset = PreparedDataset.load(options.data)
    if dataset.settings.get("split") != "leave-one-out":
        sys.exit(
            f"train_peers: {options.data} has another split: sce prepare --split leave-one-out"
        )
    cells = [
        (loss, library) for loss in options.losses for library in LOSSES[loss] if library in pythons
    ]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number in range(options.rounds):
        for cell in cells:
            row = measure(pythons[cell[1]], *cell, dataset, options, options.seed + number)
            print(f"round {number + 1}", *cell, row, file=sys.stderr, flush=True)
            found[cell].append(row)
    rows = [summary(*cell, runs, dataset, options) for cell, runs in found.items()]
    for row in rows:
        ours = next((each for each in rows if is_ours(each, row)), {})
        for figure in ("epoch s", "peak MiB", "recommend s"):
            if figure in row and figure in ours:
                row[f"{figure} / sce"] = round(row[figure] / ours[figure], 2)
    path = keep("train_peers", rows, to=options.out, beside=IDENTITY)
    print(show(rows, [column for column in COLUMNS if any(column in row for row in rows)]))
    print(f"\n{len(rows)} rows in {path}")


COLUMNS = ["loss", "library", "version", "epoch s", "epoch s / sce", "peak MiB", "peak MiB / sce"]
COLUMNS += ["recommend s", "recommend s / sce", "ndcg@10", "hr@10", "cov@10", "failed"]


def is_ours(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if a row is that of sce with the loss of the other."""
    return bool(row["library"] == "sce" and row["loss"] == other["loss"])


def measure(
    python: str,
    loss: str,
    library: str,
    dataset: PreparedDataset,
    options: argparse.Namespace,
    seed: int,
) -> dict[str, Any]:
    """Train and recommend in a process of its own, and score what was recommended."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made, "items.npy")
        job = {
            "library": library,
            "data": str(dataset.path.resolve()),
            "loss": loss,
            "steps": None if options.epochs else options.steps,
            "warm_up": options.warm_up,
            "epochs": options.epochs or 1000,
            "dim": 64,
            "blocks": 2,
            "lr": 1e-3,
            "k": 10,
            "seed": seed,
            "out": str(out),
        }
        job |= {name: getattr(options, name) for name in SHARED_OPTIONS}
        done = subprocess.run(
            [python, "-W", "ignore", str(WORKER), json.dumps(job)],
            env=environment(library),
            cwd=made,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip() or "nothing was printed").splitlines()[-1]
            return {"failed": f"code {done.returncode}: {last}"[:200]}
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        begun = told.pop("begun")
        warm = min(options.warm_up, len(begun) - 2)
        step = (begun[-1] - begun[warm]) / (len(begun) - 1 - warm)
        told |= {"step s": step, "epoch s": step * -(-len(dataset.train) // options.batch)}
        if options.epochs:
            told |= score(np.load(out), dataset)
    return told


SHARED_OPTIONS = ["batch", "length", "negatives", "shared", "dropout"]


def environment(library: str) -> dict[str, str]:
    """Where sce is imported from is not for the interpreters of others."""
    names = dict(os.environ)
    if library != "sce":
        names.pop("PYTHONPATH", None)
    return names


def score(items: NDArray[np.int64], dataset: PreparedDataset) -> dict[str, float]:
    """The metrics of recommendations [users, k] for the test users: catalogue indices, or -1."""
    targets = dataset.test.items[dataset.test.offsets[1:] - 1]
    at = (items == targets[:, None]).sum(axis=0)
    ks = (1, 5, 10)
    shown = {k: np.setdiff1d(items[:, :k], -1) for k in ks}
    covered = {k: len(shown[k]) / dataset.n_items for k in ks}
    counts = RankCounts(at, len(targets), covered)
    return {f"{name}@{k}": each.compute(counts, k) for k in ks for name, each in METRICS.items()}


def summary(
    loss: str,
    library: str,
    runs: list[dict[str, Any]],
    dataset: PreparedDataset,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The median of the rounds, or why there is none."""
    row: dict[str, Any] = {"data": dataset.path.name, "items": dataset.n_items}
    row |= {"users": len(dataset.train), "library": library, "loss": loss, "epochs": options.epochs}
    row |= {name: getattr(options, name) for name in SHARED_OPTIONS}
    row |= {"rounds": options.rounds, "steps": options.steps, "warm_up": options.warm_up}
    row |= provenance("numpy")
    failed = [run for run in runs if "failed" in run]
    if failed:
        return row | failed[0]
    for name, value in runs[0].items():
        if isinstance(value, str):
            row[name] = value
        else:
            middle = statistics.median(run[name] for run in runs)
            row[name] = round(middle, 4 if "@" in name or name == "step s" else 1)
    return row | {"each epoch s": [round(run["epoch s"], 1) for run in runs]}


if __name__ == "__main__":
    main()
