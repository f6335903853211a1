"""Is SCE as good as exact cross-entropy at a million items, and what do both take?

    python benchmarks/scale.py                                       # an H200: five minutes
    python benchmarks/scale.py --data DIR --epochs 10                # a prepared dataset instead
    python benchmarks/scale.py --items 20_000 --live 2_000 --users 2_000 --batch 32    # a CPU

The log of `sce synthesize`, of some items among a million. Beside each loss is what a ranker
reaches that knows the rules of the log: no model can do much better. Each loss has the same model,
batches and number of epochs. The best epoch by validation is tested. Exact cross-entropy is ours,
in chunks, and cut-cross-entropy's where it is installed; with row-wise updates SCE has buckets of
several sizes, as every row in a bucket is touched there.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import peers
from hundred_million import METRICS, make_events, write
from rows import keep, parser_of, provenance, show
from sce import CrossEntropy, SASRec, ScalableCrossEntropy, TrainingSettings, fit
from sce.data import synthetic
from sce.data.prepared import PreparedDataset
from sce.data.synthetic import SyntheticSettings
from sce.training.device import resolve_device

CHUNK = 8192  # items
CUT = "CE, cut-cross-entropy"
Integers = NDArray[np.int64]


def main() -> None:
    sizes = {"items": 1_000_000, "users": 40_000, "test_users": 4_000}
    training = {"batch": 128, "length": 100, "dropout": 0.2, "epochs": 6, "device": "auto"}
    parser = parser_of(__doc__, "scale", **sizes, **training, seeds=[0])
    parser.add_argument("--live", type=int, default=50_000, help="items that may occur")
    parser.add_argument("--data", type=Path, help="a prepared dataset, instead of a synthetic log")
    parser.add_argument("--only", nargs="+", choices=contenders(), default=list(contenders()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = SyntheticSettings(items=options.live, users=options.users)
        if options.data:
            dataset = PreparedDataset.load(options.data)
        else:
            made = make_events(log, options.items // options.live)
            dataset = write(Path(directory, "data"), made, options)
        known = {} if options.data else {"known rules": reached(log, dataset, options)}
        print(f"{dataset.n_items:,} items, {len(dataset.train.items):,} events", known, flush=True)
        rows = []
        for seed in options.seeds:
            for name in options.only:
                rows.append(row := train(name, seed, dataset, options) | known)
                keep("scale", rows, to=options.out, beside=("data", "loss", "seed", "machine"))
                print(show([row], ["loss", *METRICS, "ms", "peak MiB", "failed"]), flush=True)


def contenders() -> dict[str, tuple[Callable[[], Any], bool]]:
    """Return what makes each loss, and whether updates are row-wise."""
    found: dict[str, tuple[Callable[[], Any], bool]] = {
        "SCE": (ScalableCrossEntropy, False),
        "CE, chunked": (partial(CrossEntropy, chunk_size=CHUNK), False),
        CUT: (lambda: cut_cross_entropy, False),
    }
    for size in (256, 512, 1024, 2048):
        loss = partial(ScalableCrossEntropy, bucket_size_y=size)
        found[f"SCE, row-wise, b_y = {size}"] = loss, True
    return found


def cut_cross_entropy(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    """Apple's kernels, which take no float32."""
    return peers.cut_cross_entropy(states.bfloat16(), catalogue.bfloat16(), targets)


def train(
    name: str, seed: int, dataset: PreparedDataset, options: argparse.Namespace
) -> dict[str, Any]:
    """Train with one loss; return its row."""
    device = resolve_device(options.device)
    make_loss, row_wise = contenders()[name]
    settings = TrainingSettings(
        epochs=options.epochs,
        patience=0,
        batch_size=options.batch,
        precision="bf16" if device.type == "cuda" else "float32",
        row_wise=row_wise,
        device=str(device),
        seed=seed,
    )
    torch.manual_seed(seed)
    model = SASRec(dataset.n_items, max_length=options.length, dropout=options.dropout)
    sizes = {field: getattr(options, field) for field in ("batch", "length", "epochs")}
    row: dict[str, Any] = {"data": options.data.name if options.data else "synthetic"}
    row |= {"items": dataset.n_items, "events": len(dataset.train.items), **sizes}
    row |= {"loss": name, "seed": seed, **provenance("torch", "triton", "cut-cross-entropy")}
    try:
        result = fit(model, make_loss(), dataset, settings=settings, progress=False)
    except (ModuleNotFoundError, RuntimeError) as error:
        return row | {"failed": " ".join(str(error).split())[:200]}
    assert result.test is not None
    assert result.popularity is not None
    last = result.history[-1]
    return row | {
        **{metric: round(result.test[metric], 5) for metric in METRICS},
        "best epoch": result.best_epoch,
        "validation": [round(record["validation"]["ndcg@10"], 5) for record in result.history],
        "popularity ndcg@10": round(result.popularity["test"]["ndcg@10"], 5),
        "test users": result.users["test"],
        "ms": round(1000 * last["seconds"]["training"] / last["steps"], 3),
        "steps": last["steps"],
        "peak MiB": round(result.memory_mib["training"] or 0),
    }


# --- the synthetic log


def reached(log: SyntheticSettings, dataset: PreparedDataset, options: argparse.Namespace) -> float:
    """Return the test NDCG@10 of a ranker that knows the rules of the log."""
    ranks = np.empty(log.items, dtype=np.int64)
    ranks[synthetic.item_ids(log, np.arange(log.items))] = np.arange(log.items)
    gains = []
    for user in range(len(dataset.test)):
        events = ranks[dataset.test[user] // (options.items // options.live)]
        best = ranked(log, events[:-1])
        place = next((n for n, item in enumerate(best) if item == events[-1]), None)
        gains.append(0.0 if place is None else 1 / np.log2(place + 2))
    return round(float(np.mean(gains)), 5)


def ranked(log: SyntheticSettings, history: Integers) -> list[int]:
    """Rank ten unseen items: the successor first, then the popular ones of the cluster."""
    walk = _last_of_walk(log, history)
    seen = history[:, None]
    follow = synthetic._successors(log, np.array([walk]))
    found = [int(synthetic._avoid_repeats(log, follow, seen)[0])]
    for item in range(walk % log.clusters, log.items, log.clusters):  # by popularity
        if len(found) < 10 and item not in history and item not in found:
            found.append(item)
    return found


def _last_of_walk(log: SyntheticSettings, history: Integers) -> int:
    """Return the last event near one of the three before it: others are no part of the walk."""
    for at in range(len(history) - 1, 3, -1):
        if history[at] % log.clusters in {
            c for item in history[at - 3 : at] for c in near(log, item)
        }:
            return int(history[at])
    return int(history[-1])


def near(log: SyntheticSettings, item: int) -> Iterator[int]:
    """Yield the clusters that a walk may go to."""
    yield item % log.clusters
    which = (np.arange(synthetic._NEIGHBOURS) / synthetic._NEIGHBOURS) ** 0.5 + 1e-9
    clusters = np.full(len(which), item % log.clusters)
    yield from synthetic._neighbours(log, clusters, which)


if __name__ == "__main__":
    main()
