"""What losses may know of the training data."""

import numpy as np
import torch

from sce.data.batches import Ragged
from sce.errors import InputError
from sce.losses import DataSummary


def summarize_data(train: Ragged, n_items: int, *, batch_size: int, max_length: int) -> DataSummary:
    """Summarize the training sequences; those of one event are not trained on."""
    targets = np.diff(train.offsets) - 1
    targets = targets[targets >= 1].clip(max=max_length)
    if not len(targets):
        raise InputError("there is nothing to train on: no sequence has two events")
    counts = torch.from_numpy(np.bincount(train.items, minlength=n_items))
    return DataSummary(n_items, min(batch_size, len(targets)), float(targets.mean()), counts)
