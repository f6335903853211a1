"""Logits of each position with its target and with sampled negatives.

Rows of negatives, and logits of padding, exist for a few sequences or positions at a time, forward
and backward: only the logits of valid positions grow with the batch.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from sce.losses.gradients import CatalogueGradient
from sce.losses.inputs import Inputs, apply, compute_dtype, once
from sce.losses.negatives import Draw, Negatives, check_draw
from sce.losses.tiled import Tile, tiled_cross_entropy

Sharing = Literal["position", "sequence", "batch"]
# The most numbers gathered at once: catalogue rows, their logits, or states (8 MiB in float32),
# unless a single sequence has more.
MAX_GATHERED = 1 << 21


def score_negatives(inputs: Inputs, drawn: Draw, shared: Sharing) -> tuple[Tensor, Tensor]:
    """Return the logits of the valid positions, in float32 or wider.

    Those with the targets [v], and those with the negatives [v, k]: corrected, and -inf where a
    negative equals the target.
    """
    length, (items, log_expected) = _length(inputs), drawn
    sequence = inputs.index // max(1, length)  # [v] the sequence of each position
    with torch.autocast(inputs.states.device.type, enabled=False):
        positive_logits, negative_logits = _score(inputs, items, shared, length)
    offset = None if log_expected is None else -log_expected.to(inputs.dtype)  # [rows, k]
    if inputs.bias is not None:
        both = torch.cat([inputs.targets, items.flatten()])
        bias = _look_up(inputs.bias.unsqueeze(1), both, inputs.dtype).squeeze(1)
        of_targets, of_items = bias.split([len(inputs.targets), items.numel()])
        positive_logits = positive_logits + of_targets
        of_items = of_items.view_as(items)
        offset = of_items if offset is None else offset + of_items
    if offset is not None:
        if shared == "sequence":
            offset = _look_up(offset, sequence, inputs.dtype)
        negative_logits = negative_logits + offset
    # At -inf a negative has no part in the loss, and the gradient of the loss is 0.
    with torch.no_grad():
        for part in _pieces(len(negative_logits), 2 * items.shape[1]):  # indices are twice as wide
            against = items
            if shared != "batch":
                against = items[part] if shared == "position" else items[sequence[part]]
            is_target = against == inputs.targets[part].unsqueeze(1)
            negative_logits[part].masked_fill_(is_target, -torch.inf)
            del against, is_target
    return positive_logits, negative_logits


def cut_cross_entropy(inputs: Inputs, drawn: Draw, shared: Sharing) -> Tensor:
    """Return the softmax cross-entropy of each valid position [v].

    As by `score_negatives`, but that logits exist for a few sequences or positions at a time.
    """
    items, log_expected = drawn
    length, v, k = _length(inputs), len(inputs.states), items.shape[1]
    places = torch.arange(v, device=items.device).unsqueeze(1)
    if shared == "sequence":
        places = _places(inputs).unflatten(0, (len(items), length))

    def tiles(dim: int) -> Iterator[Tile]:
        width = {"position": k * dim, "batch": max(k, dim)}.get(shared, 0)
        for part in _pieces(len(places) if v else 0, width or piece_width(k, dim, length)):
            place, its = places[part], slice(None) if shared == "batch" else part
            if shared == "batch":
                place = place.mT
            offset = None if log_expected is None else -log_expected[its].unsqueeze(1)
            absent = (place == v).unsqueeze(2) if shared == "sequence" else None
            yield Tile(place.clamp(max=v - 1), items[its], place, absent, offset)

    given = (inputs.states, inputs.catalogue, inputs.bias, inputs.targets)
    return tiled_cross_entropy(*given, tiles)


def piece_width(k: int, dim: int, length: int) -> int:
    """Return how many numbers of a sequence are gathered: negatives, logits, or states."""
    return max(k * dim, length * k, length * dim)


def _length(inputs: Inputs) -> int:
    return inputs.positions[-1] if inputs.positions else 1


def draw(
    inputs: Inputs,
    negatives: Negatives,
    n_negatives: int,
    shared: Sharing,
    generator: torch.Generator | None,
) -> Draw:
    """Draw negatives [rows, k], and what their logits are corrected by, if they are."""
    n_sequences = inputs.positions[:-1].numel()
    rows = {"position": len(inputs.index), "sequence": n_sequences, "batch": 1}[shared]
    with torch.no_grad():
        drawn = negatives(
            rows, n_negatives, len(inputs.catalogue), inputs.targets, generator=generator
        )
    return check_draw(drawn, rows, inputs, corrected=negatives.correct)


def _score(inputs: Inputs, items: Tensor, shared: Sharing, length: int) -> tuple[Tensor, Tensor]:
    """Return the logits with the targets [v] and with the negatives [v, k], looked up together."""
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
    rows = _look_up(y, torch.cat([targets, items.flatten()]), inputs.dtype)
    positive_rows, negative_rows = rows.split([len(x), items.numel()])
    x = x.to(inputs.dtype)
    return (x * positive_rows).sum(dim=1), x @ negative_rows.T


def _places(inputs: Inputs) -> Tensor:
    """Return the place of each position [n] among the valid [v]; v where it is not valid."""
    n, v, index = inputs.positions.numel(), len(inputs.index), inputs.index
    if inputs.valid is not None:
        index = index.where(inputs.valid, n)
    places = index.new_full((n + 1,), v)
    places.index_copy_(0, index, torch.arange(v, device=index.device))
    return places[:n]


def _look_up(table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = apply(_Lookup, table, rows, dtype)
    return found


class _Lookup(torch.autograd.Function):
    """Rows of a table in the dtype that is computed in; their gradients are added up in order."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(table, rows)
        return table[rows].to(dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, rows = ctx.saved_tensors
        accumulator = CatalogueGradient(table, [rows], grad.dtype)
        accumulator.add(rows, grad)
        return accumulator.finish(), None, None


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
        (v, d), k, dtype = states.shape, items.shape[1], compute_dtype(states, catalogue)
        positive_logits = torch.empty(v, dtype=dtype, device=states.device)
        for part in _pieces(v, d):
            rows = catalogue[targets[part]].to(dtype)
            positive_logits[part] = (states[part].to(dtype) * rows).sum(1)
        # Padding has the logits of some state, which go behind the last.
        negative_logits = torch.zeros((v + 1, k), dtype=dtype, device=states.device)
        some_state = places.clamp(max=v - 1)
        for some in _pieces(len(items) if v else 0, piece_width(k, d, length)):
            at = slice(some.start * length, some.stop * length)
            x = states[some_state[at]].to(dtype).unflatten(0, (-1, length))
            logits = (x @ catalogue[items[some]].to(dtype).mT).flatten(0, 1)
            negative_logits.index_copy_(0, places[at], logits)
            del x, logits
        return positive_logits, negative_logits.resize_(v, k)

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_positive: Tensor, grad_negative: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        states, catalogue, targets, items, places = ctx.saved_tensors
        (v, d), k, dtype, length = states.shape, items.shape[1], grad_positive.dtype, ctx.length
        grad_states = torch.zeros((v + 1, d), dtype=dtype, device=states.device)
        accumulator = None
        if ctx.needs_input_grad[1]:
            accumulator = CatalogueGradient(catalogue, [items, targets], dtype)
        some_state, outside = places.clamp(max=v - 1), (places == v).unsqueeze(1)
        for group in _pieces(len(items) if v else 0, k * d):
            # Gradients of so many negatives are added up at once.
            rows = items[group]
            outer = states.new_empty((0 if accumulator is None else len(rows), k, d), dtype=dtype)
            for part in _pieces(len(rows), max(length * k, length * d)):
                at = slice((group.start + part.start) * length, (group.start + part.stop) * length)
                weights = grad_negative[some_state[at]].masked_fill_(outside[at], 0)
                weights = weights.unflatten(0, (-1, length))
                with torch.autocast(states.device.type, enabled=False):
                    grad_x = (weights @ catalogue[rows[part]].to(dtype)).flatten(0, 1)
                    grad_states.index_copy_(0, places[at], grad_x)
                    del grad_x
                    if accumulator is not None:
                        x = states[some_state[at]].to(dtype).masked_fill_(outside[at], 0)
                        torch.bmm(weights.mT, x.unflatten(0, (-1, length)), out=outer[part])
                        del x
                del weights
            if accumulator is not None:
                accumulator.add(rows.flatten(), outer.flatten(0, 1))
            del outer
        grad_states.resize_(v, d)
        for part in _pieces(v, d):
            weight = grad_positive[part].unsqueeze(1)
            grad_states[part] += weight * catalogue[targets[part]].to(dtype)
            if accumulator is not None:
                accumulator.add(targets[part], weight * states[part].to(dtype))
        grad = accumulator.finish() if accumulator is not None else None
        return grad_states.to(states.dtype), grad, None, None, None, None


class _PositionLogits(torch.autograd.Function):
    """Logits [v, k] of each position with k items of its own, a few positions at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, catalogue: Tensor, items: Tensor) -> Tensor:
        dtype = compute_dtype(states, catalogue)
        ctx.save_for_backward(states, catalogue, items)
        logits = torch.empty(items.shape, dtype=dtype, device=states.device)
        for part in _pieces(len(items), items.shape[1] * catalogue.shape[1]):
            x = states[part].to(dtype).unsqueeze(2)
            logits[part] = (catalogue[items[part]].to(dtype) @ x).squeeze(2)
        return logits

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, catalogue, items = ctx.saved_tensors
        grad_states = torch.empty_like(states, memory_format=torch.contiguous_format)
        accumulator = None
        if ctx.needs_input_grad[1]:
            accumulator = CatalogueGradient(catalogue, [items], grad.dtype)
        with torch.autocast(states.device.type, enabled=False):
            for part in _pieces(len(items), items.shape[1] * catalogue.shape[1]):
                weights = grad[part].unsqueeze(1)  # [p, 1, k]
                grad_states[part] = (weights @ catalogue[items[part]].to(grad.dtype)).squeeze(1)
                if accumulator is not None:
                    outer = weights.mT * states[part].to(grad.dtype).unsqueeze(1)  # [p, k, d]
                    accumulator.add(items[part].flatten(), outer.flatten(0, 1))
                    del outer
        return grad_states, accumulator.finish() if accumulator is not None else None, None


def _pieces(rows: int, width: int) -> list[slice]:
    """Cut rows into pieces of no more than MAX_GATHERED numbers, or of one row."""
    step = max(1, MAX_GATHERED // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
