"""The notes of a run and a few of its recommendations: the sources of its page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sce.data.prepared import PreparedDataset
from sce.recommend import Id, Recommended, Recommender
from sce.report.frame import name_loss, number
from sce.training.run import Run, describe_divergence

METRIC = "ndcg@10"  # training stops by it
SHOWN = 5  # recommendations of each user
DEPTH = 50  # how far down the held-out item is looked for
TAIL = 5  # last events of a history


@dataclass(frozen=True)
class Record:
    """The notes of a run, as far as it got."""

    name: str
    model: str
    version: str
    config: Mapping[str, Any]
    """Every setting, and under "derived" the values that followed from them."""
    dataset: Mapping[str, Any]
    epochs: Sequence[Mapping[str, Any]] = ()
    """One entry per epoch, as in metrics.jsonl."""
    result: Mapping[str, Any] | None = None
    """The content of result.json; None while training has not ended."""
    diverged: str | None = None

    @classmethod
    def read(cls, run: Run) -> "Record":
        """Read the notes that a run has written so far."""
        return cls(
            name=run.path.resolve().name,
            model=run.model,
            version=run.sce_version,
            config={**run.config, "derived": run.derived} if run.derived else run.config,
            dataset=asdict(run.dataset),
            epochs=run.metrics(),
            result=run.result(),
            diverged=describe_divergence(run),
        )

    @property
    def loss_name(self) -> str:
        """The label of the loss."""
        loss = self.config.get("loss")
        return name_loss(loss.get("name", "another loss") if isinstance(loss, Mapping) else loss)

    @property
    def numbers_of_epochs(self) -> list[int]:
        """The epochs' own numbers, from 1."""
        return [int(number(one, "epoch") or place) for place, one in enumerate(self.epochs, 1)]

    def column(self, *keys: str) -> list[float | None]:
        """One number of every epoch, None where an epoch has none."""
        return [number(epoch, *keys) for epoch in self.epochs]

    def seconds(self, phase: str) -> list[float | None]:
        """Duration of each epoch; None where nothing was done, which is recorded as 0."""
        return [value or None for value in self.column("seconds", phase)]

    def peak(self, phase: str) -> float | None:
        """Peak memory in MiB."""
        found = number(self.result, "memory_mib", phase)
        peaks = [peak for peak in self.column("memory_mib", phase) if peak is not None]
        return found if found is not None else max(peaks, default=None)

    @property
    def speed(self) -> float | None:
        """Mean tokens per second."""
        found = number(self.result, "tokens_per_second")
        speeds = [speed for speed in self.column("tokens_per_second") if speed is not None]
        return found if found is not None or not speeds else sum(speeds) / len(speeds)

    @property
    def best_epoch(self) -> int | None:
        """The epoch whose weights are kept."""
        written = number(self.result, "best_epoch")
        if written:
            return int(written)
        pairs = zip(self.numbers_of_epochs, self.epochs, strict=True)
        return max((n for n, epoch in pairs if epoch.get("best")), default=None)

    def metric(self, split: str, name: str, *, of: str = "model") -> float | None:
        """A metric of the best weights, or of popularity, on validation or test events."""
        keys = (split, name) if of == "model" else (of, split, name)
        written = number(self.result, *keys)
        if written is not None or of != "model" or split != "validation":
            return written
        pairs = zip(self.numbers_of_epochs, self.column("validation", name), strict=True)
        return dict(pairs).get(self.best_epoch or 0)


@dataclass(frozen=True)
class Sample:
    """A test user's recommendations beside the held-out event."""

    user: Id
    tail: Sequence[Id]
    """The last events of the history, oldest first."""
    events: int
    """Length of the history."""
    target: Id
    """The held-out event."""
    seen_before: bool
    """The target is in the history, and so is not recommended."""
    best: Recommended

    @property
    def rank(self) -> int | None:
        """Rank of the held-out item among the recommendations, from 1."""
        items = self.best.items
        return items.index(self.target) + 1 if self.target in items else None

    @property
    def is_hit(self) -> bool:
        """True if the held-out item is among those shown."""
        return self.rank is not None and self.rank <= SHOWN

    @property
    def verdict(self) -> str:
        """The rank in words."""
        if self.rank is not None:
            return f"{'hit' if self.is_hit else 'found'} at rank {self.rank}"
        first = f"not in the first {len(self.best)}"
        return "had before, so left out" if self.seen_before else first

    @property
    def extent(self) -> str:
        """Which part of the history is shown."""
        last = f"Last {len(self.tail)} of {self.events:,}" if self.events > TAIL else "All"
        return f"{last} {'event' if self.events == 1 else 'events'}"

    @property
    def first(self) -> list[tuple[Id, float]]:
        """The first recommendations with their scores."""
        return list(zip(self.best.items[:SHOWN], self.best.scores, strict=False))


def draw_samples(
    recommender: Recommender, dataset: PreparedDataset, count: int = 6
) -> list[Sample]:
    """Take test users at equal distances, so that nobody chooses the pretty ones."""
    rows = np.unique(np.linspace(0, len(dataset.test) - 1, count).round().astype(int))
    users = dataset.user_ids.decode(dataset.test.users[rows])
    sequences = [dataset.item_ids.decode(dataset.test[int(row)]) for row in rows]
    depth = min(DEPTH, recommender.n_items)
    found = recommender.recommend([events[:-1] for events in sequences], k=depth)
    return [
        Sample(user, history[-TAIL:], len(history), target, target in history, best)
        for user, (*history, target), best in zip(users, sequences, found, strict=True)
    ]
