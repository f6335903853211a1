"""The choice between the Triton kernels and plain PyTorch."""

import logging
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "torch"]

MAX_DIM = 512  # the widest rows whose tiles fit on the chip
_WIDEST = f"the kernels take up to {MAX_DIM} dimensions"
_HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
_HAS_TRITON = find_spec("triton") is not None

logger = logging.getLogger(__name__)


def why_not_triton(states: Tensor, catalogue: Tensor, backend: Backend) -> str | None:
    """Return the reason why the kernels do not run here, or None; torch.compile can trace it."""
    if backend == "torch":
        return "another backend was asked for"
    if not _HAS_TRITON:
        return "triton is not installed"
    for tensor in (states, catalogue):
        if tensor.dtype not in _HALF_OR_SINGLE:
            return f"the kernels know no {tensor.dtype}"
    # Triton's interpreter takes tensors on the CPU, but nobody wants it unless they ask for it.
    if not states.is_cuda and not (backend == "triton" and _interpreted()):
        return f"the states are on {states.device}, not on a GPU"
    if catalogue.shape[-1:].numel() > MAX_DIM:
        return f"{_WIDEST}, got {catalogue.shape[-1]}"
    if states.is_cuda:
        look = _why_not_on if torch.compiler.is_compiling() else _remembered
        return look(states.device)
    return None


def has_kernels(device: torch.device) -> bool:
    """True if the kernels run on this device, for inputs that suit them."""
    return device.type == "cuda" and _HAS_TRITON and _remembered(device) is None


def _why_not_on(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on a GPU: they hold PTX, TF32 and bfloat16."""
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs, and this torch is built for ROCm"
    gpu = torch.cuda.get_device_properties(device)  # which torch.compile can look at
    if gpu.major < 8:
        return f"the kernels need compute capability 8.0, {gpu.name} has {gpu.major}.{gpu.minor}"
    return None


_remembered = cache(_why_not_on)


def _interpreted() -> bool:
    from sce.losses.kernels.launch import INTERPRETED

    return INTERPRETED


@cache  # each reason is given once
def explain(reason: str, backend: Backend) -> None:
    """Say why the kernels do not run; refuse to go on without them if they were asked for."""
    if backend == "triton":
        raise ValueError(f"backend 'triton' does not work here: {reason}")
    if backend == "auto" and reason.startswith(_WIDEST):  # on a GPU that could run them
        message = f"SCE runs in plain PyTorch, which is slower: {reason}"
        warnings.warn(f'{message}; backend="torch" asks for it', stacklevel=4)
    elif backend == "auto":
        logger.debug("the plain PyTorch path is used: %s", reason)
