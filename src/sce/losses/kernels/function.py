"""The kernels as one function that autograd knows."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.buckets import Buckets
from sce.losses.inputs import apply
from sce.losses.kernels import backward, bucketed
from sce.losses.kernels.catalogue import grad_catalogue
from sce.losses.kernels.centres import prepare
from sce.losses.kernels.selection import top_rows


@dataclass(frozen=True)
class FusedOptions:
    """The settings of a call."""

    n_buckets: int  # as many as centres, where they are given
    bucket_size_x: int
    bucket_size_y: int
    mix: bool = True
    mix_of: int = 0
    noise: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    sparse_grad: bool = False
    rounding: torch.dtype | None = None  # of float32 inputs in matrix products


class Fused(NamedTuple):
    """What a call gives."""

    loss: Tensor  # scalar, or [n] when not reduced
    buckets: Buckets
    wanted: Tensor  # [n] the target of each state; -1: ignored
    winner: Tensor  # [n] `NOWHERE` for states that are in no bucket


class Computed(NamedTuple):
    """What the forward pass computes: no two of these share memory."""

    loss: Tensor  # scalar, or [n] when not reduced
    bucket_states: Tensor  # [n_buckets, size_x]
    wanted: Tensor  # [n]
    packed: Tensor  # [n]
    keys: Tensor  # [n_buckets * size_y + n], of which the first part are the buckets' items
    own: Tensor  # [n]
    won: Tensor  # [n_buckets, size_x]
    counts: Tensor  # [n_buckets + 1]

    def fused(self) -> Fused:
        """Return what a caller wants of it."""
        buckets = Buckets(self.bucket_states, _items(self.keys, self.won, self.wanted))
        return Fused(self.loss, buckets, self.wanted, self.packed)


def fused_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    options: FusedOptions,
    *,
    centres: Tensor | None = None,  # [n_buckets, d]; None: drawn
    seed: Tensor | None = None,  # [1] what they are drawn from
) -> Fused:
    """Return the loss and the buckets, as an `autograd.Function`: the cheapest to launch."""
    found = apply(_FusedCrossEntropy, states, catalogue, targets, centres, seed, options)
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
    n_buckets, size_y = options.n_buckets, min(options.bucket_size_y, len(y))
    with _device_of(x):
        prepared = prepare(
            x,
            targets.contiguous(),
            centres if centres is None else centres.contiguous(),
            seed,
            n_items=len(y),
            n_buckets=n_buckets,
            size_y=size_y,
            mix=options.mix,
            mix_of=options.mix_of,
            noise=options.noise,
            dtype=options.rounding or y.dtype,
            ignore_index=options.ignore_index,
            rounding=options.rounding,
        )
        bucket_items = prepared.keys[: n_buckets * size_y].view(n_buckets, size_y)
        centres, rounding = prepared.centres, options.rounding
        bucket_states = top_rows(
            centres, x, options.bucket_size_x, wanted=prepared.wanted, rounding=rounding
        )
        top_rows(centres, y, size_y, out=bucket_items, rounding=rounding)
        loss, own, won, counts = bucketed.forward(
            x, y, prepared, bucket_states, bucket_items, options.reduction, rounding
        )
    return Computed(
        prepared.losses if options.reduction == "none" else loss,
        bucket_states,
        prepared.wanted,
        prepared.packed,
        prepared.keys,
        own,
        won,
        counts,
    )


def differentiate_states(
    grad: Tensor, saved: tuple[Tensor, ...], reduction: str, rounding: torch.dtype | None
) -> Tensor:
    """Return the gradient of the states, from that of the loss and from `to_save`."""
    with _device_of(grad):
        return backward.grad_states(_saved(*saved, rounding), grad.contiguous(), reduction)


def differentiate_catalogue(
    grad: Tensor,
    saved: tuple[Tensor, ...],
    reduction: str,
    rounding: torch.dtype | None,
    *,
    sparse: bool = False,
) -> Tensor:
    """Return the gradient of the catalogue, from that of the loss and from `to_save`."""
    with _device_of(grad):
        return grad_catalogue(_saved(*saved, rounding), grad.contiguous(), reduction, sparse=sparse)


def to_save(states: Tensor, catalogue: Tensor, computed: Computed) -> tuple[Tensor, ...]:
    """Return what the backward pass needs."""
    return states, catalogue, *computed[2:]


def _saved(
    states: Tensor,
    catalogue: Tensor,
    wanted: Tensor,
    packed: Tensor,
    keys: Tensor,
    own: Tensor,
    won: Tensor,
    counts: Tensor,
    rounding: torch.dtype | None,
) -> backward.Saved:
    return backward.Saved(
        _rows(states), _rows(catalogue), wanted, packed, keys, _items(keys, won, wanted),
        own, won, counts, rounding,
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
    ) -> Computed:
        computed = compute(states, catalogue, targets, centres, seed, options)
        ctx.options = options
        ctx.save_for_backward(*to_save(states, catalogue, computed))
        ctx.mark_non_differentiable(*computed[1:])
        ctx.set_materialize_grads(False)
        return computed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        grad_x = grad_y = None
        if grad is not None:
            options: FusedOptions = ctx.options
            saved = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                grad_x = differentiate_states(grad, saved, options.reduction, options.rounding)
            if ctx.needs_input_grad[1]:
                grad_y = differentiate_catalogue(
                    grad, saved, options.reduction, options.rounding, sparse=options.sparse_grad
                )
        return grad_x, grad_y, None, None, None, None


def _items(keys: Tensor, won: Tensor, wanted: Tensor) -> Tensor:
    """Return the items of the buckets, [n_buckets, size_y]: the first part of the keys."""
    n_buckets, n_places = won.shape[0], keys.shape[0] - wanted.shape[0]
    return keys[:n_places].view(n_buckets, n_places // n_buckets)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Launch kernels where a tensor is, which need not be the current GPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
