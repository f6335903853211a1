"""The kernels as one function that autograd knows: fill the buckets, then compute in them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sce.losses.buckets import Buckets, Centres, Members, group_by_bucket, of_equal_size
from sce.losses.inputs import apply, once
from sce.losses.kernels import bucketed
from sce.losses.kernels.backward import Saved, bucket_items, grad_states
from sce.losses.kernels.catalogue import grad_catalogue
from sce.losses.kernels.centres import prepare
from sce.losses.kernels.members import nearest_buckets
from sce.losses.kernels.selection import top_rows


class FusedOptions(NamedTuple):
    """The settings of a call, in the order of the operator's schema."""

    sizes: list[int]  # n_buckets, bucket_size_x (0: each state in its nearest), bucket_size_y
    centres: Centres = "random"  # where they are not given
    ignore_index: int = -100
    with_grads: bool = True  # finds the states' in the forward pass, if each is in one bucket
    reduction: str = "mean"
    autocast_dtype: torch.dtype | None = None  # of float32 inputs in matrix products


class Computed(NamedTuple):
    """The result of a call: no two of these tensors share memory."""

    loss: Tensor  # scalar, or [n] when not reduced
    bucket_states: Tensor  # [n_buckets, size_x]; size_x is 0 where states choose their bucket
    targets: Tensor  # [n]; -1: ignored
    packed: Tensor  # [n]
    keys: Tensor  # [n_buckets * size_y + n], of which the first part are the buckets' items
    positive_logits: Tensor  # [n]
    won: Tensor  # [n]: the states, by the bucket that won them
    offsets: Tensor  # [n_buckets + 1]: where those of each bucket begin
    n_won: Tensor  # [1]: states that any bucket won
    own_grads: Tensor  # [n, d] float32: each state's, of its own loss; [0, d]: not found yet


def buckets_of(found: Computed) -> Buckets:
    """Return the states and items of the buckets."""
    items = bucket_items(found.keys, len(found.bucket_states), found.targets)
    if found.bucket_states.shape[1]:
        return Buckets(of_equal_size(found.bucket_states), items)
    return Buckets(Members(found.won, found.offsets), items)


def fused_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    options: FusedOptions,
    centres: Tensor | None = None,  # [n_buckets, d]; None: drawn
    seed: Tensor | None = None,  # [1], of the drawn ones
    sparse_grad: bool = False,
    items: Tensor | None = None,  # [n_buckets, size_y]; None: those nearest to the centres
) -> Computed:
    """Return the loss and the buckets, by an `autograd.Function`: the cheapest to launch."""
    given = (states, catalogue, targets, centres, seed, options, sparse_grad, items)
    return Computed(*apply(_FusedCrossEntropy, *given))


def compute(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    centres: Tensor | None,
    seed: Tensor | None,
    options: FusedOptions,
    given_items: Tensor | None = None,
) -> Computed:
    """Run the forward pass."""
    x, y = rows_of(states), rows_of(catalogue)
    (n_buckets, size_x, size_y), dtype = options.sizes, options.autocast_dtype
    with on_device_of(x):
        prepared = prepare(
            x,
            targets.contiguous(),
            centres if centres is None else centres.contiguous(),
            seed,
            n_items=len(y),
            n_buckets=n_buckets,
            size_y=min(size_y, len(y)),
            kind=options.centres,
            dtype=dtype or y.dtype,
            ignore_index=options.ignore_index,
            autocast_dtype=dtype,
        )
        # Items are written to the keys.
        items = bucket_items(prepared.keys, n_buckets, prepared.targets)
        if given_items is None:
            top_rows(prepared.centres, y, items.shape[1], out=items, autocast_dtype=dtype)
        else:
            items.copy_(given_items)
        if size_x:
            chosen = top_rows(
                prepared.centres, x, size_x, targets=prepared.targets, autocast_dtype=dtype
            )
            members = of_equal_size(chosen)
        else:
            chosen = items.new_empty(n_buckets, 0)
            nearest = nearest_buckets(x, prepared.centres, prepared.targets, dtype)
            members = group_by_bucket(nearest, n_buckets)
        found = len(x) if options.with_grads and not size_x else 0
        own_grads = torch.zeros(found, x.shape[1], device=x.device, dtype=torch.float32)
        loss, positive_logits, winners, count = bucketed.forward(
            x, y, prepared, members, items, own_grads, options.reduction, dtype
        )
        if size_x:
            members = group_by_bucket(winners, n_buckets)
    return Computed(
        prepared.losses if options.reduction == "none" else loss,
        chosen,
        prepared.targets,
        prepared.packed,
        prepared.keys,
        positive_logits,
        *members,
        count,
        own_grads,
    )


def differentiate(
    gradient: Callable[..., Tensor],
    grad: Tensor,
    saved: Sequence[Tensor],
    reduction: str,
    autocast_dtype: torch.dtype | None,
    **options: bool,
) -> Tensor:
    """Return the gradient of the states or of the catalogue, from that of the loss."""
    with on_device_of(grad):
        states, catalogue, *computed = saved
        targets, _, keys, _, _, offsets, *_ = computed
        items = bucket_items(keys, len(offsets) - 1, targets)
        known = Saved(rows_of(states), rows_of(catalogue), *computed, items, autocast_dtype)
        return gradient(known, grad.contiguous(), reduction, **options)


def save(ctx: Any, states: Tensor, catalogue: Tensor, computed: Computed) -> None:
    """Keep what `differentiate` needs."""
    ctx.save_for_backward(states, catalogue, *computed[2:])
    ctx.mark_non_differentiable(*computed[1:])
    ctx.set_materialize_grads(False)


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        centres: Tensor | None,
        seed: Tensor | None,
        options: FusedOptions,
        sparse_grad: bool,
        items: Tensor | None,
    ) -> Computed:
        computed = compute(states, catalogue, targets, centres, seed, options, items)
        ctx.options, ctx.sparse_grad = options, sparse_grad
        save(ctx, states, catalogue, computed)
        return computed

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        grad_x = grad_y = None
        if grad is not None:
            given = (grad, ctx.saved_tensors, *ctx.options[-2:])
            if ctx.needs_input_grad[1]:  # first: it takes memory for a while
                grad_y = differentiate(grad_catalogue, *given, sparse=ctx.sparse_grad)
            if ctx.needs_input_grad[0]:
                grad_x = differentiate(grad_states, *given)
        return grad_x, grad_y, *[None] * 6


def rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix whose rows are read in one go."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Launch kernels on the tensor's device, which need not be the current GPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
