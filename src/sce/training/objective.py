"""Stopgap."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sce.data.batches import Ragged
from sce.errors import InputError


@dataclass(frozen=True)
class Workload:
    """What a loss is given at each step, on average."""

    n_items: int
    sequences: float  # in a batch
    mean_length: float  # targets of a sequence, once it is cut to the model's length
    counts: NDArray[np.int64]  # how often each item occurs

    @property
    def targets(self) -> float:
        """Targets in a batch."""
        return self.sequences * self.mean_length

    @classmethod
    def measure(
        cls, train: Ragged, n_items: int, *, batch_size: int, max_length: int
    ) -> "Workload":
        """Look at the training sequences; those of one event are not trained on."""
        targets = np.diff(train.offsets) - 1
        targets = targets[targets >= 1].clip(max=max_length)
        if not len(targets):
            raise InputError("there is nothing to train on: no sequence has two events")
        counts = np.bincount(train.items, minlength=n_items)
        return cls(n_items, min(batch_size, len(targets)), float(targets.mean()), counts)


