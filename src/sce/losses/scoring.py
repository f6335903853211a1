"""Logits of each position with its own target and with sampled negatives.

Where sequences or positions have negatives of their own, rows of the catalogue are looked up for a
few of them at a time, forward and backward, and so are logits computed at padding: of what there is
at once, only the logits that count grow with their number.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sce.losses.gradients import CatalogueGradient
from sce.losses.inputs import Inputs, apply, check_tensor
from sce.losses.negatives import Negatives

Sharing = Literal["position", "sequence", "batch"]
# The most numbers of rows that are looked up, of their logits, or of states at once (8 MiB in
# float32), unless a single sequence has more.
MAX_GATHERED = 1 << 21


class SampledScores(NamedTuple):
    """Logits in float32 or wider."""

    own: Tensor  # [v] with each position's target
    others: (
        Tensor  # [v, k] with the negatives, corrected; -inf if one is the own target, or excluded
    )


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
    items, width = items.long(), items.shape[1]
    if exclude is not None:
        exclude = _ordered(exclude, n_sequences)
        width = max(width, exclude.shape[1])
    with torch.autocast(inputs.states.device.type, enabled=False):
        own, others = _score(inputs, items, shared, length)
    if log_expected is not None:
        expected = log_expected[sequence] if shared == "sequence" else log_expected
        others = others - expected.to(others.dtype)
    # What is -inf has no part in a loss, and the gradient of a loss there is 0.
    with torch.no_grad():
        for part in _pieces(len(others), 2 * width):  # indices are twice as wide
            drawn = items[_row_of(part, shared, sequence)]
            excluded = None if exclude is None else exclude[sequence[part]]
            others[part].masked_fill_(_is_none(drawn, inputs.targets[part], excluded), -torch.inf)
            del drawn, excluded
    return SampledScores(own, others)


def _row_of(part: slice, shared: Sharing, sequence: Tensor) -> slice | Tensor:
    """The rows of negatives that some positions have."""
    if shared == "sequence":
        return sequence[part]
    return part if shared == "position" else slice(None)


def _is_none(drawn: Tensor, targets: Tensor, excluded: Tensor | None) -> Tensor:
    """Say which of those drawn, [p, k] or [1, k], are no negatives of their positions [p]."""
    masked = drawn == targets.unsqueeze(1)
    if excluded is not None:
        masked |= _is_among(drawn.expand_as(masked), excluded)
    return masked


def _score(inputs: Inputs, items: Tensor, shared: Sharing, length: int) -> tuple[Tensor, Tensor]:
    """Return the logits with the own targets [v] and with the negatives [v, k].

    Targets and negatives are looked up together: the gradient of a lookup is as large as the
    catalogue, and one is enough.
    """
    x, y, targets = inputs.states, inputs.catalogue, inputs.targets
    if shared == "position":
        both = torch.cat([targets.unsqueeze(1), items], dim=1)
        logits: Tensor = apply(_PositionLogits, x, y, both)
        return logits[:, 0], logits[:, 1:]
    if shared == "sequence":
        scores: tuple[Tensor, Tensor] = apply(
            _SequenceLogits, x, y, targets, items, _places(inputs), length
        )
        return scores
    rows: Tensor = apply(_Lookup, y, torch.cat([targets, items.flatten()]), inputs.dtype)
    own_rows, other_rows = rows.split([len(x), items.numel()])
    x = x.to(inputs.dtype)
    return (x * own_rows).sum(dim=1), x @ other_rows.T


def _places(inputs: Inputs) -> Tensor:
    """Where the state of each position [n] is among those of the valid [v]; v where it is not."""
    n, v, index = inputs.positions.numel(), len(inputs.index), inputs.index
    if inputs.there is not None:
        index = index.where(inputs.there, n)
    places = index.new_full((n + 1,), v)
    places.index_copy_(0, index, torch.arange(v, device=index.device))
    return places[:n]


def _ordered(exclude: Tensor, n_sequences: int) -> Tensor:
    """Check the items that are excluded, and sort those of each sequence."""
    check_tensor("exclude", exclude)
    if exclude.is_floating_point() or exclude.is_complex() or exclude.dtype == torch.bool:
        raise TypeError(f"exclude must hold whole numbers, the items, got {exclude.dtype}")
    if exclude.dim() != 2 or len(exclude) != n_sequences:
        raise ValueError(
            f"exclude must be [{n_sequences}, m], one row of items a sequence, got shape "
            f"{tuple(exclude.shape)}"
        )
    return exclude.long().sort(dim=1).values


def _is_among(items: Tensor, ordered: Tensor) -> Tensor:
    """Say which items [p, k] are among those of their row [p, m], which are sorted."""
    if ordered.shape[1] == 0:
        return torch.zeros_like(items, dtype=torch.bool)
    at = torch.searchsorted(ordered, items.contiguous()).clamp_(max=ordered.shape[1] - 1)
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


class _SequenceLogits(torch.autograd.Function):
    """Logits [v] with the targets, and [v, k] with the k items of a sequence, a few at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [v, d]
        catalogue: Tensor,
        targets: Tensor,  # [v]
        items: Tensor,  # [sequences, k]
        places: Tensor,  # [sequences · length], see `_places`
        length: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(states, catalogue, targets, items, places)
        ctx.length = length
        (v, d), k, dtype = states.shape, items.shape[1], _wide(states, catalogue)
        own = torch.empty(v, dtype=dtype, device=states.device)
        for part in _pieces(v, d):
            own[part] = (states[part].to(dtype) * catalogue[targets[part]].to(dtype)).sum(1)
        # Padding has the logits of some state, which go behind the last.
        others = torch.zeros((v + 1, k), dtype=dtype, device=states.device)
        some_state = places.clamp(max=v - 1)
        for some in _pieces(len(items) if v else 0, max(k * d, length * k, length * d)):
            at = slice(some.start * length, some.stop * length)
            x = states[some_state[at]].to(dtype).unflatten(0, (-1, length))
            logits = (x @ catalogue[items[some]].to(dtype).mT).flatten(0, 1)
            others.index_copy_(0, places[at], logits)
            del x, logits
        return own, others.resize_(v, k)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_own: Tensor, grad_others: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        states, catalogue, targets, items, places = ctx.saved_tensors
        (v, d), k, dtype, length = states.shape, items.shape[1], grad_own.dtype, ctx.length
        grad_states = torch.zeros((v + 1, d), dtype=dtype, device=states.device)
        sink = None
        if ctx.needs_input_grad[1]:
            sink = CatalogueGradient(catalogue, [items, targets], dtype)
        some_state, outside = places.clamp(max=v - 1), (places == v).unsqueeze(1)
        for group in _pieces(len(items) if v else 0, k * d):
            # Gradients of so many negatives are added up at once, if they are wanted.
            rows = items[group]
            outer = states.new_empty((0 if sink is None else len(rows), k, d), dtype=dtype)
            for part in _pieces(len(rows), max(length * k, length * d)):
                at = slice((group.start + part.start) * length, (group.start + part.stop) * length)
                weights = grad_others[some_state[at]].masked_fill_(outside[at], 0)
                weights = weights.unflatten(0, (-1, length))
                with torch.autocast(states.device.type, enabled=False):
                    grad_x = (weights @ catalogue[rows[part]].to(dtype)).flatten(0, 1)
                    grad_states.index_copy_(0, places[at], grad_x)
                    del grad_x
                    if sink is not None:
                        x = states[some_state[at]].to(dtype).masked_fill_(outside[at], 0)
                        torch.bmm(weights.mT, x.unflatten(0, (-1, length)), out=outer[part])
                        del x
                del weights
            if sink is not None:
                sink.add(rows.flatten(), outer.flatten(0, 1))
            del outer
        grad_states.resize_(v, d)
        for part in _pieces(v, d):
            weight = grad_own[part].unsqueeze(1)
            grad_states[part] += weight * catalogue[targets[part]].to(dtype)
            if sink is not None:
                sink.add(targets[part], weight * states[part].to(dtype))
        grad = sink.finish() if sink is not None else None
        return grad_states.to(states.dtype), grad, None, None, None, None


class _PositionLogits(torch.autograd.Function):
    """Logits [v, k] of each position with its own k items, gathered a few positions at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, catalogue: Tensor, items: Tensor) -> Tensor:
        dtype = _wide(states, catalogue)
        ctx.save_for_backward(states, catalogue, items)
        logits = torch.empty(items.shape, dtype=dtype, device=states.device)
        for part in _pieces(len(items), items.shape[1] * catalogue.shape[1]):
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
            for part in _pieces(len(items), items.shape[1] * catalogue.shape[1]):
                weights = grad[part].unsqueeze(1)  # [p, 1, k]
                grad_states[part] = (weights @ catalogue[items[part]].to(grad.dtype)).squeeze(1)
                if sink is not None:
                    outer = weights.mT * states[part].to(grad.dtype).unsqueeze(1)  # [p, k, d]
                    sink.add(items[part].flatten(), outer.flatten(0, 1))
                    del outer
        return grad_states, sink.finish() if sink is not None else None, None


def _wide(states: Tensor, catalogue: Tensor) -> torch.dtype:
    both = torch.promote_types(states.dtype, catalogue.dtype)
    return torch.promote_types(both, torch.float32)


def _pieces(rows: int, width: int) -> list[slice]:
    """Cut rows into pieces of no more than MAX_GATHERED numbers, or of one row."""
    step = max(1, MAX_GATHERED // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
