"""Cross-entropy over the whole catalogue, fused: logits exist only as tiles on the chip.

The forward pass has the states' gradients as well: the mean of all other items, weighted by their
probabilities, takes one more product of the tile at hand. So logits are computed twice in all, once
more for the gradient of the catalogue, whose rows are written once each. There are no atomics.

The target is kept apart from the others: where it is nearly certain, what they have together is
lost beside it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.full import count_shares
from sce.losses.inputs import apply, once
from sce.losses.inputs import rounded as round_rows
from sce.losses.kernels.function import on_device_of, rows_of
from sce.losses.kernels.launch import ceil_div, launch
from sce.losses.kernels.precision import (
    add_weighted,
    added,
    exponential,
    half_name,
    load_rows,
    product,
    store_rows,
)
from sce.losses.kernels.tiles import block, full_tiles


def fused_full_cross_entropy(
    states: Tensor, catalogue: Tensor, targets: Tensor, half: torch.dtype
) -> Tensor:
    """Return the loss of each state [v], from inputs in half precision, or rounded to it."""
    losses: Tensor = apply(_FusedFullCrossEntropy, states, catalogue, targets, half)
    return losses


class _FusedFullCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [v, d]
        catalogue: Tensor,  # [items, d]
        targets: Tensor,  # [v]
        half: torch.dtype,
    ) -> Tensor:
        x, y, targets = rows_of(round_rows(states, half)), rows_of(catalogue), targets.int()
        (n, d), needed, tile = x.shape, ctx.needs_input_grad[0], full_tiles(states, y)[0]
        shares = count_shares(n, len(y))
        largest = x.new_empty((shares, n), dtype=torch.float32)
        totals = torch.empty_like(largest)
        positives = x.new_empty(n, dtype=torch.float32)
        sums = x.new_empty((shares, n, d) if needed else 1, dtype=torch.float32)
        with on_device_of(x):
            launch(
                _forward_kernel, (ceil_div(n, tile.x), shares),
                x, y, targets, positives, largest, totals, sums, n, len(y),
                ceil_div(len(y), shares * tile.y) * tile.y, d, x.stride(0), y.stride(0),
                BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=block(d), ROUND=half_name(half),
                SPLIT=states.dtype == torch.float32, GRADIENT=needed,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        above = largest - positives
        most = above.amax(dim=0)
        others = most + (totals * (above - most).exp()).sum(dim=0).log()
        losses = torch.logaddexp(others, torch.zeros_like(others))
        own, grad_x = torch.expm1(-losses), None  # the probability of the target, less one
        if needed:
            grad_x = round_rows(y[targets], half).float().mul_(own.unsqueeze(1))
            for share, weights in zip(sums, (above - losses).exp_(), strict=True):
                grad_x.addcmul_(share, weights.unsqueeze(1))
        # The log-sum-exp of large logits is rounded: the scale of the weights makes up for it.
        whole = positives + losses
        excess = (whole - positives - losses).exp_()
        ctx.half, ctx.dtype = half, states.dtype
        ctx.save_for_backward(x, catalogue, targets, whole, own.div_(excess), excess, grad_x)
        return losses

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        x, catalogue, targets, whole, own, excess, grad_x = ctx.saved_tensors
        grad_y = None
        if ctx.needs_input_grad[1]:
            y, (n, d), tile = rows_of(catalogue), x.shape, full_tiles(x, catalogue)[1]
            grad_y = torch.empty_like(y, memory_format=torch.contiguous_format)
            # Weights of at most one, as half precision likes them.
            most = grad_losses.abs().amax()
            scale = grad_losses / most.where(most != 0, 1) * excess
            with on_device_of(x):
                launch(
                    _catalogue_kernel, (ceil_div(len(y), tile.x),),
                    x, y, targets, whole, own, scale, most, grad_y, n, len(y), d,
                    x.stride(0), y.stride(0), BLOCK_X=tile.y, BLOCK_Y=tile.x, BLOCK_D=block(d),
                    ROUND=half_name(ctx.half), SPLIT=y.dtype == torch.float32,
                    num_warps=tile.warps, num_stages=tile.stages,
                )  # fmt: skip
        if grad_x is not None:
            grad_x = (grad_x * grad_losses.unsqueeze(1)).to(ctx.dtype)
        return grad_x, grad_y, None, None


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, targets_ptr,
    positives_ptr,  # [n]
    largest_ptr,  # [shares, n]
    totals_ptr,  # [shares, n]
    sums_ptr,  # [shares, n, d]
    n, n_items, share_size, d, stride_x, stride_y,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
    SPLIT: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    in_x = row < n
    x = load_rows(x_ptr, row, in_x, stride_x, 0, d, BLOCK_D, ROUND)
    target = tl.load(targets_ptr + row, mask=in_x, other=0)
    if share == 0:
        positive_y = load_rows(y_ptr, target, in_x, stride_y, 0, d, BLOCK_D, ROUND)
        positive = tl.sum(x.to(tl.float32) * positive_y.to(tl.float32), axis=1)
        tl.store(positives_ptr + row, positive, mask=in_x)
    # Not -inf, whose difference from itself is none.
    largest = tl.full((BLOCK_X,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK_X,), tl.float32)
    sums = tl.zeros((BLOCK_X, BLOCK_D), tl.float32)
    last = tl.minimum((share + 1) * share_size, n_items)
    for start in range(share * share_size, last, BLOCK_Y):
        item = start + tl.arange(0, BLOCK_Y)
        y = load_rows(y_ptr, item, item < last, stride_y, 0, d, BLOCK_D, ROUND)
        logits = product(x, y, "ieee")
        other = (item < last)[None, :] & (item[None, :] != target[:, None])
        logits = tl.where(other, logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, axis=1))
        weights = exponential(logits - now[:, None])
        less = exponential(largest - now)
        total = total * less + tl.sum(weights, axis=1)
        if GRADIENT:
            sums = add_weighted(sums * less[:, None], weights, y, ROUND, SPLIT, "ieee")
        largest = now
    place = share.to(tl.int64) * n + row
    tl.store(largest_ptr + place, largest, mask=in_x)
    tl.store(totals_ptr + place, total, mask=in_x)
    if GRADIENT:
        store_rows(sums_ptr, place, added(sums, ROUND), in_x, d, BLOCK_D)


@triton.jit
def _catalogue_kernel(
    x_ptr, y_ptr, targets_ptr,
    whole_ptr,  # [n]: the log-sum-exp of all logits
    own_ptr,  # [n]: in place of the weight of the target
    scale_ptr,  # [n]
    most_ptr,
    grad_ptr,  # [n_items, d]
    n, n_items, d, stride_x, stride_y,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    in_y = item < n_items
    y = load_rows(y_ptr, item, in_y, stride_y, 0, d, BLOCK_D, ROUND)
    sums = tl.zeros((BLOCK_Y, BLOCK_D), tl.float32)
    for start in range(0, n, BLOCK_X):
        row = start + tl.arange(0, BLOCK_X)
        in_x = row < n
        x = load_rows(x_ptr, row, in_x, stride_x, 0, d, BLOCK_D, ROUND)
        target = tl.load(targets_ptr + row, mask=in_x, other=-1)
        whole = tl.load(whole_ptr + row, mask=in_x, other=0.0)
        scale = tl.load(scale_ptr + row, mask=in_x, other=0.0)
        logits = product(y, x, "ieee")
        weights = exponential(logits - whole[None, :])
        own = tl.load(own_ptr + row, mask=in_x, other=0.0)
        weights = tl.where(item[:, None] == target[None, :], own[None, :], weights)
        sums = add_weighted(sums, weights * scale[None, :], x, ROUND, SPLIT, "ieee")
    sums = added(sums, ROUND) * tl.load(most_ptr)
    store_rows(grad_ptr, item, sums, in_y, d, BLOCK_D)
