"""The kernels as one function that autograd knows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.buckets import Buckets
from sce.losses.kernels import backward, bucketed
from sce.losses.kernels.catalogue import grad_catalogue
from sce.losses.kernels.centres import prepare
from sce.losses.kernels.selection import top_rows


@dataclass(frozen=True)
class FusedOptions:
    """The settings of a call."""

    n_buckets: int
    bucket_size_x: int
    bucket_size_y: int
    mix: bool = True
    ignore_index: int = -100
    reduction: str = "mean"
    sparse_grad: bool = False


def fused_cross_entropy(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    centres: Tensor | None,  # [n_buckets, d]; None: drawn
    options: FusedOptions,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Buckets, Tensor, Tensor]:
    """Return the loss, the buckets, the targets [n] (-1: ignored), and each state's winner [n].

    The last is `NOWHERE` for states that are in no bucket.
    """
    loss, bucket_states, bucket_items, wanted, packed = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, catalogue, targets, centres, options, generator
    )
    return loss, Buckets(bucket_states, bucket_items), wanted, packed


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        centres: Tensor | None,
        options: FusedOptions,
        generator: torch.Generator | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, y = _rows(states), _rows(catalogue)
        n_buckets = options.n_buckets if centres is None else len(centres)
        size_y = min(options.bucket_size_y, len(y))
        prepared = prepare(
            x,
            targets.contiguous(),
            centres if centres is None else centres.contiguous(),
            n_items=len(y),
            n_buckets=n_buckets,
            size_y=size_y,
            mix=options.mix,
            dtype=y.dtype,
            ignore_index=options.ignore_index,
            generator=generator,
        )
        bucket_states = top_rows(prepared.centres, x, options.bucket_size_x, wanted=prepared.wanted)
        bucket_items = prepared.keys[: n_buckets * size_y].view(n_buckets, size_y)
        top_rows(prepared.centres, y, size_y, out=bucket_items)
        loss, own, won, counts = bucketed.forward(
            x, y, prepared, bucket_states, bucket_items, options.reduction
        )
        ctx.options = options
        ctx.save_for_backward(
            states, catalogue, own, won, counts, prepared.wanted, prepared.packed, prepared.keys
        )
        ctx.mark_non_differentiable(bucket_states, bucket_items, prepared.wanted, prepared.packed)
        ctx.set_materialize_grads(False)
        found = prepared.losses if options.reduction == "none" else loss
        return found, bucket_states, bucket_items, prepared.wanted, prepared.packed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, *_: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if grad is None:
            return None, None, None, None, None, None
        states, catalogue, own, won, counts, wanted, packed, keys = ctx.saved_tensors
        options: FusedOptions = ctx.options
        x, y, grad = _rows(states), _rows(catalogue), grad.contiguous()
        size_y = (len(keys) - len(x)) // len(won)
        items = keys[: len(won) * size_y].view(len(won), size_y)
        saved = backward.Saved(x, y, wanted, packed, keys, items, own, won, counts)
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = backward.grad_states(saved, grad, options.reduction)
        if ctx.needs_input_grad[1]:
            grad_y = grad_catalogue(saved, grad, options.reduction, sparse=options.sparse_grad)
        return grad_x, grad_y, None, None, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
