"""Log-sum-exp that needs no second tensor of the size of the logits."""

import torch
from torch import Tensor


def consume_logsumexp(logits: Tensor) -> Tensor:
    """Return the log-sum-exp over the last dimension, overwriting the logits on the way."""
    largest = logits.amax(dim=-1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)  # nothing but -inf: the sum is 0
    return logits.sub_(shift.unsqueeze(-1)).exp_().sum(dim=-1).log_().add_(shift)
