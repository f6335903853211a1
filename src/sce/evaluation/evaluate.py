"""Unsampled metrics of a model on held-out events, batch after batch of users.

What is kept is the rank of each target, four bytes a user, and one bit per item and k: the same for
any order of the users, and so the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sce.data.batches import (
    DeviceSequences,
    Ragged,
    SeenItems,
    event_times,
    history_batch,
    seen_items,
)
from sce.errors import InputError, checked, named
from sce.evaluation import ranking
from sce.evaluation.metrics import by_popularity, compute
from sce.units import plural

Split = Literal["validation", "test"]
States = Callable[[Tensor, Tensor | None], Tensor]  # of histories [b, l] and times: states [b, d]
Rank = Callable[[Tensor, SeenItems], Tensor]  # of states, and what was seen: items [b, k]
Progress = Callable[[int], None] | None
KS = (1, 5, 10, 20, 50)
_TOGETHER = 8  # batches whose states are computed at once: `last_states` computes as many anyway
HELD_OUT = {"validation": 2, "test": 1}  # events at the end that the history must not contain


class Evaluated(Protocol):
    """A prepared dataset, opened, or the part of it that evaluation needs."""

    @property
    def test(self) -> Ragged:
        """Each user's events: history …, validation target, test target."""

    @property
    def n_items(self) -> int:
        """Items in the catalogue."""


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model, averaged over users."""

    values: dict[str, float]
    """By name: ndcg@10, hr@10, mrr@10, cov@10, and so on for each k."""
    users: int
    """Users evaluated."""
    seen_targets: int
    """Users whose target had occurred in their history: misses, unless seen items are kept."""
    ranks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), compare=False)
    """Rank of each user's target, from 1; 0 where it was not among the first max(ks)."""
    by_popularity: dict[str, dict[str, float]] = field(default_factory=dict)
    """The values, but for coverage, and the users, apart for "popular" targets, which are those
    items that have half of the training events, and "rare" ones; empty without a training log."""

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.values.items())
        seen = f"; {self.seen_targets:,} targets seen before" * bool(self.seen_targets)
        return f"Metrics({values} of {plural(self.users, 'user')}{seen})"

    def __getitem__(self, name: str) -> float:
        """Return one value, such as `metrics["ndcg@10"]`."""
        return self.values[name]


@checked
def evaluate(
    model: ranking.Ranker,
    dataset: Evaluated,
    *,
    split: Split = "validation",
    ks: Sequence[int] | None = None,
    keep_seen: bool = False,
    batch_size: int = 512,
    max_length: int | None = None,
    progress: Progress = None,
) -> Metrics:
    """Rank the whole catalogue for every test user and see where the held-out item stands.

    Args:
        model: Any object that maps histories [b, l], padded on the right, to states [b, l, d], and
            has a `catalogue` [C, d]. A module is put into evaluation mode and back again.
        dataset: The prepared dataset.
        split: Which event is the target: the last but one (validation) or the last (test).
        ks: The depths of the metrics; by default 1, 5, 10, 20 and 50, for any catalogue.
        keep_seen: Rank the items that the user has had before too. Without it they are left out,
            and a target among them is a miss.
        batch_size: Users at once.
        max_length: The longest history given to the model; by default its own `max_length`, or
            whole histories when it has none.
        progress: Called with the number of users done, after each batch.
    """
    if ks is not None and not ks:
        raise InputError(f"{named('k', python='ks')} names no depth; leave it out for {KS}")
    for k in ks or ():
        ranking.check_depth(k, dataset.n_items)
    if batch_size < 1:
        raise InputError(f"{named('batch_size')} must be at least 1; got {batch_size}")
    if len(model.catalogue) != dataset.n_items:
        what = f"the model ranks {len(model.catalogue)} items, the dataset has {dataset.n_items}"
        raise InputError(f"{what}: they do not belong together")
    ks = KS if ks is None else ks
    max_length = ranking.longest_history(model) if max_length is None else max_length
    # Without a longest history all would be as wide as the longest of them.
    together = 1 if max_length is None else _TOGETHER

    def states(histories: Tensor, times: Tensor | None) -> Tensor:
        return ranking.last_states(model, histories, max_length, times)

    def rank(states: Tensor, seen: SeenItems) -> Tensor:
        left_out = None if keep_seen else seen
        return ranking.top_k(states, catalogue, max(ks), seen=left_out, norm=norm).items

    with evaluating(model), torch.no_grad():
        catalogue = model.catalogue.detach()  # which may be computed, with dropout in training
        norm = ranking.largest_norm(catalogue)
        given = ks, max_length, catalogue.device
        tally = Tally(dataset, split, *given, times=ranking.uses_times(model))
        tally.count(states, rank, batch_size, progress, together=together)
    return tally.metrics()


class Tally:
    """Counts over rankings of test users, on a device."""

    def __init__(
        self,
        dataset: Evaluated,
        split: Split,
        ks: Sequence[int],
        max_length: int | None,
        device: torch.device,
        *,
        times: bool,
    ) -> None:
        self.sequences = DeviceSequences.place(dataset.test, device, times=times)
        self.held_out, self.n_items = HELD_OUT[split], dataset.n_items
        self.longest = int(self.sequences.lengths.max()) if max_length is None else max_length
        self.ks = tuple(ks)
        # One place more: for ranks without an item.
        self.recommended = torch.zeros(len(ks), self.n_items + 1, dtype=torch.bool, device=device)
        self.seen_targets = torch.zeros((), dtype=torch.int64, device=device)
        self.ranks = torch.zeros(len(self.sequences), dtype=torch.int32, device=device)
        targets = dataset.test.items[dataset.test.offsets[1:] - self.held_out]
        popular = getattr(dataset, "popular_items", None)
        self.popular = None if popular is None else popular[targets]

    def count(
        self,
        states: States,
        rank: Rank,
        batch_size: int,
        progress: Progress,
        number: int = 0,
        of: int = 1,
        together: int = 1,
    ) -> None:
        """Count the items that `rank` finds; of every `of` batches, the one with this `number`.

        The states of so many batches are computed `together`.
        """
        given, options = self.sequences, {"max_length": self.longest, "held_out": self.held_out}
        # Users with histories of like length together: less padding.
        by_length = given.lengths.argsort(stable=True)
        batches = [*by_length.split(batch_size)]
        batches += [by_length[:0]] * (-len(batches) % of)
        own = batches[number::of]
        for first in range(0, len(own), together):
            window = own[first : first + together]
            users, sizes = torch.cat(window), [len(some) for some in window]
            batch = history_batch(given, users, **options)
            times = event_times(given, users, **options, width=batch.histories.shape[1])
            found = states(batch.histories, times).split(sizes)
            parts = zip(window, found, batch.targets.split(sizes), strict=True)
            for done, (some, after, targets) in enumerate(parts, first + 1):
                seen = seen_items(given, some, held_out=self.held_out)
                self._add(some, targets, seen, rank(after, seen))
                if progress is not None:
                    progress(min(done * of * batch_size, len(by_length)))

    def _add(self, users: Tensor, targets: Tensor, seen: SeenItems, items: Tensor) -> None:
        """Count the items of a batch, best first."""
        hits = items == targets[:, None]
        self.ranks[users] = torch.where(hits.any(1), hits.int().argmax(1) + 1, 0).int()
        items = torch.where(items == ranking.NOTHING, self.n_items, items)
        for place, k in enumerate(self.ks):
            self.recommended[place, items[:, :k]] = True
        repeats = (seen.items == targets[seen.rows]).long()
        times_seen = torch.zeros_like(targets).index_add_(0, seen.rows, repeats)
        self.seen_targets += (times_seen > 0).sum()

    def metrics(self, recommended: Sequence[int] | None = None) -> Metrics:
        """Work out the metrics of all rankings counted; `recommended` items by all who counted."""
        found = self.recommended[:, :-1].sum(dim=1).tolist() if recommended is None else recommended
        covered = {k: count / self.n_items for k, count in zip(self.ks, found, strict=True)}
        ranks = self.ranks.cpu().numpy()
        apart = {} if self.popular is None else by_popularity(ranks, self.popular, self.ks)
        values = compute(ranks, self.ks, covered)
        return Metrics(values, len(ranks), int(self.seen_targets), ranks, apart)


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Put a module and all its parts into evaluation mode, and each back into its own mode."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
