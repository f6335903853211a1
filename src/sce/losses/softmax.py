"""Log-sum-exp that needs no second tensor of the size of the logits."""

import torch
from torch import Tensor


def consume_logsumexp(logits: Tensor, *, above: Tensor) -> Tensor:
    """Return how far the log-sum-exp over the last dimension is above a logit, overwriting logits.

    Their difference is taken before the logarithm is added: of two large numbers that are close to
    each other it is exact, and the logarithm is not lost in the rounding of a large one.
    """
    largest = logits.amax(dim=-1)
    shift = torch.where(largest == -torch.inf, 0.0, largest)  # nothing but -inf: the sum is 0
    return logits.sub_(shift.unsqueeze(-1)).exp_().sum(dim=-1).log_().add_(shift - above)
