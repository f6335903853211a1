"""Cross-entropy inside given buckets, fused: logits exist only as tiles on the chip.

The forward kernel keeps one number for each row of each bucket. The backward kernels compute the
tiles again where a bucket won a state, write each state's gradient once, and leave the catalogue's
as one row for each place in a bucket, to be added up by item in the order of a stable sort: no
atomics, the same bits in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.buckets import Buckets


def bucketed_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]; negative: the state does not count
    buckets: Buckets,
) -> tuple[Tensor, Tensor]:
    """Return each state's largest loss over its buckets [n], and which states were placed [n].

    The same function as in `sce.losses.bucketed`, for float32, float16 and bfloat16, except that
    states with a negative target may be among the states and the buckets: they are not placed.
    """
    losses, winners = _BucketedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, catalogue, targets, buckets.states, buckets.items
    )
    return losses, winners >= 0


class _BucketedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        bucket_states: Tensor,
        bucket_items: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, y = _rows(states), _rows(catalogue)
        bucket_states, bucket_items = bucket_states.contiguous(), bucket_items.contiguous()
        (n_buckets, size_x), size_y = bucket_states.shape, bucket_items.shape[1]
        own = torch.empty(len(x), device=x.device, dtype=torch.float32)
        sums = torch.empty(n_buckets, size_x, device=x.device, dtype=torch.float32)
        tile = _Tile.of(x, y)
        if n_buckets and size_x:
            _log_sums_kernel[(n_buckets, triton.cdiv(size_x, tile.x))](
                x, y, targets, bucket_states, bucket_items, own, sums,
                size_x, size_y, x.shape[1], x.stride(0), y.stride(0),
                BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tile.d, PRECISION=tile.precision,
                num_warps=4, num_stages=2,
            )  # fmt: skip
        largest, winners = _winners(sums, bucket_states, len(x))
        losses = torch.where(winners >= 0, largest - own, 0.0)
        ctx.save_for_backward(
            states, catalogue, targets, bucket_states, bucket_items, own, largest, winners
        )
        ctx.mark_non_differentiable(winners)
        return losses, winners

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        states, catalogue, targets, bucket_states, bucket_items, *numbers = ctx.saved_tensors
        own, largest, winners = numbers
        x, y = _rows(states), _rows(catalogue)
        (n_buckets, size_x), size_y = bucket_states.shape, bucket_items.shape[1]
        d = x.shape[1]
        scale = torch.where(winners >= 0, grad_losses.float(), 0.0)
        # The gradient flows through the bucket that won a state, and no other.
        number = torch.arange(n_buckets, device=x.device).unsqueeze(1)
        bucket_scale = torch.where(winners[bucket_states] == number, scale[bucket_states], 0.0)
        tile = _Tile.of(x, y)
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros(x.shape, device=x.device, dtype=states.dtype)
            if n_buckets and size_x:
                _grad_states_kernel[(n_buckets, triton.cdiv(size_x, tile.x))](
                    x, y, targets, bucket_states, bucket_items, own, largest, bucket_scale,
                    grad_x, size_x, size_y, d, x.stride(0), y.stride(0),
                    BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tile.d, PRECISION=tile.precision,
                    num_warps=4, num_stages=2,
                )  # fmt: skip
        if ctx.needs_input_grad[1]:
            grad_y = torch.zeros(y.shape, device=y.device, dtype=catalogue.dtype)
            parts = torch.empty(n_buckets * size_y, d, device=y.device, dtype=torch.float32)
            if n_buckets and size_x:
                _grad_items_kernel[(n_buckets, triton.cdiv(size_y, tile.y))](
                    x, y, targets, bucket_states, bucket_items, largest, bucket_scale, parts,
                    size_x, size_y, d, x.stride(0), y.stride(0),
                    BLOCK_X=tile.x, BLOCK_Y=tile.y, BLOCK_D=tile.d, PRECISION=tile.precision,
                    num_warps=4, num_stages=2,
                )  # fmt: skip
                own_items = torch.where(winners >= 0, targets, len(y))
                items, order = torch.cat([bucket_items.flatten(), own_items]).sort(stable=True)
                _add_by_item_kernel[(len(items),)](
                    items, order, parts, x, own, largest, scale, grad_y,
                    len(items), len(parts), len(y), d, x.stride(0),
                    BLOCK=8, BLOCK_D=triton.next_power_of_2(d), num_warps=1,
                )  # fmt: skip
        return grad_x, grad_y, None, None, None


class _Tile:
    """How large the tiles on the chip are, for a width and a precision."""

    def __init__(self, x: int, y: int, d: int, precision: str) -> None:
        self.x, self.y, self.d, self.precision = x, y, d, precision

    @classmethod
    def of(cls, states: Tensor, catalogue: Tensor) -> "_Tile":
        d = max(16, triton.next_power_of_2(states.shape[1]))
        side = 64 if d <= 128 else 32 if d <= 256 else 16
        same_half = states.dtype == catalogue.dtype != torch.float32
        return cls(side, side, d, "ieee" if same_half else "tf32x3")


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _winners(sums: Tensor, bucket_states: Tensor, n_states: int) -> tuple[Tensor, Tensor]:
    """Return each state's largest sum, and the lowest bucket that has it (-1: in no bucket)."""
    n_buckets = len(bucket_states)
    flat = bucket_states.flatten()
    largest = sums.new_full((n_states,), -torch.inf)
    largest.scatter_reduce_(0, flat, sums.flatten(), reduce="amax")
    number = torch.arange(n_buckets, device=sums.device).unsqueeze(1)
    wins = (sums >= largest[bucket_states]) & (sums > -torch.inf) | sums.isnan()
    lowest = torch.full((n_states,), n_buckets, device=sums.device)
    lowest.scatter_reduce_(0, flat, torch.where(wins, number, n_buckets).flatten(), reduce="amin")
    return largest, torch.where(lowest == n_buckets, -1, lowest)


@triton.jit
def _load_rows(ptr, rows, there, stride, d, BLOCK_D: tl.constexpr):
    i_d = tl.arange(0, BLOCK_D)
    return tl.load(
        ptr + rows[:, None] * stride + i_d[None, :],
        mask=there[:, None] & (i_d < d)[None, :],
        other=0.0,
    )


@triton.jit
def _logits(x, y, PRECISION: tl.constexpr):
    if x.dtype != y.dtype:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def _weights(logits, total, scale, item, target, in_y):
    """Return the gradient of the logits; zero at a row's own target and where a bucket lost."""
    other = in_y[None, :] & (item[None, :] != target[:, None])
    counts = other & (scale != 0)[:, None]
    return tl.where(counts, tl.exp(logits - total[:, None]) * scale[:, None], 0.0)


@triton.jit
def _log_sums_kernel(
    x_ptr,
    y_ptr,
    targets_ptr,
    bucket_states_ptr,
    bucket_items_ptr,
    own_ptr,
    sums_ptr,
    size_x,
    size_y,
    d,
    stride_x,
    stride_y,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    bucket = tl.program_id(0).to(tl.int64)
    i_x = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    in_x = i_x < size_x
    row = tl.load(bucket_states_ptr + bucket * size_x + i_x, mask=in_x, other=0)
    target = tl.load(targets_ptr + row, mask=in_x, other=-1)
    counts = in_x & (target >= 0)
    x = _load_rows(x_ptr, row, counts, stride_x, d, BLOCK_D)
    own_y = _load_rows(y_ptr, target, counts, stride_y, d, BLOCK_D)
    own = tl.sum(x.to(tl.float32) * own_y.to(tl.float32), axis=1)
    largest = own  # the own target is always there; the other items come on top
    total = tl.full((BLOCK_X,), 1.0, tl.float32)
    for start in range(0, size_y, BLOCK_Y):
        i_y = start + tl.arange(0, BLOCK_Y)
        in_y = i_y < size_y
        item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
        y = _load_rows(y_ptr, item, in_y, stride_y, d, BLOCK_D)
        logits = _logits(x, y, PRECISION)
        other = in_y[None, :] & (item[None, :] != target[:, None])
        logits = tl.where(other, logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, axis=1))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(logits - now[:, None]), axis=1)
        largest = now
    sums = tl.where(counts, largest + tl.log(total), float("-inf"))
    tl.store(sums_ptr + bucket * size_x + i_x, sums, mask=in_x)
    # Several buckets write the same number to the same place: a state's own logit is one.
    tl.store(own_ptr + row, own, mask=counts)


@triton.jit
def _grad_states_kernel(
    x_ptr,
    y_ptr,
    targets_ptr,
    bucket_states_ptr,
    bucket_items_ptr,
    own_ptr,
    largest_ptr,
    scale_ptr,
    grad_x_ptr,
    size_x,
    size_y,
    d,
    stride_x,
    stride_y,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    bucket = tl.program_id(0).to(tl.int64)
    i_x = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    in_x = i_x < size_x
    scale = tl.load(scale_ptr + bucket * size_x + i_x, mask=in_x, other=0.0)
    if tl.max(tl.abs(scale), axis=0) > 0:
        row = tl.load(bucket_states_ptr + bucket * size_x + i_x, mask=in_x, other=0)
        target = tl.load(targets_ptr + row)
        total = tl.load(largest_ptr + row)
        own = tl.load(own_ptr + row)
        x = _load_rows(x_ptr, row, in_x, stride_x, d, BLOCK_D)
        own_y = _load_rows(y_ptr, target, target >= 0, stride_y, d, BLOCK_D)
        grad = ((tl.exp(own - total) - 1.0) * scale)[:, None] * own_y.to(tl.float32)
        for start in range(0, size_y, BLOCK_Y):
            i_y = start + tl.arange(0, BLOCK_Y)
            in_y = i_y < size_y
            item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
            y = _load_rows(y_ptr, item, in_y, stride_y, d, BLOCK_D)
            logits = _logits(x, y, PRECISION)
            weights = _weights(logits, total, scale, item, target, in_y)
            grad += tl.dot(weights, y.to(tl.float32), input_precision="tf32x3")
        i_d = tl.arange(0, BLOCK_D)
        tl.store(
            grad_x_ptr + row[:, None] * d + i_d[None, :],
            grad.to(grad_x_ptr.dtype.element_ty),
            mask=(scale != 0)[:, None] & (i_d < d)[None, :],
        )


@triton.jit
def _grad_items_kernel(
    x_ptr,
    y_ptr,
    targets_ptr,
    bucket_states_ptr,
    bucket_items_ptr,
    largest_ptr,
    scale_ptr,
    parts_ptr,
    size_x,
    size_y,
    d,
    stride_x,
    stride_y,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    bucket = tl.program_id(0).to(tl.int64)
    i_y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    in_y = i_y < size_y
    item = tl.load(bucket_items_ptr + bucket * size_y + i_y, mask=in_y, other=-1)
    y = _load_rows(y_ptr, item, in_y, stride_y, d, BLOCK_D)
    grad = tl.zeros((BLOCK_Y, BLOCK_D), tl.float32)
    for start in range(0, size_x, BLOCK_X):
        i_x = start + tl.arange(0, BLOCK_X)
        in_x = i_x < size_x
        scale = tl.load(scale_ptr + bucket * size_x + i_x, mask=in_x, other=0.0)
        if tl.max(tl.abs(scale), axis=0) > 0:
            row = tl.load(bucket_states_ptr + bucket * size_x + i_x, mask=in_x, other=0)
            target = tl.load(targets_ptr + row)
            total = tl.load(largest_ptr + row)
            x = _load_rows(x_ptr, row, in_x, stride_x, d, BLOCK_D)
            logits = _logits(x, y, PRECISION)
            weights = _weights(logits, total, scale, item, target, in_y)
            grad += tl.dot(tl.trans(weights), x.to(tl.float32), input_precision="tf32x3")
    i_d = tl.arange(0, BLOCK_D)
    tl.store(
        parts_ptr + (bucket * size_y + i_y)[:, None] * d + i_d[None, :],
        grad,
        mask=in_y[:, None] & (i_d < d)[None, :],
    )


@triton.jit
def _add_by_item_kernel(
    items_ptr,  # [n] ascending
    order_ptr,  # [n] where each came from: a row of the parts, or a state with this target
    parts_ptr,
    x_ptr,
    own_ptr,
    largest_ptr,
    scale_ptr,
    grad_y_ptr,
    n,
    n_parts,
    n_items,
    d,
    stride_x,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0)
    item = tl.load(items_ptr + first)
    before = tl.load(items_ptr + first - 1, mask=first > 0, other=-1)
    # The first place of an item adds up all of them; what belongs to no item sorts behind the last.
    if (item != before) & (item < n_items):
        i_d = tl.arange(0, BLOCK_D)
        in_d = (i_d < d)[None, :]
        grad = tl.zeros((BLOCK_D,), tl.float32)
        at = first
        more = 1
        while more > 0:
            i = at + tl.arange(0, BLOCK)
            same = tl.load(items_ptr + i, mask=i < n, other=-1) == item
            source = tl.load(order_ptr + i, mask=same, other=0)
            is_part = source < n_parts
            part = tl.load(
                parts_ptr + source[:, None] * d + i_d[None, :],
                mask=(same & is_part)[:, None] & in_d,
                other=0.0,
            )
            from_own = same & (source >= n_parts)
            state = source - n_parts
            own = tl.load(own_ptr + state, mask=from_own, other=0.0)
            total = tl.load(largest_ptr + state, mask=from_own, other=0.0)
            scale = tl.load(scale_ptr + state, mask=from_own, other=0.0)
            x = tl.load(
                x_ptr + state[:, None] * stride_x + i_d[None, :],
                mask=from_own[:, None] & in_d,
                other=0.0,
            )
            weight = (tl.exp(own - total) - 1.0) * scale
            grad += tl.sum(part + weight[:, None] * x.to(tl.float32), axis=0)
            at += BLOCK
            more = tl.sum(same.to(tl.int32), axis=0) // BLOCK  # 1 while the whole block was ours
        tl.store(grad_y_ptr + item * d + i_d, grad.to(grad_y_ptr.dtype.element_ty), mask=i_d < d)
