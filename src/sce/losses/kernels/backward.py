"""The gradients, fused: tiles are computed again for the states that each bucket won, no others.

The gradient of a state flows through the one bucket that won it, so each is written once. Where
each state is in one bucket alone, the forward pass has found it already (`bucketed.py`). That of an
item is left as a row for each of its places in a bucket (`catalogue.py` adds them up).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.bucketed import packed_value
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

_ROWS = 32  # that a program writes


class Saved(NamedTuple):
    """Tensors that the forward pass leaves for the backward pass."""

    x: Tensor  # [n, d] states
    y: Tensor  # [c, d] catalogue
    targets: Tensor  # [n]
    packed: Tensor  # [n]
    keys: Tensor  # [n_buckets * size_y + n]
    positive_logits: Tensor  # [n]
    won: Tensor  # [n]: the states, by the bucket that won them
    offsets: Tensor  # [n_buckets + 1]: where those of each bucket begin
    n_won: Tensor  # [1]: states that any bucket won
    own_grads: Tensor  # [n, d] float32: of each state's own loss; [0, d]: not found yet
    items: Tensor  # [n_buckets, size_y], of the buckets: the first part of the keys
    autocast_dtype: torch.dtype | None  # of rows in matrix products


def bucket_items(keys: Tensor, n_buckets: int, targets: Tensor) -> Tensor:
    """Return the items of the buckets, [n_buckets, size_y]: the first part of the keys."""
    n_places = len(keys) - len(targets)
    return keys[:n_places].view(n_buckets, n_places // n_buckets)


def grad_states(saved: Saved, grad: Tensor, reduction: str) -> Tensor:
    """Return the gradient of the states, [n, d]; `grad` is that of the loss, scalar or [n]."""
    x, y, (n, d) = saved.x, saved.y, saved.x.shape
    if len(saved.own_grads):
        out = torch.empty(n, d, device=x.device, dtype=x.dtype)
        launch(
            _scale_kernel, (ceil_div(n, _ROWS),),
            saved.own_grads, saved.targets, saved.n_won, grad, out, n, d,
            REDUCTION=reduction, BLOCK=_ROWS, BLOCK_D=power_of_2(d),
        )  # fmt: skip
        return out
    out = torch.zeros(n, d, device=x.device, dtype=x.dtype)
    tiles = Tiles(x, y, saved.autocast_dtype)
    tile = tiles.states
    launch(
        _grad_states_kernel, (count_tiles(saved.won, saved.offsets, tile.x),),
        x, y, saved.targets, saved.items, saved.positive_logits, saved.packed, saved.won,
        saved.offsets, saved.n_won, grad, out, *saved.items.shape, d, x.stride(0), y.stride(0),
        REDUCTION=reduction, BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tiles.d, SLICE=tile.slice,
        ROUND=tiles.round, SPLIT=saved.autocast_dtype is not None, PRECISION=tiles.precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def parts_dtype(saved: Saved) -> torch.dtype:
    """Return the precision of the catalogue's gradient in parts: that of the products."""
    same = saved.autocast_dtype is None and saved.x.dtype == saved.y.dtype
    return saved.y.dtype if same else torch.float32


class Ordered(NamedTuple):
    """What `grad_places` reads of the states, bucket by bucket: many programs read it in turn."""

    x: Tensor  # [n, d], rounded
    targets: Tensor  # [n]
    positive_logits: Tensor  # [n]
    losses: Tensor  # [n]
    scales: Tensor  # [n], of each loss; empty where all are alike


def order_states(saved: Saved, grad: Tensor, reduction: str) -> Ordered:
    """List the states as the buckets that won them do."""
    (n, d), device, own = saved.x.shape, saved.x.device, reduction == "none"
    tiles = Tiles(saved.x, saved.y, saved.autocast_dtype)
    x = torch.empty(n, d, device=device, dtype=saved.autocast_dtype or saved.x.dtype)
    targets = torch.empty(n, device=device, dtype=torch.int32)
    numbers = (x.new_empty(m, dtype=torch.float32) for m in (n, n, n * own))
    ordered = Ordered(x, targets, *numbers)
    launch(
        _order_kernel, (ceil_div(n, _ROWS),),
        saved.x, saved.targets, saved.positive_logits, saved.packed, saved.won, grad, *ordered,
        n, d, saved.x.stride(0), OWN=own, BLOCK=_ROWS, BLOCK_D=tiles.d, ROUND=tiles.round,
    )  # fmt: skip
    return ordered


def grad_places(saved: Saved, states: Ordered, reduction: str, first: int, last: int) -> Tensor:
    """Return the rows that places in buckets first to last add to their items, [b, size_y, d].

    A state's target is masked where it is in the bucket: what targets add is not in it. The scale
    that all states share is left out, so that half precision, which is enough for a gradient in it,
    has room for small ones.
    """
    size_y, d = saved.items.shape[1], saved.x.shape[1]
    out = torch.empty(last - first, size_y, d, device=saved.x.device, dtype=parts_dtype(saved))
    tiles = Tiles(saved.x, saved.y, saved.autocast_dtype)
    tile = tiles.places
    launch(
        _grad_places_kernel, (ceil_div(size_y, tile.y) * (last - first),),
        *states, saved.y, saved.items, saved.offsets, out, first, size_y, d, saved.y.stride(0),
        OWN=reduction == "none", BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tiles.d, SLICE=tile.slice,
        ROUND=tiles.round, SPLIT=saved.autocast_dtype is not None, PRECISION=tiles.precision,
        num_warps=tile.warps, num_stages=tile.stages, registers=tile.registers,
    )  # fmt: skip
    return out


@triton.jit
def common_scale(grad_ptr, count_ptr, REDUCTION: tl.constexpr):
    """Return the part of the scale that all states share."""
    if REDUCTION == "none":
        return 1.0
    scale = tl.load(grad_ptr).to(tl.float32)
    if REDUCTION == "mean":
        scale = scale / tl.maximum(tl.load(count_ptr), 1)
    return scale


@triton.jit
def _scale_kernel(
    own_ptr, targets_ptr, count_ptr, grad_ptr, out_ptr, n, d,
    REDUCTION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grads = load_rows(own_ptr, i, i < n, d, 0, d, BLOCK_D, "")
    # That of an ignored position may be anything, and counts for nothing.
    counts = tl.load(targets_ptr + i, mask=i < n, other=-1) >= 0
    scale = tl.where(counts, common_scale(grad_ptr, count_ptr, REDUCTION), 0.0)
    if REDUCTION == "none":
        scale = tl.load(grad_ptr + i, mask=counts, other=0.0).to(tl.float32)
    store_rows(out_ptr, i, grads * scale[:, None], i < n, d, BLOCK_D)


@triton.jit
def _grad_states_kernel(
    x_ptr, y_ptr, targets_ptr, bucket_items_ptr, positive_ptr, packed_ptr, won_ptr, offsets_ptr,
    count_ptr, grad_ptr, out_ptr, n_buckets, size_y, d, stride_x, stride_y,
    REDUCTION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, ROUND: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bucket, first, last = tile_of_bucket(offsets_ptr, n_buckets, BLOCK_X)
    if first < last:
        i_x = first + tl.arange(0, BLOCK_X)
        in_x = i_x < last
        row = tl.load(won_ptr + i_x, mask=in_x, other=0)
        target = tl.load(targets_ptr + row, mask=in_x, other=0)
        loss = packed_value(tl.load(packed_ptr + row, mask=in_x, other=0))
        positive = tl.load(positive_ptr + row, mask=in_x, other=0.0)
        scale = tl.full((BLOCK_X,), 1.0, tl.float32)
        scale *= common_scale(grad_ptr, count_ptr, REDUCTION)
        if REDUCTION == "none":
            scale = tl.load(grad_ptr + row, mask=in_x, other=0.0).to(tl.float32)
        x = load_rows(x_ptr, row, in_x, stride_x, 0, d, SLICE, ROUND)
        sums = tl.zeros((BLOCK_X, BLOCK_D), tl.float32)
        for start in range(0, size_y, BLOCK_Y):
            i_y = start + tl.arange(0, BLOCK_Y)
            in_y = i_y < size_y
            item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
            y = load_rows(y_ptr, item, in_y, stride_y, 0, d, BLOCK_D, ROUND)
            logits = product_of_rows(
                x, y, x_ptr, row, in_x, stride_x, y_ptr, item, in_y, stride_y, d,
                BLOCK_D, SLICE, ROUND, ROUND, PRECISION,
            )  # fmt: skip
            other = in_y[None, :] & (item[None, :] != target[:, None])
            logits = tl.where(other, logits, float("-inf"))
            weights = exponential(logits - positive[:, None], loss[:, None])
            sums = add_weighted(sums, weights, y, ROUND, SPLIT, PRECISION)
        positive_y = load_rows(y_ptr, target, in_x, stride_y, 0, d, BLOCK_D, ROUND)
        grad = added(sums, ROUND) + (tl.exp(-loss) - 1.0)[:, None] * positive_y.to(tl.float32)
        store_rows(out_ptr, row, grad * scale[:, None], in_x, d, BLOCK_D)


@triton.jit
def _order_kernel(
    x_ptr, targets_ptr, positive_ptr, packed_ptr, won_ptr, grad_ptr,
    ordered_ptr, ordered_targets_ptr, ordered_positive_ptr, losses_ptr, scales_ptr, n, d, stride_x,
    OWN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(won_ptr + i, mask=mask, other=0)
    x = load_rows(x_ptr, row, mask, stride_x, 0, d, BLOCK_D, ROUND)
    store_rows(ordered_ptr, i, x, mask, d, BLOCK_D)
    tl.store(ordered_targets_ptr + i, tl.load(targets_ptr + row, mask=mask), mask=mask)
    tl.store(ordered_positive_ptr + i, tl.load(positive_ptr + row, mask=mask), mask=mask)
    loss = packed_value(tl.load(packed_ptr + row, mask=mask, other=0))
    tl.store(losses_ptr + i, loss, mask=mask)
    if OWN:
        scale = tl.load(grad_ptr + row, mask=mask, other=0.0).to(tl.float32)
        tl.store(scales_ptr + i, scale, mask=mask)


@triton.jit
def _grad_places_kernel(
    x_ptr, targets_ptr, positive_ptr, losses_ptr, scales_ptr,  # of `Ordered`
    y_ptr, bucket_items_ptr, offsets_ptr,
    out_ptr,  # [·, size_y, d], from the first bucket on
    first, size_y, d, stride_y,
    OWN: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr, ROUND: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(size_y, BLOCK_Y)
    bucket = (first + tl.program_id(0) // tiles).to(tl.int64)
    i_y = tl.program_id(0) % tiles * BLOCK_Y + tl.arange(0, BLOCK_Y)
    in_y = i_y < size_y
    item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
    y = load_rows(y_ptr, item, in_y, stride_y, 0, d, SLICE, ROUND)
    last = tl.load(offsets_ptr + bucket + 1)
    grad = tl.zeros((BLOCK_Y, BLOCK_D), tl.float32)
    for start in range(tl.load(offsets_ptr + bucket), last, BLOCK_X):
        i_x = start + tl.arange(0, BLOCK_X)
        in_x = i_x < last
        target = tl.load(targets_ptr + i_x, mask=in_x, other=0)
        positive = tl.load(positive_ptr + i_x, mask=in_x, other=0.0)
        loss = tl.load(losses_ptr + i_x, mask=in_x, other=float("inf"))  # of weight 0
        x = load_rows(x_ptr, i_x, in_x, d, 0, d, BLOCK_D, ROUND)
        logits = product_of_rows(
            y, x, y_ptr, item, in_y, stride_y, x_ptr, i_x, in_x, d, d,
            BLOCK_D, SLICE, ROUND, ROUND, PRECISION,
        )  # fmt: skip
        logits = tl.where(item[:, None] != target[None, :], logits, float("-inf"))
        weights = exponential(logits - positive[None, :], loss[None, :])
        if OWN:
            scale = tl.load(scales_ptr + i_x, mask=in_x, other=0.0)
            weights *= scale[None, :]  # which may be of any size
            grad = tl.dot(weights, x.to(tl.float32), grad, input_precision="tf32x3")
        else:
            grad = add_weighted(grad, weights, x, ROUND, SPLIT, PRECISION)
    if not OWN:
        grad = added(grad, ROUND)
    store_rows(out_ptr, (bucket - first) * size_y + i_y, grad, in_y, d, BLOCK_D)
