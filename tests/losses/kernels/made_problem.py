"""Random problems for the kernels: on a GPU, or small ones for Triton's interpreter without one."""

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter is slow: there, test_precision.py and ../test_autocast.py stand for the others.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]


def problem(
    seed: int, n: int, c: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states and a catalogue that want gradients, and targets of which some are ignored."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, d, generator=g).to(DEVICE, dtype).requires_grad_()
    catalogue = torch.randn(c, d, generator=g).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(c, (n,), generator=g)
    targets[torch.rand(n, generator=g) < 0.3] = -100
    return states, catalogue, targets.to(DEVICE)
