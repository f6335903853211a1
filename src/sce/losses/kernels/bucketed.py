"""Cross-entropy inside buckets, fused: logits exist only as tiles on the chip.

The forward kernel leaves two numbers for each state: its positive logit, and the largest loss over
its buckets, packed with the bucket that has it into one integer whose maximum is taken. A loss is
how far a log-sum-exp is above the positive logit; of large logits the sum itself would be rounded.
Where each state is in one bucket, it leaves the gradient of the state's loss as well.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.buckets import Members
from sce.losses.kernels.centres import NOWHERE, Prepared
from sce.losses.kernels.launch import ceil_div, launch, power_of_2
from sce.losses.kernels.members import count_tiles, tile_of_bucket
from sce.losses.kernels.precision import (
    add_weighted,
    added,
    exponential,
    load_rows,
    product_of_rows,
    store_rows,
)
from sce.losses.kernels.tiles import Tiles

_NOWHERE = tl.constexpr(NOWHERE)
_STATES = 1024  # that a program adds up


def forward(
    x: Tensor,  # [n, d]
    y: Tensor,  # [c, d]
    prepared: Prepared,
    members: Members,
    items: Tensor,  # [n_buckets, size_y]
    own_grads: Tensor,  # [n, d] float32, zeros, if each state is in one bucket; or [0, d]
    reduction: str,
    autocast_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, positive logits [n], the bucket that won each state [n], and their count.

    A state that is in no bucket has the bucket n_buckets. The gradient of each state's loss goes to
    `own_grads`, by one more product of the tile at hand.
    """
    n, device = len(x), x.device
    (n_buckets, size_y), d = items.shape, x.shape[1]
    positive_logits = torch.empty(n, device=device, dtype=torch.float32)
    winners = torch.empty(n, device=device, dtype=torch.int32)
    count = torch.empty(1, device=device, dtype=torch.int32)
    loss = torch.empty((), device=device, dtype=torch.float32)
    parts = ceil_div(n, _STATES)
    sums = torch.empty(parts, device=device, dtype=torch.float32)
    counts = torch.empty(parts, device=device, dtype=torch.int32)
    tiles = Tiles(x, y, autocast_dtype)
    tile = tiles.both if len(own_grads) else tiles.forward
    launch(
        _losses_kernel, (count_tiles(*members, tile.x),),
        x, y, prepared.targets, *members, items, positive_logits, prepared.packed,
        own_grads, n_buckets, size_y, d, x.stride(0), y.stride(0),
        GRADIENT=len(own_grads) > 0, SPLIT=autocast_dtype is not None, EVEN=size_y % tile.y == 0,
        BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tiles.d, SLICE=tile.slice, ROUND=tiles.round,
        PRECISION=tiles.precision, num_warps=tile.warps, num_stages=tile.stages,
        registers=tile.registers,
    )  # fmt: skip
    launch(
        _winners_kernel, (parts,),
        prepared.packed, prepared.targets, prepared.status, winners, counts, sums,
        prepared.losses, prepared.keys, n, n_buckets, items.numel(), BLOCK=_STATES,
    )  # fmt: skip
    launch(
        _reduce_kernel, (1,),
        sums, counts, prepared.status, loss, count, parts, MEAN=reduction == "mean",
        BLOCK=power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return loss, positive_logits, winners, count


@triton.jit
def _pack(value, bucket):
    """Put a float32 and a bucket into one integer: larger values first, then lower buckets."""
    value = tl.where(value == value, value, float("nan"))  # of all NaN the one above infinity
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (key.to(tl.int64) << 32) | (2147483647 - bucket)


@triton.jit
def packed_value(packed):
    """Return the value that was packed."""
    key = (packed >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _losses_kernel(
    x_ptr, y_ptr, targets_ptr, states_ptr, offsets_ptr, bucket_items_ptr, positive_ptr, packed_ptr,
    own_grads_ptr,  # [n, d], where GRADIENT
    n_buckets, size_y, d, stride_x, stride_y,
    GRADIENT: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # tiles of items are full
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bucket, first, last = tile_of_bucket(offsets_ptr, n_buckets, BLOCK_X)
    if first < last:
        i_x = first + tl.arange(0, BLOCK_X)
        in_x = i_x < last
        row = tl.load(states_ptr + i_x, mask=in_x, other=0)
        target = tl.load(targets_ptr + row, mask=in_x, other=-1)
        counts = in_x & (target >= 0)
        x = load_rows(x_ptr, row, counts, stride_x, 0, d, SLICE, ROUND)
        if SLICE == BLOCK_D:
            positive_y = load_rows(y_ptr, target, counts, stride_y, 0, d, BLOCK_D, ROUND)
            positive = tl.sum(x.to(tl.float32) * positive_y.to(tl.float32), axis=1)
        else:
            positive = tl.zeros((BLOCK_X,), tl.float32)
            for first in range(0, d, SLICE):
                part = load_rows(x_ptr, row, counts, stride_x, first, d, SLICE, ROUND)
                positive_y = load_rows(y_ptr, target, counts, stride_y, first, d, SLICE, ROUND)
                positive += tl.sum(part.to(tl.float32) * positive_y.to(tl.float32), axis=1)
        largest = positive  # the target always counts; the negatives come on top
        total = tl.full((BLOCK_X,), 1.0, tl.float32)
        sums = tl.zeros((BLOCK_X, BLOCK_D), tl.float32)  # of the others, by their weights
        for start in range(0, size_y, BLOCK_Y):
            i_y = start + tl.arange(0, BLOCK_Y)
            in_y = (i_y < size_y) | EVEN
            item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
            y = load_rows(y_ptr, item, in_y, stride_y, 0, d, BLOCK_D if GRADIENT else SLICE, ROUND)
            logits = product_of_rows(
                x, y, x_ptr, row, counts, stride_x, y_ptr, item, in_y, stride_y, d,
                BLOCK_D, SLICE, ROUND, ROUND, PRECISION,
            )  # fmt: skip
            other = item[None, :] != target[:, None]
            if not EVEN:
                other &= in_y[None, :]
            logits = tl.where(other, logits, float("-inf"))
            now = tl.maximum(largest, tl.max(logits, axis=1))
            weights, less = exponential(logits - now[:, None]), exponential(largest - now)
            total = total * less + tl.sum(weights, axis=1)
            if GRADIENT:
                sums = add_weighted(sums * less[:, None], weights, y, ROUND, SPLIT, PRECISION)
            largest = now
        loss = (largest - positive) + tl.log(total)
        # A maximum does not depend on the order: the same bucket wins in every run.
        tl.atomic_max(packed_ptr + row, _pack(loss, bucket), mask=counts, sem="relaxed")
        # Several buckets write the same number to the same place: a state has one positive logit.
        tl.store(positive_ptr + row, positive, mask=counts)
        if GRADIENT:
            positive_y = load_rows(y_ptr, target, counts, stride_y, 0, d, BLOCK_D, ROUND)
            grad = (tl.exp(-loss) - 1.0)[:, None] * positive_y.to(tl.float32)
            store_rows(
                own_grads_ptr, row, grad + added(sums, ROUND) / total[:, None], counts, d, BLOCK_D
            )


@triton.jit
def _winners_kernel(
    packed_ptr,  # [n]
    targets_ptr,  # [n]
    status_ptr,
    winners_ptr,  # [n]
    counts_ptr,  # [parts]
    sums_ptr,  # [parts]
    losses_ptr,  # [n]
    keys_ptr,  # [n_places + n]
    n, n_buckets, n_places,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.load(packed_ptr + row, mask=row < n, other=_NOWHERE)
    placed = packed != _NOWHERE
    winner = (2147483647 - (packed & 0xFFFFFFFF)).to(tl.int32)
    tl.store(winners_ptr + row, tl.where(placed, winner, n_buckets), mask=row < n)
    sound = tl.load(status_ptr + 1) != 0
    loss = tl.where(sound, packed_value(packed), float("nan"))
    tl.store(losses_ptr + row, loss, mask=placed)
    target = tl.load(targets_ptr + row, mask=placed, other=0)
    tl.store(keys_ptr + n_places + row, target, mask=placed)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(placed.to(tl.int32), axis=0))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.where(placed, loss, 0.0), axis=0))


@triton.jit
def _reduce_kernel(
    sums_ptr, counts_ptr, status_ptr, loss_ptr, count_ptr, parts,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(sums_ptr + i, mask=i < parts, other=0.0), axis=0)
    count = tl.sum(tl.load(counts_ptr + i, mask=i < parts, other=0), axis=0)
    # A state that is not finite may fall into no bucket, and would then go unnoticed.
    total = tl.where(tl.load(status_ptr + 1) != 0, total, float("nan"))
    if MEAN:
        total = total / tl.maximum(count, 1)
    tl.store(loss_ptr, total)
    tl.store(count_ptr, count)
