"""A run as training leaves it, without training: for tests of what comes after."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sce.data.prepared import PreparedDataset, write_prepared
from sce.data.storage import write_json
from sce.data.vocabulary import Vocabulary
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.checkpoint import write_tensors
from sce.training.run import Run
from sce.training.run_start import start_run
from tests.cycle_data import lay_out as lay_out

MODEL = SASRecSettings(dim=8, blocks=1, max_length=6)
KS = (1, 5, 10, 20, 50)


def make_dataset(
    path: Path, items: Vocabulary | int = 40, users: Vocabulary | int = 9
) -> PreparedDataset:
    """Users in turn: trained on only, tested only, and (leave-one-out) both."""
    item_ids, user_ids = (
        Vocabulary.from_integers(range(ids)) if isinstance(ids, int) else ids
        for ids in (items, users)
    )
    random = np.random.default_rng(0)
    whole = [
        random.integers(0, len(item_ids), size=3 + user % 9).tolist()
        for user in range(len(user_ids))
    ]
    trained = [user for user in range(len(user_ids)) if user % 3 != 1]
    tested = [user for user in range(len(user_ids)) if user % 3 != 0]
    train = [whole[user] if user % 3 == 0 else whole[user][:-2] for user in trained]
    tally = {"users": len(user_ids), "items": len(item_ids), "interactions": sum(map(len, whole))}
    return write_prepared(
        path,
        train=lay_out(train, trained),
        test=lay_out([whole[user] for user in tested], tested),
        user_ids=user_ids,
        item_ids=item_ids,
        settings={"split": "leave-one-out"},
        counts={
            "steps": [{"name": "read", **tally}],
            "train": {"name": "training", **tally},
            "test": {"name": "test", **tally},
        },
    )


def make_run(
    path: Path,
    dataset: PreparedDataset,
    *,
    loss: str = "sce",
    weights: bool = True,
    ended: bool = False,
    **training: Any,
) -> Run:
    config = {
        "model": {"name": "sasrec", **asdict(MODEL)},
        "loss": {"name": loss, **({"bucket_size_y": 256} if loss == "sce" else {})},
        "training": {"epochs": 20, "batch_size": 128, "device": "cpu", **training},
    }
    run = start_run(path, dataset, config=config, derived={}, model="sasrec")
    if weights:
        write_tensors(
            run.best_weights,
            SASRec(dataset.n_items, MODEL, seed=1).state_dict(),
            {"run": run.identity},
        )
    if ended:
        write_result(run)
    return run


def write_epochs(run: Run, count: int = 4, **changes: Any) -> list[dict[str, Any]]:
    """Write an unremarkable course of training, best at the last epoch but one."""
    records = []
    for epoch in range(1, count + 1):
        record = {
            "epoch": epoch,
            "loss": 9.5 / epoch,
            "steps": 12,
            "seconds": {"training": 7.5, "evaluation": 1.25},
            "tokens_per_second": 361_000.0,
            "memory_mib": {"training": 451.0, "evaluation": 302.0},
            "validation": metrics(0.02 * (epoch if epoch < count else 1)),
            "buckets": {"picked_once": 0.38, "placed": 0.81, "correct_in_bucket": 0.1 * epoch},
            "best": epoch < max(count, 2),
        }
        records.append(record | changes)
    run.write_metrics(records)
    return records


def write_result(run: Run, **changes: Any) -> Mapping[str, Any]:
    result = {
        "best_epoch": 3,
        "epochs": 4,
        "stopped": "patience",
        "test": metrics(0.1423),
        "validation": metrics(0.06),
        "popularity": {"test": metrics(0.0459), "validation": metrics(0.02)},
        "seconds": {"training": 30.0, "evaluation": 5.0},
        "memory_mib": {"training": 451.0, "evaluation": 302.0},
        "tokens_per_second": 361_000.0,
        "device": "a processor",
    } | changes
    write_json(run.result_file, result)
    return result


def metrics(ndcg: float) -> dict[str, float]:
    depths = {1: 0.5, 5: 0.9, 10: 1.0, 20: 1.1, 50: 1.2}
    return {
        f"{name}@{k}": ndcg * share * depths[k]
        for k in KS
        for name, share in [("ndcg", 1.0), ("hr", 1.5), ("mrr", 0.8), ("cov", 2.0)]
    }
