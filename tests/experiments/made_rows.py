"""Rows as sweeps leave them, without running anything: for tests of what comes after."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sce.data.storage import append_json_line
from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Row, Sweep, SweepDirectory

QUALITY = {"bce": 0.6, "bce+": 0.8, "gbce": 0.82, "ce-": 0.9, "ce": 0.95, "sce": 1.0}
MEMORY = {"bce": 220.0, "bce+": 900.0, "gbce": 900.0, "ce-": 850.0, "ce": 3400.0, "sce": 300.0}
DATASETS = {"ml1m": (3_416, 0.066), "beauty": (12_101, 0.057), "globo": (20_030, 0.135)}
GPU: dict[str, Any] = {"device": "NVIDIA H200", "memory_measured": "GPU memory allocated"}
CPU: dict[str, Any] = {
    "device": "cpu, 2 threads",
    "memory_measured": "resident memory of the process",
}
NEVER = {"failure": {"kind": "out of memory", "message": "memory ran out (3 <GiB>)"}}


def metrics(ndcg: float) -> dict[str, float]:
    depths = {1: 0.4, 5: 0.8, 10: 1.0}
    kinds = {"ndcg": 1.0, "hr": 1.7, "cov": 6.0}
    return {f"{kind}@{k}": ndcg * s * d for k, d in depths.items() for kind, s in kinds.items()}


def make_row(
    key: str,
    settings: Mapping[str, Any],
    *,
    data: str = "ml1m",
    items: int = 3_416,
    seed: int = 0,
    validation: float | None = 0.05,
    test: float | None = 0.06,
    memory: float = 500.0,
    seconds: float = 30.0,
    **changes: Any,
) -> Row:
    course = [1 - math.exp(-epoch / 6) for epoch in range(1, 25)]
    mixed = settings.get("loss.centres") != "random"
    return {
        "key": key,
        "run": f"runs/{key}",
        "status": "finished",
        "measure": "training",
        "dataset": {"name": data, "content_hash": f"hash of {data}", "n_items": items},
        "seed": seed,
        "settings": {"training.batch_size": 128, **settings, "training.seed": seed},
        "at_once": 1,
        "wall_seconds": seconds + 8,
        "versions": {"python": "3.12", "torch": "2.11"},
        "validation": None if validation is None else metrics(validation),
        "test": None if test is None else metrics(test),
        "popularity": {"test": metrics(0.0051), "validation": metrics(0.005)},
        "seconds": {"training": seconds, "evaluation": 2.0},
        "memory_mib": {"training": memory, "evaluation": 100.0},
        "memory_measured": "GPU memory allocated",
        "device": "a GPU",
        "history": {
            "loss": [8 - 3 * part for part in course],
            "validation.ndcg@10": [(validation or 0.0) * part for part in course],
            "picked_once": [(0.4 if mixed else 0.2) * part + 0.01 * seed for part in course],
            "correct_in_bucket": [(0.8 if mixed else 0.5) * part for part in course],
        },
    } | changes


def main_rows(seeds: int = 3) -> Iterator[Row]:
    """A small grid for each loss on three datasets, and one run that found no memory."""
    number = 0
    for data, (items, top) in DATASETS.items():
        for loss, share in QUALITY.items():
            for size in (64, 256, 1024) if loss not in ("ce", "bce") else (0,):
                for batch in (64, 256):
                    for seed in range(seeds):
                        number += 1
                        own = {"sce": {"loss.bucket_size_y": size, "loss.centres": "states"}}.get(
                            loss, {"loss.n_negatives": size} if size else {}
                        )
                        settings = {"loss.name": loss, **own, "training.batch_size": batch}
                        gain = 1 + 0.04 * math.log2((size or 64) / 64) * (batch / 256)
                        value = top * share * gain * (1 + 0.015 * math.sin(7 * number))
                        more = (1 + size / 500) * batch / 128 * (items / 12_000) ** 0.5
                        yield make_row(
                            f"{number:012x}",
                            settings,
                            data=data,
                            items=items,
                            seed=seed,
                            validation=value * 0.95,
                            test=value,
                            memory=MEMORY[loss] * more,
                            seconds=20 + 3000 / batch + 10 * math.sin(number) + size / 40,
                        )
    failed = make_row("f" * 12, {"loss.name": "ce", "training.batch_size": 4096})
    yield {name: failed[name] for name in list(failed)[:10]} | {"status": "failed"} | NEVER


def write_place(
    path: Path, rows: list[Row], *figures: FigureSpec, name: str = "main", variant: str = ""
) -> SweepDirectory:
    """A directory as a sweep leaves it."""
    place = SweepDirectory(path)
    place.make()
    for row in rows:
        append_json_line(place.rows, row)
    measure = rows[0]["measure"] if rows else "training"
    keys = tuple(row["key"] for row in rows)
    title = f"The <{name}> sweep"
    place.write_sweep(Sweep(name, title, keys, figures, measure, variant=variant))
    return place
