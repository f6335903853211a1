"""Does a catalogue of a hundred million items train, evaluate and recommend on one GPU?

    python benchmarks/hundred_million.py                                    # an H200: 3 minutes
    python benchmarks/hundred_million.py --items 100_000 --live 4000 --users 4000    # a CPU

The log of `sce synthesize` (of ten events seven are the successor of an item before; popularity
knows nothing of that), made here by all cores with numpy alone and written as a prepared dataset.
Its events are of a million items, spread over the catalogue, which holds all others too. `fit`
trains SASRec row-wise, in bfloat16 on a GPU, and measures it on a sample of users, beside
popularity; `Recommender` recommends for them. The run is not saved: weights and state would be
52 GB. Prints where the time went, and keeps a row with the memory that `sce plan` predicts beside
the measured peak.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rows import keep, parser_of, provenance
from sce import Recommender, SASRec, ScalableCrossEntropy, TrainingSettings, fit
from sce.data.prepared import PreparedDataset, Sequences, write_prepared
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.vocabulary import Vocabulary
from sce.planning import ROW_WISE, Job, predict, summarize_lengths
from sce.training.device import resolve_device

METRICS = ("ndcg@10", "hr@10")
Part = tuple[NDArray[np.int32], NDArray[np.int64]]


def main() -> None:
    sizes = {"items": 100_000_000, "users": 1_000_000, "test_users": 1_000}
    parser = parser_of(__doc__, "hundred_million", **sizes, batch=512, length=100, device="auto")
    parser.add_argument("--live", type=int, default=1_000_000, help="items that may occur")
    parser.add_argument("--epochs", type=int, default=2, help="the last one is timed")
    parser.add_argument("--max-steps", type=int, help="default: all of the epochs")
    parser.add_argument("--recommend", type=int, default=500, help="users")
    options = parser.parse_args()
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds[what] = round(time.perf_counter() - begun, 2)
        print(f"{what}: {seconds[what]:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        with timed("log"):
            log = SyntheticSettings(items=options.live, users=options.users)
            made = make_events(log, options.items // options.live)
        with timed("dataset"):
            dataset = write(Path(directory, "data"), made, options)
            del made
        device = resolve_device(options.device)  # after the forks
        with timed("model"), device:  # gigabytes are drawn where they are used
            model = SASRec(options.items, max_length=options.length)
        settings = TrainingSettings(
            epochs=options.epochs,
            evaluate_every=options.epochs,
            max_steps=options.max_steps,
            batch_size=options.batch,
            precision="bf16" if device.type == "cuda" else "float32",
            row_wise=True,
            validation_users=min(500, options.test_users),
            device=str(device),
        )
        with timed("fit"):
            result = fit(model, ScalableCrossEntropy(), dataset, settings=settings)
        print(result)
        recommender = Recommender(model, dataset.item_ids, dataset.content_hash)
        asked = range(min(options.recommend, len(dataset.test)))
        ids = [dataset.item_ids.decode(dataset.test[user]) for user in asked]
        with timed("recommend"):
            found = recommender.recommend([events[:-1] for events in ids], k=10)
    assert result.test is not None
    assert result.popularity is not None
    last, peak = result.history[-1], result.memory_mib["training"]
    assert peak is not None
    hits = np.mean([events[-1] in each.items for events, each in zip(ids, found, strict=True)])
    row = {
        **{name: getattr(options, name) for name in ("items", "live", "users", "batch", "length")},
        "events": len(dataset.train.items),
        "items that occur": len(np.unique(dataset.train.items)),
        "steps": sum(record["steps"] for record in result.history),
        "precision": settings.precision,
        "ms": round(1000 * last["seconds"]["training"] / last["steps"], 3),
        "tokens/s": round(last["tokens_per_second"]),
        "peak MiB": round(peak),
        "planned MiB": round(planned_mib(dataset, model, settings)),
        "memory": result.memory_measured,
        "evaluation MiB": round(result.memory_mib["evaluation"] or 0),
        "test users": result.users["test"],
        **{name: result.test[name] for name in METRICS},
        **{f"popularity {name}": result.popularity["test"][name] for name in METRICS},
        "recommended": len(found),
        "their hr@10": round(float(hits), 4),
        "seconds": seconds | {f"fit: {phase}": round(s, 2) for phase, s in result.seconds.items()},
        **provenance("torch", "triton"),
    }
    keep("hundred_million", [row], to=options.out, beside=("items", "live", "users", "machine"))
    print("\n".join(f"{name}: {value}" for name, value in row.items()))


def make_events(log: SyntheticSettings, apart: int) -> list[list[Part]]:
    """Make the log by all cores; its items lie so far apart in the catalogue."""
    parts = os.cpu_count() or 1
    with get_context("fork").Pool(parts) as pool:
        return pool.map(partial(events_of, log, apart, parts), range(parts), chunksize=1)


def events_of(log: SyntheticSettings, apart: int, parts: int, part: int) -> list[Part]:
    """Make the blocks of one of several processes: items, and how many each user has."""
    found = []
    for block in generate(log, part, parts):
        _, lengths = np.unique(block.users, return_counts=True)
        found.append(((apart * block.items).astype(np.int32), lengths))
    return found


def write(path: Path, made: list[list[Part]], options: argparse.Namespace) -> PreparedDataset:
    """Write the dataset: the last two events of a sample of users are not trained on."""
    most = max(map(len, made))
    blocks = [part[n] for n in range(most) for part in made if n < len(part)]
    items, lengths = (np.concatenate(each) for each in zip(*blocks, strict=True))
    users = np.arange(len(lengths), dtype=np.int32)
    tested = users[:: max(1, len(users) // options.test_users)][: options.test_users]
    ends = np.cumsum(lengths)
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[tested] = True
    trained = np.ones(len(items), dtype=bool)
    trained[ends[tested] - 1] = trained[ends[tested] - 2] = False
    return write_prepared(
        path,
        train=_sequences(items[trained], lengths - 2 * chosen, users),
        test=_sequences(items[np.repeat(chosen, lengths)], lengths[tested], tested),
        user_ids=Vocabulary.from_integers(users),
        item_ids=Vocabulary.from_integers(np.arange(options.items)),
        settings={"split": "leave-one-out"},
        counts={"test": {"users": len(tested)}},
    )


def _sequences(
    items: NDArray[np.int32], lengths: NDArray[np.int64], users: NDArray[np.int32]
) -> Sequences:
    return Sequences(items, np.concatenate([[0], np.cumsum(lengths)]), users)


def planned_mib(dataset: PreparedDataset, model: SASRec, settings: TrainingSettings) -> float:
    """Return what `sce plan --data` says of this training."""
    train = dataset.train
    width, lengths = summarize_lengths(train.lengths, model.max_length)
    job = Job(
        items=dataset.n_items,
        batch=settings.batch_size,
        backbone=replace(model.settings, max_length=width),
        precision=settings.precision,
        users=len(train),
        events=len(train.items),
        **lengths,
    )
    return predict(job, ROW_WISE).total / 2**20


if __name__ == "__main__":
    main()
