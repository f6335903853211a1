"""The cells that `plan_grid.py` measures: two grids of sizes, "fit" and "held out"."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cells import Row
from sce.data.length_groups import shares_longer
from sce.errors import InputError
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning import PLANNED, ROW_WISE, Job

FIT = {
    "items": (3_000, 20_000, 100_000, 1_000_000, 4_000_000),
    "batch": (16, 64, 128, 256),
    "length": (50, 200),
    "dim": (32, 64, 128),
    "blocks": (1, 2, 3),
    "mean_share": (1.0, 0.5, 0.1),
    "n_negatives": (64, 256, 1024),
    "bucket_size_y": (64, 256, 1024),
    "chunk_size": (512, 1024, 4096),
}
HELD_OUT = {
    "items": (8_000, 50_000, 400_000, 2_000_000),
    "batch": (32, 96, 200, 400),
    "length": (30, 100, 150),
    "dim": (48, 96, 192),
    "blocks": (2, 4),
    "mean_share": (1.0, 0.7, 0.15),
    "n_negatives": (100, 500),
    "bucket_size_y": (128, 512),
    "chunk_size": (700, 2048),
}
# Items in a bucket that are beyond those: their gradient is added up in groups.
LARGE = {"fit": (2_048, 5_000, 20_000), "held out": (1_500, 4_096, 10_000)}
# Another number draws other cells. Those that were held out from a fit are not held out from the
# next one, if somebody has looked at them.
SEEDS = {"fit": 0, "held out": 2}
_BUCKETED = ("sce", ROW_WISE)
_ORDER = list(PLANNED)


def grid(losses: Sequence[str], counts: tuple[int, int], at_most: int) -> list[Row]:
    """Draw so many cells of each loss, alternately in both precisions; the same every time."""
    cells = []
    bucketed = [loss for loss in losses if loss in _BUCKETED]
    parts = list(zip(("fit", "held out"), (FIT, HELD_OUT), counts, strict=True))
    # Large buckets are drawn apart, so that the others stay as they are.
    for large, (part, values, count) in itertools.product((0, 1), parts):
        for loss in bucketed if large else losses:
            generator = np.random.default_rng([SEEDS[part], _ORDER.index(loss), large])
            for number in range(count):
                precision = ("float32", "bf16")[number % 2]
                cell = _draw(generator, values, loss, precision, at_most) | {"part": part}
                if large:
                    size = generator.choice(LARGE[part]).item()
                    cell["bucket_size_y"] = min(size, cell["items"] // 2)
                cells.append(cell)
    return cells


def _draw(
    generator: np.random.Generator,
    values: dict[str, tuple[Any, ...]],
    loss: str,
    precision: str,
    at_most: int,
) -> Row:
    for _ in range(2000):
        cell: Row = {name: generator.choice(choices).item() for name, choices in values.items()}
        # Passes over the whole catalogue take their time, and their memory is that of a chunk.
        if loss == "ce chunked" and cell["items"] > 400_000:
            continue
        cell = {"loss": loss, "precision": precision} | cell
        if _roughly(cell) < at_most:
            return cell
    raise InputError(f"hardly any cell of {loss} takes less than {at_most:,} bytes; allow more")


def _roughly(cell: Row) -> float:
    """Bytes that a cell may take, generously, and without the formula that is to be judged."""
    positions = cell["batch"] * cell["length"]
    wide = cell["items"] if cell["loss"] == "ce" else 4096
    return float(
        20.0 * cell["items"] * cell["dim"]
        + 14.0 * positions * wide
        + 60.0 * positions * cell["dim"] * cell["blocks"]
    )


def job_of(cell: Row) -> Job:
    """The job that a cell measures."""
    lengths = lengths_of(cell)
    settings: Any = BACKBONES[cell.get("backbone", DEFAULT_BACKBONE)].settings
    return Job(
        cell["items"],
        cell["batch"],
        settings(dim=cell["dim"], max_length=cell["length"], blocks=cell["blocks"]),
        cell["precision"],
        {name: cell[name] for name in ("n_negatives", "bucket_size_y", "chunk_size")},
        mean_length=float(lengths.mean()),
        longer=tuple(shares_longer(lengths, cell["length"])),
        events=int((lengths + 1).sum()),
        users=cell["batch"],
    )


def lengths_of(cell: Row) -> NDArray[np.int64]:
    """Of the histories: one as long as the batch is wide, the others so that the mean is right."""
    lengths = np.full(cell["batch"], max(1, round(cell["length"] * cell["mean_share"])))
    lengths[0] = cell["length"]
    return lengths.astype(np.int64)
