"""TF32 in matrix products, allowed or forbidden for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def matmul_precision(device: torch.device, precision: Precision) -> Iterator[None]:
    """Allow TF32 in matrix products inside the block, or forbid it; autocast is another matter."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    # One setting under two names: torch allows the older to be used only while nobody has used the
    # newer, which torch 2.8 has not.
    newer = hasattr(matmul, "fp32_precision")
    name = "fp32_precision" if newer else "allow_tf32"
    value = ("tf32" if newer else True) if precision == "tf32" else ("ieee" if newer else False)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)
