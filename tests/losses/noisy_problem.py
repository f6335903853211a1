"""States in one place, and items all around."""

from typing import Any

import torch

from sce.losses import ScalableCrossEntropy


def rows_touched(*, device: str = "cpu", call: Any = None, **settings: Any) -> set[int]:
    """Return the items that get a gradient; the first ten lie where the states are."""
    g = torch.Generator().manual_seed(0)
    place = torch.zeros(16)
    place[0] = 4.0
    states = (place + 0.01 * torch.randn(30, 16, generator=g)).to(device).requires_grad_()
    catalogue = torch.randn(60, 16, generator=g)
    catalogue[:, 0] = -1.0
    catalogue[:10] = place
    catalogue = catalogue.to(device).requires_grad_()
    loss = ScalableCrossEntropy(
        n_buckets=8, coverage=False, bucket_size_x=6, bucket_size_y=5, reduction="sum", **settings
    )
    torch.manual_seed(1)
    value = (call or (lambda loss: loss))(loss)(
        states, catalogue, torch.zeros(30, dtype=torch.long, device=device)
    )
    (grad,) = torch.autograd.grad(value, catalogue)
    return set(grad.abs().sum(dim=1).nonzero().squeeze(1).tolist())
