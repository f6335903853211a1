"""The kernels as operations of torch's dispatcher, which torch.compile takes into its graph."""

from typing import Any

import torch
from torch import Tensor

from sce.losses.kernels import backward
from sce.losses.kernels import catalogue as catalogue_kernels
from sce.losses.kernels.function import Computed, FusedOptions, compute, differentiate, save


def fused_operator(
    states: Tensor,  # [n, d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [n]
    options: FusedOptions,
    centres: Tensor | None = None,  # [n_buckets, d]; None: drawn
    seed: Tensor | None = None,  # [1], of the drawn ones
) -> Computed:
    """Return the result of `fused_cross_entropy`; the catalogue's gradient is always dense."""
    return Computed(*scalable_cross_entropy(states, catalogue, targets, centres, seed, *options))


@torch.library.custom_op("sce::scalable_cross_entropy", mutates_args=())
def scalable_cross_entropy(
    states: Tensor,
    catalogue: Tensor,
    targets: Tensor,
    centres: Tensor | None,
    seed: Tensor | None,
    sizes: list[int],
    kind: str,
    ignore_index: int,
    with_grads: bool,
    reduction: str,
    autocast_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the forward pass. The result is a `Computed`: a schema knows only its parts."""
    options = FusedOptions(sizes, kind, ignore_index, with_grads, reduction, autocast_dtype)
    return compute(states, catalogue, targets, centres, seed, options)


@scalable_cross_entropy.register_fake
def _(states: Tensor, catalogue: Tensor, *others: Any) -> Computed:
    sizes, _, _, with_grads, reduction, _ = others[3:]
    n, (n_buckets, size_x, size_y) = states.shape[0], sizes
    size_x = torch.sym_min(size_x, n)
    size_y = torch.sym_min(size_y, catalogue.shape[0])

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return states.new_empty(shape, dtype=dtype)

    return Computed(
        loss=empty(*([n] if reduction == "none" else []), dtype=torch.float32),
        bucket_states=empty(n_buckets, size_x),
        targets=empty(n),
        packed=empty(n, dtype=torch.int64),
        keys=empty(n_buckets * size_y + n),
        positive_logits=empty(n, dtype=torch.float32),
        won=empty(n, dtype=torch.int64),
        offsets=empty(n_buckets + 1),
        n_won=empty(1),
        own_grads=empty(
            n if with_grads and not sizes[1] else 0, states.shape[1], dtype=torch.float32
        ),
    )


@torch.library.custom_op("sce::scalable_cross_entropy_grad_states", mutates_args=())
def grad_states(
    grad: Tensor, saved: list[Tensor], reduction: str, autocast_dtype: torch.dtype | None
) -> Tensor:
    """Return the gradient of the states."""
    return differentiate(backward.grad_states, grad, saved, reduction, autocast_dtype)


@torch.library.custom_op("sce::scalable_cross_entropy_grad_catalogue", mutates_args=())
def grad_catalogue(
    grad: Tensor, saved: list[Tensor], reduction: str, autocast_dtype: torch.dtype | None
) -> Tensor:
    """Return the gradient of the catalogue."""
    return differentiate(
        catalogue_kernels.grad_catalogue, grad, saved, reduction, autocast_dtype, sparse=False
    )


grad_states.register_fake(lambda grad, saved, *_: saved[0].new_empty(saved[0].shape))
grad_catalogue.register_fake(lambda grad, saved, *_: saved[1].new_empty(saved[1].shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[-2:]  # reduction, autocast_dtype
    save(ctx, inputs[0], inputs[1], Computed(*output))


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grad_x = grad_y = None
    if grad is not None:
        saved = list(ctx.saved_tensors)
        if ctx.needs_input_grad[1]:  # first: it takes memory for a while
            grad_y = grad_catalogue(grad, saved, *ctx.options)
        if ctx.needs_input_grad[0]:
            grad_x = grad_states(grad, saved, *ctx.options)
    return grad_x, grad_y, *[None] * 9


scalable_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
