"""Logits of each position with its own target and with sampled negatives.

Negatives shared by a sequence or by the batch cost one matrix product. Negatives drawn for each
position are gathered piece by piece, forward and backward: a tensor of [positions, k, d] never
exists.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.gradients import CatalogueGradient
from sce.losses.inputs import Inputs, apply, check_tensor
from sce.losses.negatives import Negatives

Sharing = Literal["position", "sequence", "batch"]
# The most numbers of gathered catalogue rows held at once (8 MiB in float32).
MAX_GATHERED = 1 << 21


class SampledScores(NamedTuple):
    """Logits in float32 or wider."""

    own: Tensor  # [v] with each position's target
    others: Tensor  # [v, k] with the negatives
    masked: Tensor  # [v, k] negatives that do not count: the own target, or excluded
    log_expected: Tensor | None  # [v, k] or [1, k], see `Draw`


def score_negatives(
    inputs: Inputs,
    negatives: Negatives,
    n_negatives: int,
    *,
    shared: Sharing,
    exclude: Tensor | None,  # [sequences, m] items that are no negatives of a sequence
    generator: torch.Generator | None,
) -> SampledScores:
    """Draw the negatives, score them, and mask those that are none."""
    if torch.compiler.is_compiling():
        # How many positions are valid is known only when it runs: a compiled model calls this as
        # it is.
        return torch.compiler.disable(score_negatives)(  # type: ignore[no-any-return]
            inputs, negatives, n_negatives, shared=shared, exclude=exclude, generator=generator
        )
    assert inputs.index is not None
    length = inputs.positions[-1] if inputs.positions else 1
    n_sequences = inputs.positions[:-1].numel()
    sequence = inputs.index // max(1, length)  # [v] which sequence a position belongs to
    rows = {"position": len(inputs.index), "sequence": n_sequences, "batch": 1}[shared]
    with torch.no_grad():
        items, log_expected = negatives(
            rows, n_negatives, len(inputs.catalogue), inputs.targets, generator=generator
        )
    if items.dim() != 2 or len(items) != rows:
        raise ValueError(
            f"a sampler that is asked for {rows} rows must return items [{rows}, k], got shape "
            f"{tuple(items.shape)}"
        )
    if items.device.type == "cpu" and items.numel() and int(items.min()) < 0:
        raise ValueError(f"a sampler must return items from 0 on, got {int(items.min())}")
    with torch.autocast(inputs.states.device.type, enabled=False):
        own, others = _score(inputs, items, shared, n_sequences, length)
    if shared == "sequence":
        items = items[sequence]
        log_expected = None if log_expected is None else log_expected[sequence]
    masked = items == inputs.targets.unsqueeze(1)
    if exclude is not None:
        masked |= _is_excluded(items.expand_as(masked), exclude, sequence, n_sequences)
    return SampledScores(own, others, masked, log_expected)


def _score(
    inputs: Inputs, items: Tensor, shared: Sharing, n_sequences: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return the logits with the own targets [v] and with the negatives [v, k].

    Targets and negatives are looked up together: the gradient of a lookup is as large as the
    catalogue, and one is enough.
    """
    x, y = inputs.states, inputs.catalogue
    if shared == "position":
        both = torch.cat([inputs.targets.unsqueeze(1), items], dim=1)
        logits: Tensor = apply(_PositionLogits, x, y, both)
        return logits[:, 0], logits[:, 1:]
    rows: Tensor = apply(_Lookup, y, torch.cat([inputs.targets, items.flatten()]), inputs.dtype)
    own_rows, other_rows = rows.split([len(x), items.numel()])
    x = x.to(inputs.dtype)
    own = (x * own_rows).sum(dim=1)
    if shared == "batch":
        return own, x @ other_rows.T
    assert inputs.index is not None
    d = x.shape[1]
    others = inputs.put(x).view(n_sequences, length, d) @ other_rows.view(*items.shape, d).mT
    return own, others.flatten(0, 1).index_select(0, inputs.index)


def _is_excluded(items: Tensor, exclude: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """Say which items [v, k] are among those excluded for their position's sequence."""
    check_tensor("exclude", exclude)
    if exclude.is_floating_point() or exclude.is_complex() or exclude.dtype == torch.bool:
        raise TypeError(f"exclude must hold whole numbers, the items, got {exclude.dtype}")
    if exclude.dim() != 2 or len(exclude) != n_sequences:
        raise ValueError(
            f"exclude must be [{n_sequences}, m], one row of items a sequence, got shape "
            f"{tuple(exclude.shape)}"
        )
    if exclude.shape[1] == 0:
        return torch.zeros_like(items, dtype=torch.bool)
    ordered = exclude.to(items.dtype).sort(dim=1).values[sequence]
    at = torch.searchsorted(ordered, items.contiguous()).clamp_(max=exclude.shape[1] - 1)
    return ordered.gather(1, at) == items


class _Lookup(torch.autograd.Function):
    """Rows of the catalogue in the precision that is computed in, and so are their gradients."""

    @staticmethod
    def forward(ctx: Any, catalogue: Tensor, items: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(catalogue, items)
        return catalogue[items].to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        catalogue, items = ctx.saved_tensors
        sink = CatalogueGradient(catalogue, [items], grad.dtype)
        sink.add(items, grad)
        return sink.finish(), None, None


class _PositionLogits(torch.autograd.Function):
    """Logits [v, k] of each position with its own k items, gathered a few positions at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, catalogue: Tensor, items: Tensor) -> Tensor:
        dtype = torch.promote_types(
            torch.promote_types(states.dtype, catalogue.dtype), torch.float32
        )
        ctx.save_for_backward(states, catalogue, items)
        logits = torch.empty(items.shape, dtype=dtype, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            for part in _parts(items, catalogue.shape[1]):
                x = states[part].to(dtype).unsqueeze(2)
                logits[part] = (catalogue[items[part]].to(dtype) @ x).squeeze(2)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, catalogue, items = ctx.saved_tensors
        grad_states = torch.empty_like(states, memory_format=torch.contiguous_format)
        sink = None
        if ctx.needs_input_grad[1]:
            sink = CatalogueGradient(catalogue, [items], grad.dtype)
        with torch.autocast(states.device.type, enabled=False):
            for part in _parts(items, catalogue.shape[1]):
                weights = grad[part].unsqueeze(1)  # [p, 1, k]
                rows = catalogue[items[part]].to(grad.dtype)  # [p, k, d]
                grad_states[part] = (weights @ rows).squeeze(1).to(states.dtype)
                if sink is not None:
                    outer = weights.transpose(1, 2) * states[part].to(grad.dtype).unsqueeze(1)
                    sink.add(items[part].flatten(), outer.flatten(0, 1))
        return grad_states, sink.finish() if sink is not None else None, None


def _parts(items: Tensor, d: int) -> list[slice]:
    step = max(1, MAX_GATHERED // max(1, items.shape[1] * d))
    return [slice(start, start + step) for start in range(0, len(items), step)]
