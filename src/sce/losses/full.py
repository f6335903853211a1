"""Cross-entropy over the whole catalogue: plain, and exact in chunks of the catalogue, or fused."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sce.losses.backend import MAX_DIM, why_not_triton
from sce.losses.base import BatchShape, DataSummary, LossMemory, LossOfPositions, LossSettings
from sce.losses.inputs import (
    Catalogue,
    Inputs,
    active_autocast_dtype,
    apply,
    check_size_or_none,
    compute_dtype,
    once,
)

_HALF = (torch.bfloat16, torch.float16)
_SHARE = 4096  # items of a share that the kernels run over, at least


class CrossEntropy(LossOfPositions):
    """The exact softmax cross-entropy over the catalogue.

    Logits are float32 or wider, whatever the precision of the inputs or of autocast: in float16
    they would end at 65,504. In chunks, torch.func cannot transform it: use backward() or
    torch.autograd.grad.

    >>> loss = CrossEntropy(chunk_size=256)
    >>> states, catalogue = torch.randn(8, 20, 32), torch.randn(1000, 32)
    >>> targets = torch.randint(1000, (8, 20))
    >>> bool((loss(states, catalogue, targets) - CrossEntropy()(states, catalogue, targets)) < 1e-4)
    True

    Args:
        chunk_size: Items scored at once. None: all, and their logits are kept for the backward
            pass: [positions, items] numbers, several times over. With a size, never more than
            [positions, chunk_size] exist at once, and they are computed twice. On a GPU, inputs in
            half precision, or that autocast rounds to it, run on kernels that keep no logits at
            all, whatever the size. (On a CPU, torch's `linear_cross_entropy` (2.13) takes over
            where it computes the same in less time.) Call backward() outside of autocast, as torch
            advises: where logits are kept, it rounds their gradients.
        ignore_index: Target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self, *, chunk_size: int | None = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> None:
        super().__init__(ignore_index=ignore_index, reduction=reduction)
        self.chunk_size = check_size_or_none("chunk_size", chunk_size)

    def _losses(self, inputs: Inputs, generator: torch.Generator | None) -> Tensor:
        x, y, bias, targets = inputs.states, inputs.catalogue, inputs.bias, inputs.targets
        losses: Tensor
        if self.chunk_size is None:
            with torch.autocast(x.device.type, enabled=False):
                logits = functional.linear(x.to(inputs.dtype), y.to(inputs.dtype), bias)
            return functional.cross_entropy(logits, targets, reduction="none")
        rows = len(x) * self.chunk_size // len(y)  # with as many logits as a chunk
        summed = self.reduction != "none" and inputs.valid is None and bias is None
        if not torch.is_grad_enabled():  # else gradients would be computed at once, in vain
            x, y = x.detach(), y.detach()
        if bias is None and (half := _fused_dtype(x, y)) is not None:
            from sce.losses.kernels import fused_full_cross_entropy

            losses = fused_full_cross_entropy(x, y, targets, half)
        elif summed and _is_faster_by_torch(x, y, rows):
            losses = apply(_ChunkedByTorch, x, y, targets, rows)
        else:
            losses = apply(_ChunkedCrossEntropy, x, y, bias, targets, self.chunk_size)
        return losses

    def is_capturable(self, catalogue: Catalogue) -> bool:
        """True if the call, given `max_targets`, can be captured in a CUDA graph."""
        return True

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of logits, and of the valid states, which are copied."""
        states = 4 * shape.max_targets * shape.dim
        if self.chunk_size is None:
            logits = 4 * shape.max_targets * shape.n_items
            forward = states + 2 * logits  # the log-softmax is kept
            # With its gradient and that of the logits, then with the gradient of the states alone.
            backward = states + max(3 * logits - shape.catalogue_bytes, logits + states)
        elif shape.half and shape.dim <= MAX_DIM:
            # Rounded states, sums of each share, rows of targets as they are rounded and added to.
            shares = count_shares(int(shape.max_targets), shape.n_items)
            forward = (1 + 0.5 + shares + 1.5) * states
            # Rounded states, their gradient, and times the loss's; then padded to a batch, twice.
            backward = max(2.5 * states, states + 2 * shape.state_bytes)
        else:
            chunk = min(self.chunk_size, shape.n_items)
            logits = 4 * shape.max_targets * chunk
            forward = states + logits
            # The gradient of the states, and what a chunk adds to it or to the catalogue's.
            backward = 2 * states + logits + max(states, 4 * chunk * shape.dim)
        return LossMemory(forward, backward - shape.state_bytes)


@dataclass(frozen=True)
class CrossEntropySettings(LossSettings):
    """Settings of exact cross-entropy."""

    chunk_size: int | None = None
    """Items scored at once; less memory, and more time but in bf16 on a GPU. [default: all]"""

    def build(self, data: DataSummary) -> CrossEntropy:
        """Make the loss."""
        return CrossEntropy(chunk_size=self.chunk_size)


def _fused_dtype(states: Tensor, catalogue: Tensor) -> torch.dtype | None:
    """Return the half precision that the kernels multiply in; None: they do not run here."""
    same = states.dtype if states.dtype == catalogue.dtype else None
    half = active_autocast_dtype(states, catalogue) or same
    if half not in _HALF or len(states) == 0 or torch.compiler.is_compiling():
        return None
    return half if why_not_triton(states, catalogue, "auto") is None else None


def count_shares(n: int, items: int) -> int:
    """Return how many shares of the catalogue the kernels run over at once, with sums for each.

    Few states alone would not fill a GPU. The number is the same on all, and so are the bits.
    """
    return max(1, min(-(-(1 << 16) // max(1, n)), items // _SHARE))


def _is_faster_by_torch(states: Tensor, catalogue: Tensor, rows: int) -> bool:
    """True if torch's loss, in chunks of so many positions, has our result in less time.

    Few positions at a time are slow; in half precision it rounds; on a GPU it adds with atomics.
    """
    return (
        rows >= states.shape[1]
        and states.device.type == "cpu"
        and states.dtype == catalogue.dtype
        and states.dtype in (torch.float32, torch.float64)
        and hasattr(functional, "linear_cross_entropy")
        and not torch.compiler.is_compiling()
    )


class _ChunkedByTorch(torch.autograd.Function):
    """The sum of the losses, by torch. A second derivative is refused; torch's would be wrong."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, catalogue: Tensor, targets: Tensor, rows: int) -> Tensor:
        x, y = states.detach(), catalogue.detach()
        needs = ctx.needs_input_grad
        leaves = [tensor.requires_grad_() for tensor, n in ((x, needs[0]), (y, needs[1])) if n]
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            total = functional.linear_cross_entropy(x, y, targets, reduction="sum", options=options)
            # It has computed the gradients by now: this hands them over.
            ctx.save_for_backward(*(torch.autograd.grad(total, leaves) if leaves else ()))
        return total.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = iter(ctx.saved_tensors)
        needs = ctx.needs_input_grad
        return tuple(next(grads) * grad_total if needed else None for needed in needs)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """One pass over the catalogue forward, one backward; between them two numbers a position.

    These are the largest logit and the logarithm of the sum beyond it, which a large logit would
    round away. Chunks run along the catalogue: each row of its gradient is written once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [v, d]
        catalogue: Tensor,  # [items, d]
        bias: Tensor | None,  # [items]
        targets: Tensor,  # [v]
        chunk_size: int,
    ) -> Tensor:
        dtype = compute_dtype(states, catalogue)
        with torch.autocast(states.device.type, enabled=False):
            x = states.to(dtype)
            positive_logits, total = x.new_zeros(len(x)), x.new_zeros(len(x))
            # Not -inf, whose difference from itself is none: a bias may rule out a whole chunk.
            largest = torch.full_like(total, torch.finfo(dtype).min)
            for start in range(0, len(catalogue), chunk_size):
                chunk = slice(start, start + chunk_size)
                logits = _score_chunk(x, catalogue[chunk].to(dtype), bias, chunk)
                # From among the logits, so that it rounds as they do.
                here, column = _column_in_chunk(targets, start, logits.shape[1])
                in_chunk = logits.gather(1, column).squeeze(1)
                positive_logits = torch.where(here, in_chunk, positive_logits)
                before, largest = largest, torch.maximum(largest, logits.amax(dim=1))
                total *= (before - largest).exp_()
                total += logits.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)
                del logits
        rest = total.log_()
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(states, catalogue, bias, targets, largest, rest)
        return (largest - positive_logits) + rest

    @staticmethod
    @once
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        states, catalogue, bias, targets, largest, rest = ctx.saved_tensors
        needs_states, needs_catalogue, needs_bias = ctx.needs_input_grad[:3]
        dtype = rest.dtype
        with torch.autocast(states.device.type, enabled=False):
            x = states.to(dtype)
            scale = grad_losses.to(dtype).unsqueeze(1)
            grad_x = -scale * catalogue[targets].to(dtype)
            grad_y = grad_bias = None
            if needs_catalogue:
                grad_y = torch.empty_like(catalogue, memory_format=torch.contiguous_format)
            if needs_bias:
                grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
            for start in range(0, len(catalogue), ctx.chunk_size):
                chunk = slice(start, start + ctx.chunk_size)
                rows = catalogue[chunk].to(dtype)
                logits = _score_chunk(x, rows, bias, chunk)
                weights = logits.sub_(largest.unsqueeze(1)).sub_(rest.unsqueeze(1)).exp_()
                grad_x += weights.mul_(scale) @ rows
                if needs_catalogue or needs_bias:
                    here, column = _column_in_chunk(targets, start, len(rows))
                    less = torch.where(here, scale.squeeze(1), 0.0)
                    weights.scatter_add_(1, column, -less.unsqueeze(1))
                if grad_y is not None:
                    grad_y[chunk] = (weights.T @ x).to(grad_y.dtype)
                if grad_bias is not None:
                    grad_bias[chunk] = weights.sum(dim=0)
                del logits, weights
        return grad_x.to(states.dtype) if needs_states else None, grad_y, grad_bias, None, None


def _score_chunk(x: Tensor, rows: Tensor, bias: Tensor | None, chunk: slice) -> Tensor:
    logits = x @ rows.T
    return logits if bias is None else logits.add_(bias[chunk])


def _column_in_chunk(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which targets [v] lie in the chunk, and in which of its columns, [v, 1]."""
    here = (targets >= start) & (targets < start + width)
    return here, (targets - start).clamp(0, width - 1).unsqueeze(1)
