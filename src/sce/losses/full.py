"""Cross-entropy over the whole catalogue: plain, and exact in chunks of the catalogue."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sce.losses.base import TINY_DATA, BatchShape, DataSummary, Loss, LossMemory
from sce.losses.inputs import (
    apply,
    check_ignore_index,
    check_inputs,
    check_reduction,
    check_size,
    reduce,
)


class CrossEntropy(Loss):
    """The exact softmax cross-entropy over the catalogue.

    In chunks, torch.func cannot transform it: use backward() or torch.autograd.grad.

    >>> loss = CrossEntropy(chunk_size=256)
    >>> states, catalogue = torch.randn(8, 20, 32), torch.randn(1000, 32)
    >>> targets = torch.randint(1000, (8, 20))
    >>> bool((loss(states, catalogue, targets) - CrossEntropy()(states, catalogue, targets)) < 1e-4)
    True

    Args:
        chunk_size: How many items are scored at once. None (the default) scores them all and keeps
            the logits for the backward pass: [positions, items] numbers, several times over. With a
            size, never more than [positions, chunk_size] logits exist at once; the price is to
            compute them twice. (On a CPU, where torch has `linear_cross_entropy` (2.13) and the
            gradient of the catalogue is no larger than a chunk, that takes over: it computes them
            once, in a third less time.)
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
        _check_settings(chunk_size, ignore_index, reduction)
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
        max_targets: int | None = None,
    ) -> Tensor:
        """Return the loss. Nothing here is random: `generator` is accepted as by every loss.

        With `max_targets` the number of targets is not asked of the device: no sync.
        """
        return cross_entropy(
            states,
            catalogue,
            targets,
            chunk_size=self.chunk_size,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            max_targets=max_targets,
        )

    def is_capturable(self, catalogue: Tensor) -> bool:
        """True if the call, given `max_targets`, can be captured in a CUDA graph."""
        return True

    def extra_repr(self) -> str:
        """Show the settings in the module's repr."""
        names = ("chunk_size", "ignore_index", "reduction")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def memory(self, shape: BatchShape) -> LossMemory:
        """Return the bytes of logits, and of the valid states, which are copied."""
        states = 4 * shape.max_targets * shape.dim
        if self.chunk_size is None:
            logits = 4 * shape.max_targets * shape.n_items
            forward = states + 2 * logits  # the log-softmax is kept
            # With its gradient and that of the logits, then with the gradient of the states alone.
            backward = states + max(3 * logits - shape.catalogue_bytes, logits + states)
        else:
            chunk = min(self.chunk_size, shape.n_items)
            logits = 4 * shape.max_targets * chunk
            forward = states + logits
            # The gradient of the states, and what a chunk adds to it or to the catalogue's.
            backward = 2 * states + logits + max(states, 4 * chunk * shape.dim)
        return LossMemory(forward, backward - shape.state_bytes)


@dataclass(frozen=True)
class CrossEntropySettings:
    """Settings of exact cross-entropy."""

    chunk_size: int | None = None
    """Items scored at once; less memory, more time. [default: all]"""

    def __post_init__(self) -> None:
        self.build(TINY_DATA)

    def build(self, data: DataSummary) -> CrossEntropy:
        """Make the loss."""
        return CrossEntropy(chunk_size=self.chunk_size)


def cross_entropy(
    states: Tensor,  # [..., d]
    catalogue: Tensor,  # [c, d]
    targets: Tensor,  # [...]
    *,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    max_targets: int | None = None,
) -> Tensor:
    """Cross-entropy as a function; the arguments are those of `CrossEntropy`.

    Everything is computed in float32 or wider, whatever the precision of the inputs or of autocast:
    logits in float16 end at 65,504.
    """
    _check_settings(chunk_size, ignore_index, reduction)
    inputs = check_inputs(
        states, catalogue, targets, ignore_index=ignore_index, max_targets=max_targets
    )
    x, y = inputs.states, inputs.catalogue
    losses: Tensor
    if chunk_size is not None:
        rows = len(x) * chunk_size // len(y)  # with as many logits
        if reduction != "none" and max_targets is None and _torch_does_it(x, y, rows):
            total: Tensor = apply(_ChunkedByTorch, x, y, inputs.targets, rows)
            return total / len(x) if reduction == "mean" else total
        losses = apply(_ChunkedCrossEntropy, x, y, inputs.targets, chunk_size)
    else:
        with torch.autocast(x.device.type, enabled=False):
            logits = x.to(inputs.dtype) @ y.to(inputs.dtype).T
        losses = functional.cross_entropy(logits, inputs.targets, reduction="none")
    return reduce(losses, None, inputs, reduction)


def _check_settings(chunk_size: int | None, ignore_index: int, reduction: str) -> None:
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    check_ignore_index(ignore_index)
    check_reduction(reduction)


def _torch_does_it(states: Tensor, catalogue: Tensor, rows: int) -> bool:
    """Say whether torch's own loss in chunks of so many positions gives what ours does, for less.

    It goes through the whole gradient of the catalogue for each chunk, so that few positions at a
    time are slow; in half precision it rounds the loss; on a GPU it adds with atomics.
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
        wanted = [tensor.requires_grad_() for tensor, n in ((x, needs[0]), (y, needs[1])) if n]
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            total = functional.linear_cross_entropy(x, y, targets, reduction="sum", options=options)
            # It has computed the gradients by now: this hands them over.
            ctx.save_for_backward(*(torch.autograd.grad(total, wanted) if wanted else ()))
        return total.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = iter(ctx.saved_tensors)
        needs = ctx.needs_input_grad
        return tuple(next(grads) * grad_total if needed else None for needed in needs)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """One pass over the catalogue forward, one backward; between them two numbers a position.

    These are the largest logit and the logarithm of the sum beyond it: together they would be
    rounded to what a large logit leaves of them.

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
            own, total = x.new_zeros(len(x)), x.new_zeros(len(x))
            largest = torch.full_like(own, -torch.inf)
            for start in range(0, len(catalogue), chunk_size):
                logits = x @ catalogue[start : start + chunk_size].to(dtype).T
                # From among the logits, so that it rounds as they do.
                here, column = _column_in_chunk(targets, start, logits.shape[1])
                own = torch.where(here, logits.gather(1, column).squeeze(1), own)
                before, largest = largest, torch.maximum(largest, logits.amax(dim=1))
                total *= (before - largest).exp_()
                total += logits.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)
                del logits
        rest = total.log_()
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(states, catalogue, targets, largest, rest)
        return (largest - own) + rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        states, catalogue, targets, largest, rest = ctx.saved_tensors
        needs_states, needs_catalogue = ctx.needs_input_grad[:2]
        dtype = rest.dtype
        with torch.autocast(states.device.type, enabled=False):
            x = states.to(dtype)
            scale = grad_losses.to(dtype).unsqueeze(1)
            grad_x = -scale * catalogue[targets].to(dtype)
            grad_y = None
            if needs_catalogue:
                grad_y = torch.empty_like(catalogue, memory_format=torch.contiguous_format)
            for start in range(0, len(catalogue), ctx.chunk_size):
                rows = catalogue[start : start + ctx.chunk_size].to(dtype)
                logits = (x @ rows.T).sub_(largest.unsqueeze(1)).sub_(rest.unsqueeze(1))
                weights = logits.exp_().mul_(scale)
                grad_x += weights @ rows
                if grad_y is not None:
                    here, column = _column_in_chunk(targets, start, len(rows))
                    less = torch.where(here, scale.squeeze(1), 0.0)
                    weights.scatter_add_(1, column, -less.unsqueeze(1))
                    grad_y[start : start + len(rows)] = (weights.T @ x).to(grad_y.dtype)
                del logits, weights
        return grad_x.to(states.dtype) if needs_states else None, grad_y, None, None


def _column_in_chunk(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Say which targets [n] lie in the chunk, and in which of its columns [n, 1]."""
    here = (targets >= start) & (targets < start + width)
    return here, (targets - start).clamp(0, width - 1).unsqueeze(1)
