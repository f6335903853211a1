"""Which implementation a loss runs on."""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "torch"]

# The widest rows whose tiles fit on the chip.
MAX_DIM = 512
_HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)

logger = logging.getLogger(__name__)


def choose_backend(
    states: Tensor, catalogue: Tensor, backend: Backend
) -> Literal["triton", "torch"]:
    """Return "triton" where the kernels run and are wanted, "torch" otherwise.

    "auto" falls back without a word, except one at debug level; "triton" says why it cannot.
    """
    if backend == "torch":
        return "torch"
    reason = _why_not(states, catalogue)
    # Triton's interpreter takes tensors on the CPU, but nobody wants it unless they ask for it.
    interpreted = backend == "triton" and _interpreted()
    if reason is None and not states.is_cuda and not interpreted:
        reason = f"the states are on {states.device}, not on a GPU"
    if reason is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' does not work here: {reason}")
    _say_once(reason)
    return "torch"


def _why_not(states: Tensor, catalogue: Tensor) -> str | None:
    if not find_spec("triton"):
        return "triton is not installed"
    for tensor in (states, catalogue):
        if tensor.dtype not in _HALF_OR_SINGLE:
            return f"the kernels know no {tensor.dtype}"
    if catalogue.shape[-1:].numel() > MAX_DIM:
        return f"the kernels take up to {MAX_DIM} dimensions, got {catalogue.shape[-1]}"
    return None


@cache
def _interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter."""
    if not find_spec("triton"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _say_once(reason: str) -> None:
    logger.debug("the plain PyTorch path is used: %s", reason)
