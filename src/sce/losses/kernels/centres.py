"""The centres of the buckets, and what else one pass over the states gives.

With mix the centres are rows of Ω X. Ω is standard normal and never exists as a whole: each tile of
it is drawn from a counter where it is used, so the numbers depend on the seed alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.launch import INTERPRETED, ceil_div, launch, power_of_2
from sce.losses.kernels.precision import half_name, rounded

# States that one step of a program takes.
_BLOCK_ROWS = 32
# How many programs share the states between them, at most.
_MAX_SPLITS = 64
# What marks a state as being in no bucket (see `bucketed.py`).
NOWHERE = -(1 << 63)
_NOWHERE = tl.constexpr(NOWHERE)


@dataclass(frozen=True)
class Prepared:
    """The states as the other kernels want them."""

    wanted: Tensor  # [n] int32: the target of each state; -1: the state does not count
    packed: Tensor  # [n] int64: no bucket has won the state yet
    keys: Tensor  # [n_buckets * size_y + n] int32; the second part says: no item
    losses: Tensor  # [n] float32, zero
    status: Tensor  # [2] int32: whether all targets are in range, and all states finite
    centres: Tensor  # [n_buckets, d], of length one


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw what centres are drawn from, [1]: the host never sees it."""
    return torch.randint(1 << 62, (1,), device=device, generator=generator)


def prepare(
    states: Tensor,  # [n, d]
    targets: Tensor,  # [n]
    centres: Tensor | None,
    seed: Tensor | None,  # [1], read where there are no centres
    *,
    n_items: int,
    n_buckets: int,
    size_y: int,
    mix: bool,
    dtype: torch.dtype,  # of the centres, where they are drawn
    ignore_index: int,
    rounding: torch.dtype | None = None,  # of the states
) -> Prepared:
    """Look at every state and target once, and draw the centres unless they are given."""
    n, d = states.shape
    device = states.device
    draw = centres is None
    mixed = draw and mix
    if centres is None:
        assert seed is not None
        centres = torch.empty(n_buckets, d, device=device, dtype=dtype)
    else:
        seed = centres  # not read
    block_d = max(16, power_of_2(d))
    block_n = 64 if block_d <= 128 else 32 if block_d <= 256 else 16
    splits = max(1, min(_MAX_SPLITS, ceil_div(n, _BLOCK_ROWS)))
    in_split = ceil_div(ceil_div(n, splits), _BLOCK_ROWS) * _BLOCK_ROWS
    wanted = torch.empty(n, device=device, dtype=torch.int32)
    packed = torch.empty(n, device=device, dtype=torch.int64)
    losses = torch.empty(n, device=device, dtype=torch.float32)
    keys = torch.empty(n_buckets * size_y + n, device=device, dtype=torch.int32)
    status = torch.empty(2 + splits, device=device, dtype=torch.int32)
    sums = torch.empty(splits if mixed else 0, n_buckets, d, device=device, dtype=torch.float32)
    launch(
        _states_kernel, (splits, ceil_div(n_buckets, block_n) if mixed else 1),
        states, targets, seed, wanted, packed, losses, keys, status, sums,
        n, n_items, ignore_index, n_buckets, n_buckets * size_y, d, states.stride(0), in_split,
        MIX=mixed, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_N=block_n, BLOCK_D=block_d,
        ROUND=half_name(rounding), APPROXIMATE=not INTERPRETED,
    )  # fmt: skip
    launch(
        _centres_kernel, (ceil_div(n_buckets, 4) if draw else 1,),
        sums, seed, status, centres, n_buckets, d, splits,
        DRAW=draw, MIX=mixed, BLOCK_N=4, BLOCK_D=block_d,
        BLOCK_SPLITS=power_of_2(splits),
    )  # fmt: skip
    # Asserted on the device: as loud as an exception, and the host does not wait for it.
    torch._assert_async(
        status[0],
        f"targets must lie in [0, {n_items}) or equal ignore_index ({ignore_index})",
    )
    return Prepared(wanted, packed, keys, losses, status, centres)


@triton.jit
def _pair_of_normals(a, b, APPROXIMATE: tl.constexpr):
    """Turn two random integers into two standard normal numbers (Box and Muller)."""
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    a = tl.maximum(1.0e-7, a)
    if APPROXIMATE:  # what the chip has for it: right to 20 bits, at a tenth of the time
        radius = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [a], tl.float32, is_pure=True, pack=1
        )
        radius = tl.sqrt(radius * -1.3862943611198906)
        angle = (b - 0.5) * 6.283185307179586
        sine = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1
        )
        cosine = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1
        )
        a, b = radius * cosine, radius * sine
    else:
        a, b = tl.pair_uniform_to_normal(a, b)
    return a, b


@triton.jit
def _normals(seed, column, row, APPROXIMATE: tl.constexpr):
    """Draw a standard normal number for each column and row; of each, four rows in a run."""
    zero = column * 0 + row * 0
    a, b, c, d = tl.philox(seed, zero + row // 4, zero + column, zero, zero)
    a, b = _pair_of_normals(a, b, APPROXIMATE)
    c, d = _pair_of_normals(c, d, APPROXIMATE)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _states_kernel(
    states_ptr,  # [n, d]
    targets_ptr,  # [n]
    seed_ptr,  # [1]
    wanted_ptr,  # [n]
    packed_ptr,  # [n]
    losses_ptr,  # [n]
    keys_ptr,  # [n_places + n]
    status_ptr,  # [2 + splits]
    sums_ptr,  # [splits, n_buckets, d]
    n,
    n_items,
    ignore_index,
    n_buckets,
    n_places,
    d,
    stride,
    in_split,
    MIX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROUND: tl.constexpr,
    APPROXIMATE: tl.constexpr,
):
    split = tl.program_id(0)
    tile = tl.program_id(1)
    i_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    i_d = tl.arange(0, BLOCK_D)
    faults = 0
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, in_split, BLOCK_ROWS):
        i = split * in_split + start + tl.arange(0, BLOCK_ROWS)
        there = i < n
        target = tl.load(targets_ptr + i, mask=there, other=0).to(tl.int64)
        counts = there & (target != ignore_index)
        fits = (target >= 0) & (target < n_items)
        valid = counts & fits
        x = tl.load(
            states_ptr + i[:, None].to(tl.int64) * stride + i_d[None, :],
            mask=valid[:, None] & (i_d < d)[None, :],
            other=0.0,
        )
        x = rounded(x, ROUND).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        if tile == 0:
            tl.store(wanted_ptr + i, tl.where(valid, target, -1).to(tl.int32), mask=there)
            tl.store(packed_ptr + i, tl.full((BLOCK_ROWS,), _NOWHERE, tl.int64), mask=there)
            tl.store(losses_ptr + i, tl.zeros((BLOCK_ROWS,), tl.float32), mask=there)
            tl.store(
                keys_ptr + n_places + i, tl.full((BLOCK_ROWS,), 2147483647, tl.int32), mask=there
            )
            out_of_range = tl.max((counts & (fits == 0)).to(tl.int32), axis=0)
            not_finite = tl.max(tl.max((finite == 0).to(tl.int32), axis=1), axis=0)
            faults = faults | out_of_range | (not_finite * 2)
        if MIX:
            four = split * in_split + start + 4 * tl.arange(0, BLOCK_ROWS // 4)
            omega = _normals(tl.load(seed_ptr), i_n[:, None], four[None, :], APPROXIMATE)
            omega = tl.reshape(omega, (BLOCK_N, BLOCK_ROWS))
            total += tl.dot(omega, tl.where(finite, x, 0.0), input_precision="tf32x3")
    if tile == 0:
        tl.store(status_ptr + 2 + split, faults)
    if MIX:
        tl.store(
            sums_ptr + (split * n_buckets + i_n)[:, None] * d + i_d[None, :],
            total,
            mask=(i_n < n_buckets)[:, None] & (i_d < d)[None, :],
        )


@triton.jit
def _centres_kernel(
    sums_ptr,  # [splits, n_buckets, d]
    seed_ptr,
    status_ptr,
    centres_ptr,  # [n_buckets, d]
    n_buckets,
    d,
    splits,
    DRAW: tl.constexpr,
    MIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    if tl.program_id(0) == 0:
        i = tl.arange(0, BLOCK_SPLITS)
        faults = tl.load(status_ptr + 2 + i, mask=i < splits, other=0)
        tl.store(status_ptr, 1 - tl.max(faults & 1, axis=0))
        tl.store(status_ptr + 1, 1 - tl.max((faults >> 1) & 1, axis=0))
    if DRAW:
        i_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        i_d = tl.arange(0, BLOCK_D)
        inside = (i_n < n_buckets)[:, None] & (i_d < d)[None, :]
        if MIX:
            centres = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            for split in range(splits):
                at = (split * n_buckets + i_n)[:, None] * d + i_d[None, :]
                centres += tl.load(sums_ptr + at, mask=inside, other=0.0)
        else:
            centres = tl.randn(tl.load(seed_ptr), i_n[:, None] * BLOCK_D + i_d[None, :])
            centres = tl.where(inside, centres, 0.0)
        # The length of a centre changes nothing. At one, no score of it can leave the range of
        # numbers that its row is in.
        most = tl.max(tl.abs(centres), axis=1)
        centres = centres / tl.where(most > 0, most, 1.0)[:, None]
        length = tl.sqrt(tl.sum(centres * centres, axis=1))
        centres = centres / tl.where(length > 0, length, 1.0)[:, None]
        tl.store(
            centres_ptr + i_n[:, None] * d + i_d[None, :],
            centres.to(centres_ptr.dtype.element_ty),
            mask=inside,
        )
