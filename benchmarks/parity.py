"""Does our training reach the quality of the paper's published code?

    sce prepare beauty_5core_ts.csv.gz --split leave-one-out --out data/beauty
    sce prepare ml1m.csv.gz --split temporal --out data/ml1m
    sce prepare globo_clicks.csv.gz --preset paper --out data/globo
    python benchmarks/parity.py data --at-once 12

Trains SASRec with each loss on three datasets and several seeds, many side by side on one GPU, and
puts the mean beside the reference: the authors' model and losses, run once per row (twice where two
numbers are given) with the same settings.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rows import keep, parser_of, provenance, show


class Case(NamedTuple):
    """One row of the table: a loss on a dataset, and what the published code gives there."""

    data: str
    loss: str
    options: str
    ndcg: float
    hr: float


# Patience is 50 epochs on beauty and 10 elsewhere.
SHORT = "--model.dropout 0.6 --model.max-length 50 --batch-size 1024 --epochs 300"
SHORT += " --training.evaluate-every 2 --training.patience 25"
LONG = "--model.dropout 0.3 --batch-size 128 --epochs 300"
BUCKETS = "--loss.bucket-size-y 256"  # as the published code has it
CASES = [
    Case("beauty", "sce", f"{SHORT} --loss.centres random {BUCKETS}", 0.0553, 0.0936),
    Case("beauty", "ce", SHORT, 0.0504, 0.0865),
    Case("ml1m", "sce", f"{LONG} --loss.centres mix {BUCKETS}", 0.0692, 0.118),
    Case("ml1m", "ce", LONG, 0.0659, 0.112),
    Case("ml1m", "ce-", LONG, 0.0580, 0.100),
    Case("globo", "sce", f"{LONG} --loss.centres mix {BUCKETS}", 0.1475, 0.270),
    Case("globo", "ce", LONG, 0.126, 0.223),
    Case("globo", "ce-", LONG, 0.138, 0.247),
]


def main() -> None:
    parser = parser_of(__doc__, "parity")
    parser.add_argument("data", type=Path, help="directory with prepared beauty, ml1m and globo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="cases such as beauty/sce")
    parser.add_argument("--at-once", type=int, default=4, help="trainings side by side")
    parser.add_argument("--tag", default="", help="added to the rows")
    parser.add_argument("--extra", default="", help="more options of sce train, for all")
    parser.add_argument("--runs", type=Path, help="keep the runs here")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.only or f"{c.data}/{c.loss}" in options.only]
    with tempfile.TemporaryDirectory() as made:
        runs = options.runs or Path(made)
        runs.mkdir(parents=True, exist_ok=True)
        waiting = [(case, seed) for seed in options.seeds for case in cases]
        rows: list[dict[str, Any]] = []
        for row in train_all(waiting, options.data, runs, options.at_once, options.extra):
            rows.append(provenance("torch", "triton") | row | {"tag": options.tag})
            path = keep("parity", rows, to=options.out, beside=IDENTITY)
    print(show([summary(case, rows) for case in cases], COLUMNS))
    print(f"\n{len(rows)} rows in {path}")


def train_all(
    waiting: list[tuple[Case, int]], data: Path, runs: Path, at_once: int, extra: str
) -> Iterator[dict[str, Any]]:
    """Run everything, some at once; yield a row for each as it ends."""
    going: dict[subprocess.Popen[bytes], tuple[Case, int, Path, float]] = {}
    while waiting or going:
        while waiting and len(going) < at_once:
            case, seed = waiting.pop(0)
            run = runs / f"{case.data}-{case.loss}-{seed}"
            command = [
                sys.executable,
                "-c",
                "import sys; from sce.cli import main; sys.exit(main())",
            ]
            command += ["train", str(data / case.data), "--loss", case.loss, "--seed", str(seed)]
            command += [*case.options.split(), *extra.split(), "--out", str(run), "--force"]
            with Path(f"{run}.log").open("wb") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            going[process] = (case, seed, run, time.monotonic())
        time.sleep(0.2)
        for process in [process for process in going if process.poll() is not None]:
            case, seed, run, begun = going.pop(process)
            row: dict[str, Any] = {"data": case.data, "loss": case.loss, "seed": seed}
            row |= {
                "options": f"{case.options} {extra}".strip(),
                "seconds": round(time.monotonic() - begun, 1),
            }
            if process.returncode:
                row["failed"] = Path(f"{run}.log").read_text().strip().splitlines()[-1]
            else:
                result = json.loads((run / "result.json").read_text())
                row |= {name: result[name] for name in ("best_epoch", "epochs", "memory_mib")}
                row |= {"test": result["test"], "validation": result["validation"]}
                run_settings = json.loads((run / "run.json").read_text())["config"]
                row |= {"machine": result["device"], "loss_settings": run_settings["loss"]}
            print({k: v for k, v in row.items() if k not in ("test", "validation")}, flush=True)
            print({k: v for k, v in row.get("test", {}).items() if "@10" in k}, flush=True)
            yield row


# What makes a row another one: with the same it is replaced.
IDENTITY = ["data", "loss", "seed", "options", "tag", "commit"]
COLUMNS = ["data", "loss", "NDCG@10", "± sd", "published", "HR@10", "published HR", "COV@10"]
COLUMNS += ["peak MiB", "seeds"]


def summary(case: Case, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds, beside the reference."""
    here = [
        row
        for row in rows
        if (row["data"], row["loss"]) == (case.data, case.loss) and "test" in row
    ]
    if not here:
        return {"data": case.data, "loss": case.loss, "seeds": 0}
    ndcg = [row["test"]["ndcg@10"] for row in here]
    return {
        "data": case.data,
        "loss": case.loss,
        "NDCG@10": round(statistics.mean(ndcg), 4),
        "± sd": round(statistics.stdev(ndcg), 4) if len(ndcg) > 1 else None,
        "published": case.ndcg,
        "HR@10": round(statistics.mean(row["test"]["hr@10"] for row in here), 4),
        "published HR": case.hr,
        "COV@10": round(statistics.mean(row["test"]["cov@10"] for row in here), 3),
        "peak MiB": round(max(row["memory_mib"]["training"] for row in here)),
        "seeds": len(here),
    }


if __name__ == "__main__":
    main()
