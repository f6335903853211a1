r"""The same SASRec trained by sce and by other libraries: time, memory, quality by one evaluator.

    python -m venv rectools && rectools/bin/pip install 'rectools[torch]==0.19.0' torch==2.13.0
    python -m venv replay && replay/bin/pip install 'replay-rec[torch]==0.22.0' torch==2.13.0
    python -m venv recbole && recbole/bin/pip install recbole==1.2.1 torch==2.13.0 \
        'numpy<2' 'pandas<3' 'scipy<1.14' 'setuptools<81'
    sce prepare beauty_5core_ts.csv.gz --split leave-one-out --out data/beauty
    python benchmarks/train_peers.py data/beauty --python rectools=rectools/bin/python \
        --python replay=replay/bin/python --python recbole=recbole/bin/python

Each library trains SASRec of 64 dimensions, 2 blocks, 1 head, length 50 in batches of 128
sequences; RecBole, which has a sample for each target, in batches of as many targets. All are
imported first, in processes of their own. Then each round runs them one after another, so that what
else the machine does meets all alike; figures are medians of the rounds. An epoch is extrapolated:
the mean of `--steps` steps after a warm-up, batches included, times the steps of an epoch.
Recommending is the library's own way from histories in memory to an array of the top 10 for all
test users, without items that they had. sce and RecTools take and give item ids; RePlay takes a
file of codes, which is written then, and gives codes; RecBole, which recommends to users of its
dataset, has their histories before.

With `--epochs` whole epochs are trained instead, of which the first is the warm-up, and the
recommendations are scored by sce's metrics, unsampled, on the same users and targets. With
`--together` they train at the same time, for quality alone. Memory is the peak in training: of the
process, or with `--device cuda`, which needs `--epochs`, of what torch allocated on the GPU.

Sampled negatives (ce-) are shared by a sequence in sce, by the batch in RePlay, by nobody in
RecTools; RecBole has none, and `--shared` changes sce. bf16 is autocast; RecBole has none. RePlay
has its length buckets on; replay-plain, of the same interpreter, does without. Exact CE is also run
by sce-chunked, which keeps no logits.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rows import keep, parser_of, provenance, show
from sce import PreparedDataset
from sce.evaluation.metrics import compute

WORKER = Path(__file__).with_name("train_workers.py")
LIBRARIES = ["sce", "sce-chunked", "rectools", "replay", "replay-plain", "recbole"]
LOSSES = {"ce": LIBRARIES, "ce-": ["sce", *LIBRARIES[2:-1]], "sce": ["sce"]}  # and who has them
FIGURES = ["epoch s", "peak MiB", "recommend s"]


class Cell(NamedTuple):
    """What is trained."""

    batch: int
    precision: str
    loss: str
    library: str


IDENTITY = [
    "data",
    *Cell._fields,
    "length",
    "blocks",
    "ligr",
    "shared",
    "epochs",
    "together",
    "version",
]
IDENTITY += ["device", "machine"]


def main() -> None:
    shape = {"batch": [128], "length": 50, "blocks": 2, "negatives": 256, "dropout": 0.2}
    parser = parser_of(__doc__, "train_peers", **shape, seed=0)
    add = parser.add_argument
    add("data", type=Path, help="of sce prepare --split leave-one-out")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="who has a library")
    add("--losses", nargs="+", choices=LOSSES, default=["ce", "ce-"])
    add("--steps", type=int, default=40, help="that are timed")
    add("--warm-up", type=int, default=5, help="steps before them")
    add("--rounds", type=int, default=2, help="of all libraries")
    add("--epochs", type=int, default=0, help="train so many, for quality")
    add("--seconds", type=float, default=math.inf, help="after so many, a peer begins no epoch")
    add("--limit", type=int, default=36_000, help="seconds after which one is ended")
    add(
        "--until",
        type=float,
        default=math.inf,
        help="seconds of training after which no other begins",
    )
    add("--together", action="store_true", help="all at the same time: no times, but quality")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--precision", nargs="+", choices=["float32", "bf16"], default=["float32"])
    add("--ligr", action="store_true", help="LiGR blocks in place of SASRec's; sce and rectools")
    add("--shared", choices=["position", "sequence", "batch"], default="sequence")
    options = parser.parse_args()
    pythons = dict.fromkeys(LIBRARIES[:2], sys.executable)
    for name, _, path in (each.partition("=") for each in options.python):
        if not (found := shutil.which(path)):
            sys.exit(f"train_peers: --python {name}={path}: no interpreter is there")
        pythons[name] = str(Path.cwd() / found)  # not resolved: the link tells the environment
    if unknown := sorted(set(pythons) - set(LIBRARIES)):
        sys.exit(f"train_peers: --python {unknown[0]}=...; the libraries are {LIBRARIES}")
    if (options.device == "cuda" or options.together) and not options.epochs:
        sys.exit("train_peers: --device cuda and --together train whole epochs; give --epochs")
    dataset = PreparedDataset.load(options.data)
    if dataset.settings.get("split") != "leave-one-out":
        sys.exit(
            f"train_peers: {options.data} has another split: sce prepare --split leave-one-out"
        )
    rows: list[dict[str, Any]] = []
    for found in measure_all(cells_of(options, pythons), pythons, dataset, options):
        rows = [summary(cell, runs, dataset, options) for cell, runs in found.items()]
        for row in rows:
            ours = next((each for each in rows if is_ours(each, row)), {})
            for figure in FIGURES:
                if figure in row and figure in ours:
                    row[f"{figure} / sce"] = round(row[figure] / ours[figure], 2)
        keep("train_peers", rows, to=options.out, beside=IDENTITY)
    print(show(rows, [column for column in COLUMNS if any(column in row for row in rows)]))


COLUMNS = [*Cell._fields, "version", "epochs trained", "epoch s", "epoch s / sce", "peak MiB"]
COLUMNS += ["peak MiB / sce", "recommend s", "recommend s / sce", "ndcg@10", "hr@10", "cov@10"]
COLUMNS += ["stand-ins", "failed"]


def cells_of(options: argparse.Namespace, pythons: Mapping[str, str]) -> list[Cell]:
    """All that is asked for, and that the libraries at hand have."""
    asked = itertools.product(options.batch, options.precision, options.losses, LIBRARIES)
    cells = itertools.starmap(Cell, asked)
    return [
        cell
        for cell in cells
        if cell.library in pythons
        and (not options.ligr or cell.library in ("sce", "rectools"))
        and cell.library in LOSSES[cell.loss]
        and (cell.library, cell.precision) != ("recbole", "bf16")
    ]


def is_ours(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if a row is that of sce, and else as the other."""
    return all(row[name] == {**other, "library": "sce"}[name] for name in Cell._fields)


def measure_all(
    cells: list[Cell],
    pythons: Mapping[str, str],
    dataset: PreparedDataset,
    options: argparse.Namespace,
) -> Iterator[dict[Cell, list[dict[str, Any]]]]:
    """What the processes have told so far, by cell, whenever one more has."""
    found: dict[Cell, list[dict[str, Any]]] = {}
    trained = 0.0
    for number in range(options.rounds):
        with contextlib.ExitStack() as stack:
            workers = {
                cell: stack.enter_context(
                    Worker(pythons[cell.library], cell, dataset, options, options.seed + number)
                )
                for cell in cells
            }
            for worker in workers.values():
                worker.wait()
            begun = time.perf_counter()
            if options.together:
                for worker in workers.values():
                    worker.go()
            for cell, worker in workers.items():
                if trained > options.until and not options.together:
                    break
                worker.go()
                row = worker.told()
                trained, begun = trained + time.perf_counter() - begun, time.perf_counter()
                print(f"round {number + 1}", *cell, row, file=sys.stderr, flush=True)
                found.setdefault(cell, []).append(row)
                yield found


class Worker:
    """A process that trains and recommends, and the score of what it recommended."""

    def __init__(
        self,
        python: str,
        cell: Cell,
        dataset: PreparedDataset,
        options: argparse.Namespace,
        seed: int,
    ) -> None:
        self.dataset, self.options, self.cell = dataset, options, cell
        self.made = Path(tempfile.mkdtemp())
        ours = cell.library in LIBRARIES[:2]  # where sce is imported from is not for others
        job = {
            **cell._asdict(),
            "data": str(dataset.path.resolve()),
            "steps": None if options.epochs else options.steps,
            "epochs": options.epochs or 1000,
            "dim": 64,
            "lr": 1e-3,
            "k": 10,
            "seed": seed,
            "out": str(self.made / "items.npy"),
        }
        job |= {name: getattr(options, name) for name in (*SHARED_OPTIONS, "limit")}
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(WORKER), json.dumps(job)],
            env={k: v for k, v in os.environ.items() if ours or k != "PYTHONPATH"},
            cwd=self.made,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.made / "stderr").open("w"),
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.made)

    def wait(self) -> None:
        """Wait until it has imported its library, or has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready":
                break

    def go(self) -> None:
        """Let it begin; a second time is nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        """What it has measured, or why not."""
        options = self.options
        out, _ = self.process.communicate()
        if code := self.process.returncode:
            lines = (self.made / "stderr").read_text().strip().splitlines()
            print(*lines[-15:], sep="\n", file=sys.stderr)
            last = lines[-1] if lines else "nothing was printed"
            if code == -signal.SIGALRM:
                last = f"ended after {options.limit} s"
            return {"failed": f"code {code}: {last}"[:200]}
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        begun, marks = told.pop("begun"), told.pop("marks")
        if options.epochs:
            seconds = np.diff(marks)
            told |= {"epochs trained": len(seconds), "first epoch s": float(seconds[0])}
            told["epoch s"] = float(np.median(seconds[1:] if len(seconds) > 1 else seconds))
            told |= score(np.load(self.made / "items.npy"), self.dataset)
        else:
            warm = min(options.warm_up, len(begun) - 2)
            step = (begun[-1] - begun[warm]) / (len(begun) - 1 - warm)
            steps = -(-len(self.dataset.train) // self.cell.batch)
            told |= {"step s": step, "epoch s": step * steps}
        if options.together:
            for name in ("epoch s", "first epoch s", "recommend s"):
                del told[name]
        return told


SHARED_OPTIONS = ["device", "length", "blocks", "ligr", "negatives", "shared", "dropout", "warm_up"]
SHARED_OPTIONS += ["seconds"]


def score(items: NDArray[np.int64], dataset: PreparedDataset) -> dict[str, float]:
    """The metrics of recommendations [users, k] for the test users: catalogue indices, or -1."""
    targets = dataset.test.items[dataset.test.offsets[1:] - 1]
    hits = items == targets[:, None]
    ranks = np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, 0)
    ks = (1, 5, 10)
    shown = {k: np.setdiff1d(items[:, :k], -1) for k in ks}
    covered = {k: len(shown[k]) / dataset.n_items for k in ks}
    return compute(ranks, ks, covered)


def summary(
    cell: Cell, runs: list[dict[str, Any]], dataset: PreparedDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """The median of the rounds, or why there is none."""
    row: dict[str, Any] = {"data": dataset.path.name, "items": dataset.n_items}
    row |= {"users": len(dataset.train), **cell._asdict(), "epochs": options.epochs}
    row |= {name: getattr(options, name) for name in SHARED_OPTIONS if name != "seconds"}
    row |= {"rounds": options.rounds, "steps": options.steps, "together": options.together}
    row |= provenance("numpy")
    failed = [run for run in runs if "failed" in run]
    if failed:
        return row | failed[0]
    for name, value in runs[0].items():
        if isinstance(value, str):
            row[name] = value
        else:
            middle = statistics.median(run[name] for run in runs)
            row[name] = round(middle, 4 if "@" in name or name.endswith(" s") else 1)
    for name in ("epoch s", "ndcg@10"):
        if name in row:
            row[f"each {name}"] = [round(run[name], 4) for run in runs]
    return row


if __name__ == "__main__":
    main()
