"""When a log has grown, is training on better than training anew?

    OMP_NUM_THREADS=1 python benchmarks/going_on.py ml1m.csv.gz

Cuts a log in two at the median time and trains a model on the first part. On the whole log, that
model is trained on (`sce train --from`), and another one is trained anew for as many epochs. Splits
are temporal. Epochs are measured on the test users of the whole log, whose events to be predicted
are later than the first part. A row for each training goes to benchmarks/results/going_on.jsonl.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import polars as pl

from rows import keep, parser_of, provenance, show
from sce import CrossEntropy, PreparedDataset, SASRec, TrainingSettings, fit, prepare, unite_items
from sce.evaluation.evaluate import evaluate

MODEL: dict[str, Any] = {"dim": 32, "max_length": 30}
TRAINING: dict[str, Any] = {"batch_size": 64, "learning_rate": 3e-3, "patience": 0, "device": "cpu"}
METRIC, SPLITS, WAYS = "ndcg@10", ("validation", "test"), ("on", "anew")


def main() -> None:
    parser = parser_of(__doc__, time_column="timestamp", seeds=[0, 1, 2])
    parser.add_argument("log", type=Path, help="csv file with a column of times")
    parser.add_argument("--before", type=int, default=4, help="epochs on the first part")
    parser.add_argument("--epochs", type=int, default=4, help="epochs on the whole log, both ways")
    options = parser.parse_args()
    log = pl.read_csv(options.log).sort(options.time_column, maintain_order=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        place, time = Path(made), options.time_column
        first = prepare(log[: len(log) // 2], place / "first", time_column=time)
        whole = prepare(log, place / "whole", time_column=time)
        about = {"log": options.log.name.partition(".")[0], **sizes(first, whole)}
        about |= {"model": asdict(SASRec(1, **MODEL).settings), "training": TRAINING}
        for seed in options.seeds:
            run = place / f"run-{seed}"
            made_by = {
                "first": train(first, options.before, seed, out=run),
                "on": train(unite_items(whole, run), options.epochs, seed, start_from=run),
                "anew": train(whole, options.epochs, seed),
            }
            for way, row in made_by.items():
                rows.append({"way": way, "seed": seed, **row, **about, **provenance("torch")})
            path = keep("going_on", rows, beside=["log", "way", "seed"])
    print(show([*summaries(rows)], ["epoch", *(f"{s}, {w}" for s in SPLITS for w in WAYS)]))
    print(f"\n{len(rows)} rows in {path}")


def sizes(first: PreparedDataset, whole: PreparedDataset) -> dict[str, Any]:
    """Sizes of the first part and of the whole, and how many test users are in the first part."""
    tested = whole.user_ids.decode(whole.test.users)
    return {
        "events": [len(each.train.items) for each in (first, whole)],
        "items": [each.n_items for each in (first, whole)],
        "test_users": len(tested),
        "test_users_in_first": int((first.everyone.lookup(tested) >= 0).sum()),
    }


def train(dataset: PreparedDataset, epochs: int, seed: int, **options: Any) -> dict[str, Any]:
    """Train, and measure every epoch; what a model that is trained on begins with is epoch 0."""
    model = SASRec(dataset.n_items, **MODEL, seed=seed)
    settings = TrainingSettings(epochs=epochs, seed=seed, **TRAINING)
    row: dict[str, Any] = {"epochs": [], **{split: [] for split in SPLITS}}

    def measure(record: Any) -> None:
        row["epochs"].append(record["epoch"])
        row["validation"].append(record["validation"][METRIC])
        row["test"].append(evaluate(model, dataset, split="test").values[METRIC])
        print({name: values[-1] for name, values in row.items()}, flush=True)

    given: Any = {"on_epoch": measure, "progress": False, **options}
    result = fit(model, CrossEntropy(chunk_size=512), dataset, settings=settings, **given)
    row["best_epoch"] = result.best_epoch
    told = ("carried", "new", "from_neighbours", "unseen", "optimizer")
    return row | {name: result.start[name] for name in told if result.start}


def summaries(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By epoch, the mean over seeds and its standard deviation, of both splits and ways."""
    for epoch in sorted({epoch for row in rows if row["way"] == "on" for epoch in row["epochs"]}):
        cells: dict[str, Any] = {"epoch": epoch}
        for split in SPLITS:
            for way in WAYS:
                found = [
                    row[split][row["epochs"].index(epoch)]
                    for row in rows
                    if row["way"] == way and epoch in row["epochs"]
                ]
                spread = f" ± {stdev(found):.4f}" if len(found) > 1 else ""
                cells[f"{split}, {way}"] = f"{mean(found):.4f}{spread}" if found else None
        yield cells


if __name__ == "__main__":
    main()
