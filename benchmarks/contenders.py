"""The losses that the benchmarks measure: ours, and what one would write first.

The straightforward versions below are the obvious tensor code for the same definitions. They show
what a measured row saves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
    suggest_sizes,
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def tensor_sce(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, n_buckets: int, size_x: int, size_y: int
) -> Tensor:
    """Scalable Cross-Entropy with Mix, every step one operation on whole tensors."""
    states, targets = states.flatten(0, -2), targets.flatten()
    with torch.no_grad():
        omega = torch.randn(n_buckets, len(states), dtype=states.dtype, device=states.device)
        centres = omega @ states
        rows = (centres @ states.T).topk(size_x, dim=1).indices
        items = (centres @ catalogue.T).topk(size_y, dim=1).indices
    logits = states[rows] @ catalogue[items].transpose(1, 2)  # [buckets, x, y]
    own_item = targets[rows].unsqueeze(2) == items.unsqueeze(1)
    logits = logits.masked_fill(own_item, -torch.inf)
    own = (states * catalogue[targets]).sum(dim=1)[rows].unsqueeze(2)
    losses = torch.cat([own, logits], dim=2).float().logsumexp(dim=2) - own.squeeze(2)
    largest = torch.full((len(states),), -torch.inf, device=states.device, dtype=losses.dtype)
    largest = largest.scatter_reduce(0, rows.flatten(), losses.flatten(), reduce="amax")
    return largest[largest > -torch.inf].mean()


def tensor_sampled(
    states: Tensor, catalogue: Tensor, targets: Tensor, *, k: int, binary: bool
) -> Tensor:
    """CE⁻ or BCE⁺ with k negatives for each position, their rows gathered as [positions, k, d]."""
    states, targets = states.flatten(0, -2), targets.flatten()
    items = torch.randint(len(catalogue), (len(states), k), device=states.device)
    others = (catalogue[items] * states.unsqueeze(1)).sum(dim=2)
    own = (states * catalogue[targets]).sum(dim=1)
    collision = items == targets.unsqueeze(1)
    if binary:
        others = functional.logsigmoid(-others).masked_fill(collision, 0.0)
        return -(functional.logsigmoid(own) + others.sum(dim=1)).mean()
    logits = torch.cat([own.unsqueeze(1), others.masked_fill(collision, -torch.inf)], dim=1)
    return (logits.float().logsumexp(dim=1) - own).mean()


def contenders(n_states: int, *, size_y: int = 256, k: int = 256) -> dict[str, Loss]:
    """Return every loss by name, sized for a batch of `n_states` positions."""
    n_buckets, size_x = suggest_sizes(1, n_states)
    sizes: dict[str, Any] = {
        "n_buckets": n_buckets,
        "bucket_size_x": size_x,
        "bucket_size_y": size_y,
    }
    return {
        "SCE": ScalableCrossEntropy(**sizes),
        "SCE, plain path": ScalableCrossEntropy(**sizes, backend="torch"),
        "SCE, tensor code": lambda x, y, t: tensor_sce(
            x, y, t, n_buckets=n_buckets, size_x=size_x, size_y=size_y
        ),
        "CE": CrossEntropy(),
        "CE, chunked": CrossEntropy(chunk_size=1024),
        "CE-": SampledCrossEntropy(k),
        "CE-, tensor code": lambda x, y, t: tensor_sampled(x, y, t, k=k, binary=False),
        "BCE": BinaryCrossEntropy(),
        "BCE+": BinaryCrossEntropy(k),
        "BCE+, tensor code": lambda x, y, t: tensor_sampled(x, y, t, k=k, binary=True),
        "gBCE": GeneralizedBinaryCrossEntropy(k),
    }
