"""Launching kernels: quickly, once they are compiled.

Triton looks at every argument of every launch to find out which compiled kernel fits, which takes
longer than many of the kernels here. Which one fits depends on little: whether numbers are 1 or
multiples of 16, whether tensors are aligned, and their types.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# True if kernels run in Triton's interpreter, which is settled when they are defined.
INTERPRETED = bool(triton.knobs.runtime.interpret)
IS_INTERPRETED = tl.constexpr(INTERPRETED)  # for kernels

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Tensor | int,
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    **constants: float | str | bool,
) -> None:
    """Launch a kernel, with its constants by name in the order of its signature."""
    device = next(a.device.index for a in arguments if isinstance(a, Tensor))
    key = (
        id(kernel),
        device,
        num_warps,
        num_stages,
        registers,
        *constants.values(),
        *[
            (a.dtype, a.data_ptr() % 16)
            if isinstance(a, Tensor)
            else (a == 1, a % 16 == 0, -(1 << 31) <= a < 1 << 31)
            for a in arguments
        ],
    )
    found = _compiled.get(key)
    if found is None:
        # Compiled kernels take their constants by place.
        assert list(constants) == kernel.arg_names[-len(constants) :]
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": registers}
        found = kernel[grid](*arguments, **constants, **options)
        if found is not None:  # the interpreter compiles nothing
            _compiled[key] = found
    else:
        found[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is no less than n."""
    return 1 << max(0, n - 1).bit_length()
