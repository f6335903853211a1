"""Algorithm 1 of the paper, line by line, or with coverage: slow, obvious, every test's oracle.

Loops over buckets and states, in float64, differentiable through autograd. Never use it to train.
"""

from typing import Any

import torch
from torch import Tensor

from sce.losses import ScalableCrossEntropy


def reference_scalable_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    centres: Tensor,  # [n_buckets, d]
    *,
    bucket_size_y: int,
    bucket_size_x: int | None = None,
    coverage: bool = False,  # each state is in the bucket with the nearest centre
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the Scalable Cross-Entropy of the valid states for the given centres of buckets."""
    X, Y, B = states.double(), catalogue.double(), centres.double()
    valid = [i for i in range(len(X)) if targets[i] != ignore_index]
    largest: dict[int, Tensor] = {}  # state -> its largest loss so far
    cosines = X.detach() @ (B / B.norm(dim=1, keepdim=True)).T
    nearest = {i: max(range(len(B)), key=lambda k: float(cosines[i, k])) for i in valid}
    for k, b in enumerate(B):
        with torch.no_grad():
            in_bucket = sorted(valid, key=lambda i: (-float(X[i] @ b), i))[:bucket_size_x]
            if coverage:
                in_bucket = [i for i in valid if nearest[i] == k]
            items = sorted(range(len(Y)), key=lambda j: (-float(Y[j] @ b), j))[:bucket_size_y]
        for i in in_bucket:
            target = int(targets[i])
            positive = X[i] @ Y[target]
            negatives = [X[i] @ Y[j] for j in items if j != target]
            loss = torch.logsumexp(torch.stack([positive, *negatives]), dim=0) - positive
            if i not in largest or loss > largest[i]:
                largest[i] = loss
    zero = (X[:0].sum() + Y[:0].sum()) * 0.0
    losses = torch.stack([largest.get(i, zero) for i in range(len(X))]) if len(X) else X[:, 0]
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / max(1, len(largest))


def scalable_cross_entropy(
    *inputs: Tensor,
    centres: Tensor | None = None,
    generator: torch.Generator | None = None,
    max_targets: int | None = None,
    **settings: Any,
) -> Tensor:
    """Return the loss of one call of a `ScalableCrossEntropy` of its own."""
    options = {"centres": centres, "generator": generator, "max_targets": max_targets}
    return ScalableCrossEntropy(**settings)(*inputs, **options)  # type: ignore[no-any-return]
