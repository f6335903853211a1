"""Cross-entropy over the whole catalogue: plain, and exact in chunks of the catalogue."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sce.losses.inputs import check_inputs, check_reduction, check_size, reduce
from sce.losses.softmax import consume_logsumexp


class CrossEntropy(nn.Module):
    """The exact softmax cross-entropy over the catalogue.

    >>> loss = CrossEntropy(chunk_size=256)
    >>> states, catalogue = torch.randn(8, 20, 32), torch.randn(1000, 32)
    >>> targets = torch.randint(1000, (8, 20))
    >>> bool((loss(states, catalogue, targets) - CrossEntropy()(states, catalogue, targets)) < 1e-4)
    True

    Args:
        chunk_size: How many items are scored at once. None (the default) scores them all and keeps
            the logits for the backward pass: [positions, items] numbers, several times over. With a
            size, never more than [positions, chunk_size] logits exist, forward or backward; the
            price is to compute them twice.
        ignore_index: The target of positions that do not count, such as padding.
        reduction: "mean" over the positions that count, "sum", or "none".
    """

    def __init__(
        self,
        *,
        chunk_size: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        if chunk_size is not None:
            check_size("chunk_size", chunk_size)
        check_reduction(reduction)
        self.chunk_size = chunk_size
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(
        self,
        states: Tensor,
        catalogue: Tensor,
        targets: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the loss. Nothing here is random: `generator` is accepted as by every loss."""
        return cross_entropy(
            states,
            catalogue,
            targets,
            chunk_size=self.chunk_size,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        return f"chunk_size={self.chunk_size}, reduction={self.reduction}"


def cross_entropy(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy as a function; the arguments are those of `CrossEntropy`.

    Plain, the logits are one matrix product in the precision of the inputs (or of autocast), and
    the softmax is computed in float32 or wider. In chunks, everything is.
    """
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    check_reduction(reduction)
    inputs = check_inputs(states, catalogue, targets, ignore_index=ignore_index)
    x, y = inputs.states, inputs.catalogue
    if chunk_size is not None:
        losses: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x, y, inputs.targets, chunk_size
        )
    else:
        if x.dtype != y.dtype and not torch.is_autocast_enabled(x.device.type):
            x, y = x.to(inputs.dtype), y.to(inputs.dtype)
        logits = (x @ y.T).to(inputs.dtype)
        losses = functional.cross_entropy(logits, inputs.targets, reduction="none")
    return reduce(losses, None, inputs, reduction)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """One pass over the catalogue forward, one backward; between them one number a position.

    Chunks run along the catalogue, not the positions: each row of the catalogue's gradient is then
    finished when its chunk is, instead of the whole gradient being read and written for each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, catalogue: Tensor, targets: Tensor, chunk_size: int
    ) -> Tensor:
        dtype = torch.promote_types(
            torch.promote_types(states.dtype, catalogue.dtype), torch.float32
        )
        with torch.autocast(states.device.type, enabled=False):
            x = states.to(dtype)
            own = x.new_zeros(len(x))
            sums = torch.full_like(own, -torch.inf)
            for start in range(0, len(catalogue), chunk_size):
                logits = x @ catalogue[start : start + chunk_size].to(dtype).T
                # From among the logits, so that it rounds as they do.
                here, column = _column_in_chunk(targets, start, logits.shape[1])
                own = torch.where(here, logits.gather(1, column).squeeze(1), own)
                sums = torch.logaddexp(sums, consume_logsumexp(logits))
                del logits
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(states, catalogue, targets, sums)
        return sums - own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        states, catalogue, targets, sums = ctx.saved_tensors
        needs_states, needs_catalogue = ctx.needs_input_grad[:2]
        dtype = sums.dtype
        with torch.autocast(states.device.type, enabled=False):
            x = states.to(dtype)
            scale = grad_losses.to(dtype).unsqueeze(1)
            grad_x = -scale * catalogue[targets].to(dtype)
            grad_y = torch.empty_like(catalogue, memory_format=torch.contiguous_format)
            for start in range(0, len(catalogue), ctx.chunk_size):
                rows = catalogue[start : start + ctx.chunk_size].to(dtype)
                weights = (x @ rows.T).sub_(sums.unsqueeze(1)).exp_().mul_(scale)
                grad_x += weights @ rows
                if needs_catalogue:
                    here, column = _column_in_chunk(targets, start, len(rows))
                    less = torch.where(here, scale.squeeze(1), 0.0)
                    weights.scatter_add_(1, column, -less.unsqueeze(1))
                    grad_y[start : start + len(rows)] = (weights.T @ x).to(grad_y.dtype)
                del weights
        return (
            grad_x.to(states.dtype) if needs_states else None,
            grad_y if needs_catalogue else None,
            None,
            None,
        )


def _column_in_chunk(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Say which targets [n] lie in the chunk, and in which of its columns [n, 1]."""
    here = (targets >= start) & (targets < start + width)
    return here, (targets - start).clamp(0, width - 1).unsqueeze(1)
