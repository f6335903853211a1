"""The kernels as one function that autograd knows: fill the buckets, then compute in them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.buckets import Buckets, Centres
from sce.losses.inputs import apply
from sce.losses.kernels import bucketed
from sce.losses.kernels.backward import Saved, bucket_items, grad_states
from sce.losses.kernels.catalogue import grad_catalogue
from sce.losses.kernels.centres import Prepared, prepare
from sce.losses.kernels.selection import top_rows


class FusedOptions(NamedTuple):
    """The settings of a call, in the order of the operator's schema."""

    sizes: list[int]  # n_buckets, bucket_size_x, bucket_size_y
    centres: Centres = "random"  # where they are not given
    ignore_index: int = -100
    reduction: str = "mean"
    autocast_dtype: torch.dtype | None = None  # of float32 inputs in matrix products


class Fused(NamedTuple):
    """The result of a call."""

    loss: Tensor  # scalar, or [n] when not reduced
    buckets: Buckets
    targets: Tensor  # [n]; -1: ignored


class Computed(NamedTuple):
    """The results of the forward pass: no two of these share memory."""

    loss: Tensor  # scalar, or [n] when not reduced
    bucket_states: Tensor  # [n_buckets, size_x]
    targets: Tensor  # [n]; -1: ignored
    packed: Tensor  # [n]
    keys: Tensor  # [n_buckets * size_y + n], of which the first part are the buckets' items
    positive_logits: Tensor  # [n]
    won: Tensor  # [n_buckets, size_x]
    counts: Tensor  # [n_buckets + 1]

    def fused(self) -> Fused:
        """Return the part of it that a caller sees."""
        items = bucket_items(self.keys, len(self.won), self.targets)
        return Fused(self.loss, Buckets(self.bucket_states, items), self.targets)


def fused_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    options: FusedOptions,
    *,
    centres: Tensor | None = None,  # [n_buckets, d]; None: drawn
    seed: Tensor | None = None,  # [1], of the drawn ones
    sparse_grad: bool = False,
) -> Fused:
    """Return the loss and the buckets, by an `autograd.Function`: the cheapest to launch."""
    found = apply(
        _FusedCrossEntropy, states, catalogue, targets, centres, seed, options, sparse_grad
    )
    return Computed(*found).fused()


def compute(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    centres: Tensor | None,
    seed: Tensor | None,
    options: FusedOptions,
) -> Computed:
    """Run the forward pass."""
    x, y = _rows(states), _rows(catalogue)
    n_buckets, _, size_y = options.sizes
    with _device_of(x):
        prepared = prepare(
            x,
            targets.contiguous(),
            centres if centres is None else centres.contiguous(),
            seed,
            n_items=len(y),
            n_buckets=n_buckets,
            size_y=min(size_y, len(y)),
            kind=options.centres,
            dtype=options.autocast_dtype or y.dtype,
            ignore_index=options.ignore_index,
            autocast_dtype=options.autocast_dtype,
        )
        buckets = fill_buckets(x, y, prepared, options)
        loss, positive_logits, won, counts = bucketed.forward(
            x, y, prepared, buckets, options.reduction, options.autocast_dtype
        )
    return Computed(
        prepared.losses if options.reduction == "none" else loss,
        buckets.states,
        prepared.targets,
        prepared.packed,
        prepared.keys,
        positive_logits,
        won,
        counts,
    )


def fill_buckets(x: Tensor, y: Tensor, prepared: Prepared, options: FusedOptions) -> Buckets:
    """Give each bucket the best states and items for its centre; items are written to the keys."""
    n_buckets, size_x, _ = options.sizes
    centres, dtype = prepared.centres, options.autocast_dtype
    items = bucket_items(prepared.keys, n_buckets, prepared.targets)
    states = top_rows(centres, x, size_x, targets=prepared.targets, autocast_dtype=dtype)
    top_rows(centres, y, items.shape[1], out=items, autocast_dtype=dtype)
    return Buckets(states, items)


def differentiate_states(
    grad: Tensor, saved: tuple[Tensor, ...], reduction: str, autocast_dtype: torch.dtype | None
) -> Tensor:
    """Return the gradient of the states, from that of the loss and from `to_save`."""
    with _device_of(grad):
        return grad_states(_saved(saved, autocast_dtype), grad.contiguous(), reduction)


def differentiate_catalogue(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    reduction: str,
    autocast_dtype: torch.dtype | None,
    *,
    sparse: bool = False,
) -> Tensor:
    """Return the gradient of the catalogue, from that of the loss and from `to_save`."""
    with _device_of(grad):
        known = _saved(saved, autocast_dtype)
        return grad_catalogue(known, grad.contiguous(), reduction, sparse=sparse)


def to_save(states: Tensor, catalogue: Tensor, computed: Computed) -> tuple[Tensor, ...]:
    """Return the tensors that the backward pass needs."""
    return states, catalogue, *computed[2:]


def _saved(saved: tuple[Tensor, ...], autocast_dtype: torch.dtype | None) -> Saved:
    states, catalogue, targets, packed, keys, positive_logits, won, counts = saved
    return Saved(
        _rows(states), _rows(catalogue), targets, packed, keys, positive_logits, won, counts,
        autocast_dtype,
    )  # fmt: skip


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
    ) -> Computed:
        computed = compute(states, catalogue, targets, centres, seed, options)
        ctx.options, ctx.sparse_grad = options, sparse_grad
        ctx.save_for_backward(*to_save(states, catalogue, computed))
        ctx.mark_non_differentiable(*computed[1:])
        ctx.set_materialize_grads(False)
        return computed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        grad_x = grad_y = None
        if grad is not None:
            *_, reduction, dtype = ctx.options
            saved = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                grad_x = differentiate_states(grad, saved, reduction, dtype)
            if ctx.needs_input_grad[1]:
                grad_y = differentiate_catalogue(
                    grad, saved, reduction, dtype, sparse=ctx.sparse_grad
                )
        return grad_x, grad_y, *[None] * 5


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Launch kernels on the tensor's device, which need not be the current GPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
