"""A dataset that can be learned in seconds: items stand in a ring, and everybody goes round it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sce.data.prepared import PreparedDataset, Sequences, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.losses import CrossEntropy
from sce.models.sasrec import SASRec, SASRecSettings
from sce.training.fit import TrainingSettings, fit

ITEMS = 12
MODEL = SASRecSettings(dim=16, blocks=1, dropout=0.0, max_length=6)
QUICK = TrainingSettings(epochs=2, batch_size=16, learning_rate=1e-2, device="cpu")


def walk(start: int, length: int, items: int = ITEMS) -> list[int]:
    return [(start + step) % items for step in range(length)]


def lay_out(sequences: Sequence[Sequence[int]], users: Sequence[int]) -> Sequences:
    return Sequences(
        items=np.array([item for one in sequences for item in one], np.int32),
        offsets=np.cumsum([0, *map(len, sequences)], dtype=np.int64),
        users=np.array(users, np.int32),
        times=np.array([60 * place for one in sequences for place in range(len(one))], np.int32),
    )


def make_cycle(
    path: Path, *, train: int = 48, test: int = 24, items: int = ITEMS, single: int = 0
) -> PreparedDataset:
    """Write it: `train` users of 3 to 8 events, `single` of one event, and `test` users."""
    random = np.random.default_rng(0)

    def walks(count: int) -> list[list[int]]:
        starts, lengths = random.integers(items, size=count), random.integers(3, 9, size=count)
        return [walk(int(s), int(n), items) for s, n in zip(starts, lengths, strict=True)]

    users = train + single + test
    return write_prepared(
        path,
        train=lay_out([*walks(train), *([0] for _ in range(single))], range(train + single)),
        test=lay_out(walks(test), range(train + single, users)),
        user_ids=Vocabulary.from_strings(f"user{number:03}" for number in range(users)),
        item_ids=Vocabulary.from_integers(range(100, 100 + items)),
        settings={},
        counts={},
    )


def small_model(dataset: PreparedDataset, **changes: Any) -> SASRec:
    return SASRec(dataset.n_items, MODEL, **changes)


def settings(**changes: Any) -> TrainingSettings:
    """Those of QUICK, but for the changes."""
    return TrainingSettings(**(vars(QUICK) | changes))


def train(
    dataset: PreparedDataset,
    loss: Callable[..., Any] | None = None,
    *,
    model: Any = None,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    loss_name: str | None = None,
    config: dict[str, Any] | None = None,
    on_epoch: Callable[[dict[str, Any]], object] | None = None,
    **changes: Any,
) -> Any:
    """Call `fit` with the settings of QUICK, but for the changes, and without its progress."""
    return fit(
        model or small_model(dataset),
        loss or CrossEntropy(),
        dataset,
        settings=settings(**changes),
        out=out,
        resume=resume,
        force=force,
        loss_name=loss_name,
        config=config,
        on_epoch=on_epoch,
        progress=False,
    )


# The settings file of a sweep of one run.
TINY_SWEEP = """
[base]
model.dim = 8
model.blocks = 1
model.max_length = 6
training.epochs = 1
training.batch_size = 16
training.device = "cpu"
[[grid]]
loss.name = ["ce"]
"""
