"""The centres of the buckets, and the checks of states and targets, in one pass over the states.

Random numbers come from counters where they are used, so they depend on the seed alone. A "mix" of
all states is a row of Ω X, with Ω standard normal, which never exists as a whole. For "states", the
k-th valid state is found by how many of them each program of the first pass has seen.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.buckets import MIXED_STATES, Centres
from sce.losses.kernels.launch import IS_INTERPRETED, ceil_div, launch, power_of_2
from sce.losses.kernels.precision import half_name, load_rows, rounded
from sce.losses.kernels.tiles import block, mixing_tile

_MULTIPLE = 32  # the states of a program are a multiple of it: most are read so many at a time
_MAX_SPLITS = 64  # programs that share the states between them
NOWHERE = -(1 << 63)  # marks a state that is in no bucket (see `bucketed.py`)
_NOWHERE = tl.constexpr(NOWHERE)
_MIXED_STATES = tl.constexpr(MIXED_STATES)


@dataclass(frozen=True)
class Prepared:
    """Buffers for the other kernels, filled where they depend on the states alone."""

    targets: Tensor  # [n] int32: the target of each state; -1: the state is not valid
    packed: Tensor  # [n] int64: no bucket has won the state yet
    keys: Tensor  # [n_buckets * size_y + n] int32; the second part says: no item
    losses: Tensor  # [n] float32, zero
    status: Tensor  # [2] int32: all targets are in range, all states are finite
    centres: Tensor  # [n_buckets, d], of length one


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw the seed of the centres, [1], on the device: no sync."""
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
    kind: Centres,
    dtype: torch.dtype,  # of the centres, where they are drawn
    ignore_index: int,
    autocast_dtype: torch.dtype | None = None,  # of the states
) -> Prepared:
    """Look at every state and target once, and draw the centres unless they are given."""
    n, d = states.shape
    device = states.device
    draw = centres is None
    mixed = draw and kind == "mix"
    if centres is None:
        assert seed is not None
        centres = torch.empty(n_buckets, d, device=device, dtype=dtype)
    else:
        seed = centres  # not read
    block_d = block(d)
    tile = mixing_tile(d)
    splits = max(1, min(_MAX_SPLITS, ceil_div(n, _MULTIPLE)))
    in_split = ceil_div(ceil_div(n, splits), _MULTIPLE) * _MULTIPLE
    marked = torch.empty(n, device=device, dtype=torch.int32)
    packed = torch.empty(n, device=device, dtype=torch.int64)
    losses = torch.empty(n, device=device, dtype=torch.float32)
    keys = torch.empty(n_buckets * size_y + n, device=device, dtype=torch.int32)
    status = torch.empty(2 + 2 * splits, device=device, dtype=torch.int32)
    sums = torch.empty(splits if mixed else 0, n_buckets, d, device=device, dtype=torch.float32)
    launch(
        _states_kernel, (splits, ceil_div(n_buckets, tile.x) if mixed else 1),
        states, targets, seed, marked, packed, losses, keys, status, sums,
        n, n_items, ignore_index, n_buckets, n_buckets * size_y, d, states.stride(0), in_split,
        MIX=mixed, BLOCK_ROWS=tile.y, BLOCK_N=tile.x, BLOCK_D=block_d,
        ROUND=half_name(autocast_dtype), num_warps=tile.warps,
    )  # fmt: skip
    if draw and kind == "states":
        launch(
            _few_states_kernel, (n_buckets,),
            states, marked, seed, status, centres, d, states.stride(0), splits, in_split, n,
            NOISE=1 / d**0.5, BLOCK_ROWS=min(1024, power_of_2(in_split)), BLOCK_D=block_d,
            BLOCK_SPLITS=power_of_2(splits), ROUND=half_name(autocast_dtype),
        )  # fmt: skip
    else:
        launch(
            _centres_kernel, (ceil_div(n_buckets, 4) if draw else 1,),
            sums, seed, status, centres, n_buckets, d, splits,
            DRAW=draw, MIX=mixed, BLOCK_N=4, BLOCK_D=block_d, BLOCK_SPLITS=power_of_2(splits),
        )  # fmt: skip
    # Asserted on the device: as loud as an exception, and the host does not wait for it.
    torch._assert_async(
        status[0], f"targets must lie in [0, {n_items}) or equal ignore_index ({ignore_index})"
    )
    return Prepared(marked, packed, keys, losses, status, centres)


@triton.jit
def _pair_of_normals(a, b):
    """Turn two random integers into two standard normal numbers (Box and Muller)."""
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    a = tl.maximum(1.0e-7, a)
    if IS_INTERPRETED:
        a, b = tl.pair_uniform_to_normal(a, b)
    else:  # what the chip has for it: right to 20 bits, at a tenth of the time
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
    return a, b


@triton.jit
def _normals(seed, column, row):
    """Draw a standard normal number for each column and row; of each, four rows in a run."""
    zero = column * 0 + row * 0
    a, b, c, d = tl.philox(seed, zero + row // 4, zero + column, zero, zero)
    a, b = _pair_of_normals(a, b)
    c, d = _pair_of_normals(c, d)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _states_kernel(
    states_ptr,  # [n, d]
    targets_ptr,  # [n]
    seed_ptr,  # [1]
    marked_ptr,  # [n]: targets, -1 where they are not valid
    packed_ptr,  # [n]
    losses_ptr,  # [n]
    keys_ptr,  # [n_places + n]
    status_ptr,  # [2 + 2 splits]
    sums_ptr,  # [splits, n_buckets, d]
    n, n_items, ignore_index, n_buckets, n_places, d, stride, in_split,
    MIX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    tile = tl.program_id(1)
    i_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    i_d = tl.arange(0, BLOCK_D)
    faults = 0
    seen = 0
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, in_split, BLOCK_ROWS):
        i = split * in_split + start + tl.arange(0, BLOCK_ROWS)
        mask = i < n
        target = tl.load(targets_ptr + i, mask=mask, other=0).to(tl.int64)
        counts = mask & (target != ignore_index)
        fits = (target >= 0) & (target < n_items)
        valid = counts & fits
        x = load_rows(states_ptr, i, valid, stride, 0, d, BLOCK_D, ROUND).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        if tile == 0:
            tl.store(marked_ptr + i, tl.where(valid, target, -1).to(tl.int32), mask=mask)
            tl.store(packed_ptr + i, tl.full((BLOCK_ROWS,), _NOWHERE, tl.int64), mask=mask)
            tl.store(losses_ptr + i, tl.zeros((BLOCK_ROWS,), tl.float32), mask=mask)
            tl.store(
                keys_ptr + n_places + i, tl.full((BLOCK_ROWS,), 2147483647, tl.int32), mask=mask
            )
            out_of_range = tl.max((counts & (fits == 0)).to(tl.int32), axis=0)
            not_finite = tl.max(tl.max((finite == 0).to(tl.int32), axis=1), axis=0)
            faults = faults | out_of_range | (not_finite * 2)
            seen += tl.sum(valid.to(tl.int32), axis=0)
        if MIX:
            four = split * in_split + start + 4 * tl.arange(0, BLOCK_ROWS // 4)
            omega = _normals(tl.load(seed_ptr), i_n[:, None], four[None, :])
            omega = tl.reshape(omega, (BLOCK_N, BLOCK_ROWS))
            total += tl.dot(omega, tl.where(finite, x, 0.0), input_precision="tf32x3")
    if tile == 0:
        tl.store(status_ptr + 2 + split, faults)
        tl.store(status_ptr + 2 + tl.num_programs(0) + split, seen)
    if MIX:
        tl.store(
            sums_ptr + (split * n_buckets + i_n)[:, None] * d + i_d[None, :],
            total,
            mask=(i_n < n_buckets)[:, None] & (i_d < d)[None, :],
        )


@triton.jit
def _report_faults(status_ptr, splits, BLOCK_SPLITS: tl.constexpr):
    """Combine the faults that the programs of the first pass found."""
    i = tl.arange(0, BLOCK_SPLITS)
    faults = tl.load(status_ptr + 2 + i, mask=i < splits, other=0)
    tl.store(status_ptr, 1 - tl.max(faults & 1, axis=0))
    tl.store(status_ptr + 1, 1 - tl.max((faults >> 1) & 1, axis=0))


@triton.jit
def _of_length_one(centres):
    """Scale centres [n, d] to length one.

    The length of a centre changes nothing. At one, no score of it can leave the range of numbers
    that its row is in.
    """
    most = tl.max(tl.abs(centres), axis=1)
    centres = centres / tl.where(most > 0, most, 1.0)[:, None]
    length = tl.sqrt(tl.sum(centres * centres, axis=1))
    return centres / tl.where(length > 0, length, 1.0)[:, None]


@triton.jit
def _centres_kernel(
    sums_ptr,  # [splits, n_buckets, d]
    seed_ptr, status_ptr,
    centres_ptr,  # [n_buckets, d]
    n_buckets, d, splits,
    DRAW: tl.constexpr, MIX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        _report_faults(status_ptr, splits, BLOCK_SPLITS)
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
        tl.store(
            centres_ptr + i_n[:, None] * d + i_d[None, :],
            _of_length_one(centres).to(centres_ptr.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _few_states_kernel(
    states_ptr,  # [n, d]
    targets_ptr,  # [n], as marked
    seed_ptr, status_ptr,
    centres_ptr,  # [n_buckets, d]
    d, stride, splits, in_split, n,
    NOISE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    bucket = tl.program_id(0)
    if bucket == 0:
        _report_faults(status_ptr, splits, BLOCK_SPLITS)
    i_split = tl.arange(0, BLOCK_SPLITS)
    i_d = tl.arange(0, BLOCK_D)
    seen = tl.load(status_ptr + 2 + splits + i_split, mask=i_split < splits, other=0)
    up_to = tl.cumsum(seen, axis=0)
    count = tl.sum(seen, axis=0)
    centre = tl.zeros((BLOCK_D,), tl.float32)
    for drawn in range(_MIXED_STATES):
        a, b, c, _ = tl.philox(tl.load(seed_ptr), drawn, bucket, 0, 0)
        weight, _ = _pair_of_normals(b, c)
        # The chosen one of the valid states: which split has it, and where.
        chosen = a.to(tl.uint32, bitcast=True).to(tl.uint64) * count.to(tl.uint64)
        chosen = (chosen >> 32).to(tl.int32)
        split = tl.sum(((up_to <= chosen) & (i_split < splits)).to(tl.int32), axis=0)
        before = tl.sum(tl.where(i_split < split, seen, 0), axis=0)
        row = -1
        for start in range(0, in_split, BLOCK_ROWS):
            inside = start + tl.arange(0, BLOCK_ROWS)
            i = split * in_split + inside
            mask = (inside < in_split) & (i < n) & (split < splits)
            counts = (tl.load(targets_ptr + i, mask=mask, other=-1) >= 0).to(tl.int32)
            is_it = (counts > 0) & (before + tl.cumsum(counts, axis=0) - 1 == chosen)
            row = tl.maximum(row, tl.max(tl.where(is_it, i, -1), axis=0))
            before += tl.sum(counts, axis=0)
        at = states_ptr + tl.cast(row, tl.int64) * stride + i_d
        x = tl.load(at, mask=(i_d < d) & (row >= 0), other=0.0)
        x = rounded(x, ROUND).to(tl.float32)
        centre += tl.abs(weight) * tl.where(tl.abs(x) < float("inf"), x, 0.0)
    centre = tl.sum(_of_length_one(centre[None, :]), axis=0)
    a, b, _, _ = tl.philox(tl.load(seed_ptr), i_d, bucket + i_d * 0, i_d * 0 + 1, i_d * 0)
    noise, _ = _pair_of_normals(a, b)
    centre = tl.where(i_d < d, centre + NOISE * noise, 0.0)
    centre = tl.sum(_of_length_one(centre[None, :]), axis=0)
    tl.store(centres_ptr + bucket * d + i_d, centre.to(centres_ptr.dtype.element_ty), mask=i_d < d)
