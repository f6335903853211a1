"""One of two processes that train together.

Writes FOLDER/RANK.pt: for each case, the gradients of this process alone, and those that
DistributedDataParallel leaves.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sce.losses import ScalableCrossEntropy
from tests.losses.kernels.interpreter import hasten

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # both on one GPU: gloo does not mind
CASES: dict[str, dict[str, Any]] = {
    "plain": {"backend": "torch"},
    "kernels": {"backend": "triton"},
    "sparse": {"backend": "torch", "sparse_grad": True},
}


class Net(nn.Module):
    """A model with its loss, as DistributedDataParallel wants it."""

    def __init__(self, sparse_grad: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)  # all processes begin alike
        self.body = nn.Linear(8, 8)
        self.items = nn.Embedding(40, 8, sparse=sparse_grad)
        self.loss = ScalableCrossEntropy(
            n_buckets=3,
            coverage=False,
            bucket_size_x=6,
            bucket_size_y=7,
            sparse_grad=sparse_grad,
            **settings,
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return self.loss(self.body(inputs), self.items.weight, targets)


def gradients(net: Net, call: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a step on data that all have, with random numbers of one's own."""
    g = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 8, generator=g), torch.randint(40, (24,), generator=g)
    torch.manual_seed(rank)
    call(inputs.to(DEVICE), targets.to(DEVICE)).backward()
    return {name: p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None}


def main(rank: int, folder: Path) -> None:
    """Run every case, alone and together."""
    torch.set_num_threads(1)
    hasten()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    found = {}
    for name, settings in CASES.items():
        alone, shared = Net(**settings).to(DEVICE), Net(**settings).to(DEVICE)
        found[name] = {
            "alone": gradients(alone, alone, rank),
            "together": gradients(shared, DistributedDataParallel(shared), rank),
        }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
