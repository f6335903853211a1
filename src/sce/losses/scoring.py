"""Logits of each position with its target and with sampled negatives, or the softmax of them.

Rows of negatives, and logits of padding, exist for a few sequences or positions at a time, forward
and backward: only the logits of valid positions grow with the batch.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from sce.losses.inputs import Inputs
from sce.losses.negatives import Draw, Negatives, check_draw
from sce.losses.tiled import Tile, tiled_cross_entropy, tiled_logits

Sharing = Literal["position", "sequence", "batch"]
# The most numbers gathered at once: catalogue rows, their logits, or states (8 MiB in float32),
# unless a single sequence has more.
MAX_GATHERED = 1 << 21


def score(
    inputs: Inputs, drawn: Draw, shared: Sharing, *, cut: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the logits of the valid positions, in float32 or wider; cut, their cross-entropy [v].

    Those with the targets [v], and those with the negatives [v, k]: corrected, and -inf where a
    negative equals the target. What is cut exists for a few sequences or positions at a time.
    """
    items, log_expected = drawn
    length = inputs.positions[-1] if inputs.positions else 1
    v, k = len(inputs.states), items.shape[1]
    places = torch.arange(v, device=items.device).unsqueeze(1)
    counts = [length] * len(items) if v else []  # at most, of each sequence
    if shared == "sequence":
        places = _places(inputs).unflatten(0, (len(items), length))
        if _can_count(places):
            ordered = (places < v).sum(dim=1).sort(descending=True, stable=True)
            counts, order = ordered.values.tolist(), ordered.indices
            places, items = places.sort(dim=1).values[order], items[order]
            log_expected = None if log_expected is None else log_expected[order]

    def tiles(
        dim: int, places: Tensor, items: Tensor, log_expected: Tensor | None
    ) -> Iterator[Tile]:
        pieces = _alike(counts, k, dim)
        if shared != "sequence":
            # Logits of a batch that are kept exist at once anyway.
            width = k * dim if shared == "position" else max(k, dim) if cut else 0
            pieces = ((part, 1) for part in _pieces(v, width))
        for part, longest in pieces:
            place, its = places[part, :longest], slice(None) if shared == "batch" else part
            offset = None if log_expected is None else -log_expected[its].unsqueeze(1)
            if shared == "sequence":
                yield Tile(place.clamp(max=v - 1), items[its], place, offset=offset)
            else:
                yield Tile(
                    place.mT if shared == "batch" else place, items[its], part, offset=offset
                )

    given = (inputs.states, inputs.catalogue, inputs.bias, inputs.targets, tiles)
    if cut:
        return tiled_cross_entropy(*given, places, items, log_expected)
    positive_logits, negative_logits = tiled_logits(*given, places, items, log_expected, k=k)
    if inputs.valid is not None:  # where a place is not in use, that of item 0 may be -inf
        positive_logits = positive_logits.where(inputs.valid, 0)
    return positive_logits, negative_logits


def piece_width(k: int, dim: int, length: int) -> int:
    """Return how many numbers of a sequence are gathered: negatives, logits, or states."""
    return max(k * dim, length * k, length * dim)


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


def _places(inputs: Inputs) -> Tensor:
    """Return the place of each position [n] among the valid [v]; v where it is not valid."""
    n, v, index = inputs.positions.numel(), len(inputs.index), inputs.index
    if inputs.valid is not None:
        index = index.where(inputs.valid, n)
    places = index.new_full((n + 1,), v)
    places.index_copy_(0, index, torch.arange(v, device=index.device))
    return places[:n]


def _can_count(places: Tensor) -> bool:
    """True where numbers can be looked at without waiting for them."""
    return places.device.type == "cpu"


def _alike(counts: Sequence[int], k: int, dim: int) -> Iterator[tuple[slice, int]]:
    """Cut sequences, the longest first, into pieces in which none is less than half as long."""
    start = 0
    while start < len(counts) and counts[start]:
        longest = counts[start]
        end = min(len(counts), start + max(1, MAX_GATHERED // piece_width(k, dim, longest)))
        end = next((n for n in range(start, end) if 2 * counts[n] < longest), end)
        yield slice(start, end), longest
        start = end


def _pieces(rows: int, width: int) -> list[slice]:
    """Cut rows into pieces of no more than MAX_GATHERED numbers, or of one row."""
    step = max(1, MAX_GATHERED // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
