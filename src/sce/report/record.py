"""The notes of a run and a few of its recommendations: the sources of its page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sce.data.prepared import PreparedDataset
from sce.evaluation.ranking import uses_times
from sce.recommend import Id, Recommender, Request
from sce.report.frame import number
from sce.training.run import Run
from sce.units import plural

METRIC = "ndcg@10"  # training stops by it
PHASES = ("training", "evaluation")
RANKERS = ("model", "popularity")
SHOWN = 10  # recommendations of each user; a hit is among them
LOOKED_AT, EACH = 200, 3  # test users, and how many of hits and of others are shown
DEPTH = 50  # how far down the held-out item is looked for


@dataclass(frozen=True)
class Record:
    """The notes of a run, as far as it got."""

    run: Run
    epochs: Sequence[Mapping[str, Any]]  # one entry per epoch, as in metrics.jsonl
    result: Mapping[str, Any]
    """The content of result.json; before training has ended, what the epochs say of it."""
    ended: bool

    @classmethod
    def read(cls, run: Run) -> "Record":
        """Read the notes that a run has written so far."""
        epochs, result = run.metrics(), run.result()
        best: Mapping[str, Any] = next((one for one in reversed(epochs) if one.get("best")), {})
        last: Mapping[str, Any] = epochs[-1] if epochs else {}
        so_far = {"best_epoch": best.get("epoch")}
        so_far |= {name: best.get(name) for name in ("validation", "by_popularity")}
        so_far |= {name: last.get(name) for name in ("memory_mib", "tokens_per_second")}
        written = {name: value for name, value in (result or {}).items() if value is not None}
        return cls(run, epochs, so_far | written, ended=result is not None)

    @property
    def split(self) -> str:
        """The events to report on: test, or validation while there is no test metric."""
        return "test" if self.metric("test", METRIC) is not None else "validation"

    def course(self, *keys: str) -> list[tuple[int, float]]:
        """A number over the epochs that have it: pairs of epoch and value."""
        found = [(one["epoch"], number(one, *keys)) for one in self.epochs]
        # Where nothing was evaluated, 0 seconds are recorded.
        none = 0 if keys[0] == "seconds" else None
        return [(epoch, value) for epoch, value in found if value not in (None, none)]

    def metric(self, split: str, name: str, of: str = "model") -> float | None:
        """A metric of the best weights, or of popularity, on validation or test events."""
        return number(self.result, *(() if of == "model" else (of,)), split, name)


class Sample(NamedTuple):
    """A test user's recommendations beside the held-out event."""

    user: Id
    history: Sequence[Id]  # oldest event first
    target: Id  # the held-out event
    items: Sequence[Id]
    scores: Sequence[float]
    titles: Mapping[Id, str] = {}  # of items, where they are known

    def title(self, item: Id) -> str:
        """The title of an item, or its id."""
        return self.titles.get(item) or str(item)

    @property
    def rank(self) -> int | None:
        """Rank of the held-out item among the recommendations, from 1."""
        return self.items.index(self.target) + 1 if self.target in self.items else None

    @property
    def is_hit(self) -> bool:
        """True if the held-out item is among those shown."""
        return self.rank is not None and self.rank <= SHOWN

    @property
    def verdict(self) -> str:
        """The rank in words."""
        if self.rank is not None:
            return f"{'hit' if self.is_hit else 'found'} at rank {self.rank}"
        if self.target in self.history:
            return "had before, so left out"
        return f"not in the first {len(self.items)}"


def draw_samples(recommender: Recommender, dataset: PreparedDataset) -> tuple[list[Sample], str]:
    """Recommend to test users at equal distances; some with a hit, some without, and a sentence."""
    rows = np.unique(np.linspace(0, len(dataset.test) - 1, LOOKED_AT).round().astype(int))
    users = dataset.user_ids.decode(dataset.test.users[rows])
    sequences = [dataset.item_ids.decode(dataset.test[int(row)]) for row in rows]
    depth = min(DEPTH, recommender.n_items)
    asked = [Request(events[:-1]) for events in sequences]
    if uses_times(recommender.model) and (all_times := dataset.test.times) is not None:
        ends = zip(dataset.test.offsets[rows], dataset.test.offsets[rows + 1], strict=True)
        times = [all_times[first : last - 1].tolist() for first, last in ends]
        asked = [replace(one, times=some) for one, some in zip(asked, times, strict=True)]
    found = recommender.recommend(asked, k=depth)
    samples = [
        Sample(user, history, target, best.items, best.scores.tolist())
        for user, (*history, target), best in zip(users, sequences, found, strict=True)
    ]
    hits = [one for one in samples if one.is_hit]
    others = [one for one in samples if not one.is_hit]
    told = (
        f"Of {plural(len(samples), 'test user')} at equal distances, {len(hits)} had what came "
        f"next among the first {SHOWN} recommendations. Here are the first of these, and the first "
        "of the others: the end of the history, the recommendations with their scores, and what "
        "came next."
    )
    shown = hits[: EACH + max(0, EACH - len(others))] + others[: 2 * EACH - len(hits[:EACH])]
    ids = [*{item for one in shown for item in (*one.history, one.target, *one.items)}]
    codes = dataset.item_ids.lookup(ids)
    known = [] if recommender.titles is None else recommender.titles.decode(codes)
    titles = dict(zip(ids, map(str, known), strict=False))
    return [one._replace(titles=titles) for one in shown], told
