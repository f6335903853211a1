"""The k best items for each state, out of the whole catalogue, exactly and in bounded memory.

The catalogue is scored chunk by chunk, and only the best so far are kept. The bits of a matrix
product depend on its shape: a user's ranking must not depend on who else is in the batch. So these
are but candidates, which are scored once more. Equal scores are ordered by item id, lower first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sce.data.batches import PADDING, Ragged
from sce.data.popular import count_items
from sce.errors import InputError, check_types, named
from sce.evaluation.precision import matmul_precision
from sce.memory import require_memory

NOTHING = -1  # in place of an item, where fewer than k are available

_POSITIONS = {"cpu": 1 << 12, "gpu": 1 << 16}  # that a model computes at once
_WIDTH_STEP = 16  # of histories: they are padded to a multiple
_SPARE, _SPARE_IN_DOUBT = 16, 1 << 12  # candidates beyond k
_PRODUCTS_AT_ONCE = 1 << 22  # in float64, 32 MiB
_SCORES_AT_ONCE = 1 << 26  # per chunk, 256 MiB
_SMALLEST_CHUNK = 1 << 12
_NORMS_AT_ONCE = 1 << 22
_GATHERED = 1 << 18  # items
_GROUP = 32
_EXACT_INTEGERS = 1 << 24  # float32 holds every integer up to here


class Ranker(Protocol):
    """A model to evaluate: histories [b, l] to states [b, l, d], and item embeddings [C, d]."""

    @property
    def catalogue(self) -> Tensor:
        """Item embeddings; the score of an item is its product with the hidden state."""

    def __call__(self, histories: Tensor, /) -> Tensor:
        """Return the states, the one at each place computed from the events up to it."""


class Ranking(NamedTuple):
    """The best items of each row, best first."""

    scores: Tensor  # float32 [b, k], -inf where there are fewer items
    items: Tensor  # int64 [b, k], NOTHING where there are fewer items


@dataclass(frozen=True)
class Rows:
    """Some items of a catalogue, or all with scaled vectors: gathered when they are scored."""

    catalogue: Tensor  # [C, d]
    ids: Tensor | None = None  # int64 [n], ascending; all by default
    scale: Tensor | None = None  # float32 [C]

    def __len__(self) -> int:
        return len(self.catalogue if self.ids is None else self.ids)

    def __getitem__(self, places: slice | Tensor) -> Tensor:
        chosen = places if self.ids is None else self.ids[places]
        rows = self.catalogue[chosen]
        return rows if self.scale is None else rows.float() * self.scale[chosen, None]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the gathered vectors."""
        return self.catalogue.dtype if self.scale is None else torch.float32

    def places(self, items: Tensor) -> Tensor:
        """Where items stand among these; -1 for those that do not."""
        if self.ids is None or not len(self.ids):
            return items if self.ids is None else torch.full_like(items, -1)
        found = torch.searchsorted(self.ids, items.contiguous()).clamp(max=len(self.ids) - 1)
        return found.masked_fill(self.ids[found] != items, -1)


def check_depth(k: int, n_items: int) -> None:
    """Refuse to rank fewer than one item, or more than there are."""
    if k < 1:
        raise InputError(f"k must be at least 1; got {k}")
    if k > n_items:
        raise InputError(f"k is {k:,}, but the catalogue has only {n_items:,} items; ask for fewer")


def check_memory(catalogue: Tensor, batch_size: int) -> None:
    """Refuse to rank for a batch where the host has not the memory for its scores."""
    if catalogue.device.type == "cpu":
        chunk = max(_SCORES_AT_ONCE, batch_size * _SMALLEST_CHUNK)
        scores = 4 * min(chunk, batch_size * len(catalogue))
        doing = f"ranking {len(catalogue):,} items for {batch_size:,} users at once"
        remedy = f"free some, or take fewer users at once with {named('batch_size')}"
        require_memory(1.5 * scores, doing, remedy)


def longest_history(model: object) -> int | None:
    """Return how many events a model takes, its `max_length`; None: any number."""
    given = {"max_length": getattr(model, "max_length", None)}
    most: int | None = check_types(given, {"max_length": int | None})["max_length"]
    if most is not None and most < 1:
        raise InputError(f"max_length must be at least 1; it is {most}")
    return most


def uses_times(model: object) -> bool:
    """True for a model that is given the times of events: see `Backbone.uses_times`."""
    return bool(getattr(model, "uses_times", False))


def last_states(
    model: Callable[..., Tensor], histories: Tensor, max_length: int | None, times: Any = None
) -> Tensor:
    """Return the hidden state after each history [b, l], with the same bits in any batch.

    Products of another shape are computed in another order: each history is computed in a width
    that follows from its own length (at most `max_length`), and with a fixed number of others.
    `times` [b, l + 1] are for a model that uses them.
    """
    lengths = (histories != PADDING).sum(1)
    widths = lengths.clamp(min=1)
    if max_length is not None:
        widths = (-(-widths // _WIDTH_STEP) * _WIDTH_STEP).clamp(max=max_length)
    positions = _POSITIONS["cpu" if histories.device.type == "cpu" else "gpu"]
    found, order = [], []
    for width in widths.unique().tolist():
        at_once = max(1, positions // width)
        for rows in (widths == width).nonzero().squeeze(1).split(at_once):
            numbers = torch.arange(at_once, device=rows.device)
            given = histories[rows[numbers % len(rows)], :width]
            given = nn.functional.pad(given, (0, width - given.shape[1]), value=PADDING)
            more = {}
            if times is not None:
                known = times[rows[numbers % len(rows)], : width + 1]
                more = {"times": nn.functional.pad(known, (0, width + 1 - known.shape[1]))}
            states = model(given, **more)
            shape = list(getattr(states, "shape", ()))
            if len(shape) != 3 or shape[:2] != list(given.shape):
                raise InputError(
                    f"a model maps histories {list(given.shape)} to states of that shape and one "
                    f"dimension more; got {shape or type(states).__name__}"
                )
            found.append(states[numbers[: len(rows)], lengths[rows] - 1])
            order.append(rows)
    return torch.cat(found)[torch.cat(order).argsort()]


@torch.no_grad()
def top_k(
    states: Tensor,
    catalogue: Tensor | Rows,
    k: int,
    *,
    seen: tuple[Tensor, Tensor] | None = None,
    blocked: Tensor | None = None,
    chunk_size: int | None = None,
    norm: Tensor | None = None,
) -> Ranking:
    """Rank the k items with the largest product with each state; equal scores by item id.

    Rows with fewer items, because the others were seen or blocked, end in `NOTHING` with -inf.
    Scores are those of `rescore`, whatever the batch and whatever autocast says. An item whose
    score is not a number is never ranked.

    Args:
        states: [b, d].
        catalogue: [C, d]; or some `Rows` of it, and no other item is scored.
        k: Number of items.
        seen: Items never to be ranked: flat item ids, and the row of each.
        blocked: Items never to be ranked in any row, ascending; chosen `Rows` have none of them.
        chunk_size: Items scored at once; by default so many that the scores take 256 MiB.
        norm: `largest_norm(catalogue)`, where it is known; a bound, where vectors are scaled.
    """
    if chunk_size is None:
        chunk_size = max(_SMALLEST_CHUNK, _SCORES_AT_ONCE // max(1, len(states)))
    ids: Tensor | None = None
    if isinstance(catalogue, Rows):
        ids, chunk_size = catalogue.ids, min(chunk_size, _GATHERED)
        seen = seen and (catalogue.places(seen[0]), seen[1])
    autocast = torch.autocast(states.device.type, enabled=False)
    with autocast, matmul_precision(states.device, "float32"):
        if norm is None:
            norm = largest_norm(catalogue.catalogue if isinstance(catalogue, Rows) else catalogue)
        scores, items = _rank(states.float(), catalogue, k, seen, blocked, chunk_size, norm)
    items = items if ids is None else ids[items]
    items = items.masked_fill(scores == -torch.inf, NOTHING)
    missing = (0, k - items.shape[1])
    return Ranking(
        scores=nn.functional.pad(scores, missing, value=-torch.inf),
        items=nn.functional.pad(items, missing, value=NOTHING),
    )


def largest_norm(catalogue: Tensor) -> Tensor:
    """The largest norm of an item's vector."""
    dtype = torch.promote_types(catalogue.dtype, torch.float32)  # without a copy of the rows
    norms = [
        torch.linalg.vector_norm(chunk, dim=1, dtype=dtype).nan_to_num().amax()
        for chunk in catalogue.split(_NORMS_AT_ONCE)
    ]
    return torch.stack(norms).amax().float()


def _rank(
    states: Tensor,
    catalogue: Tensor | Rows,
    k: int,
    seen: tuple[Tensor, Tensor] | None,
    blocked: Tensor | None,
    chunk_size: int,
    norm: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rank candidates, the best of a matrix product, by their rescored products.

    Where its rounding errors could hide one of the k best, many more are rescored. Among thousands
    of items which are that close, those with the largest product in the matrix are taken.
    """
    n = min(k + _SPARE, len(catalogue))
    scores, items = _candidates(states, catalogue, n, seen, blocked, chunk_size)
    best, found = _order(states, catalogue, scores, items, k)
    if n == len(catalogue):
        return best, found
    # No other item's product is larger than the last candidate's; both have at most this error.
    norms = torch.linalg.vector_norm(states, dim=1)
    error = (states.shape[1] + 8) * 2**-24 * norms * norm
    last = scores[:, -1]
    in_doubt = (last > -torch.inf) & ~(last + error < best[:, -1])
    if not in_doubt.any():
        return best, found
    n = min(k + _SPARE_IN_DOUBT, len(catalogue))
    for rows in in_doubt.nonzero().squeeze(1).split(max(1, _SCORES_AT_ONCE // 8 // chunk_size)):
        theirs = None
        if seen is not None:  # numbered anew
            places = rows.new_full((len(states),), -1)
            places[rows] = torch.arange(len(rows), device=rows.device)
            of = places[seen[1]]
            theirs = seen[0][of >= 0], of[of >= 0]
        some = _candidates(states[rows], catalogue, n, theirs, blocked, chunk_size, ties_by_id=True)
        best[rows], found[rows] = _order(states[rows], catalogue, *some, k)
    return best, found


def _candidates(
    states: Tensor,
    catalogue: Tensor | Rows,
    n: int,
    seen: tuple[Tensor, Tensor] | None,
    blocked: Tensor | None,
    chunk_size: int,
    *,
    ties_by_id: bool = False,
) -> tuple[Tensor, Tensor]:
    """The n items with the largest products, in float32, and these, in falling order."""
    scores = states.new_empty(len(states), 0)
    items = torch.empty(len(states), 0, dtype=torch.int64, device=states.device)
    firsts = range(0, len(catalogue), chunk_size)
    if blocked is not None:
        limits = torch.tensor([*firsts, len(catalogue)], device=blocked.device)
        by_chunk = blocked.tensor_split(torch.searchsorted(blocked, limits).cpu())[1:]
    for number, first in enumerate(firsts):
        products = states @ catalogue[first : first + chunk_size].float().T
        if seen is not None:
            _mask(products, *seen, first)
        if blocked is not None and len(by_chunk[number]):
            # Adding is several times faster than filling where a mask says so.
            products += products.new_zeros(products.shape[1]).index_fill_(
                0, by_chunk[number] - first, -torch.inf
            )
        largest, most = _largest_by_id if ties_by_id else _largest, min(n, products.shape[1])
        values, columns = largest(products, most)
        if values.isnan().any():
            products.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
            values, columns = largest(products, most)
        del products  # before there are those of the next chunk
        scores, items = torch.cat([scores, values], 1), torch.cat([items, first + columns], 1)
        # Items of earlier chunks come first: a stable sort keeps the lower ids.
        scores, places = scores.sort(dim=1, descending=True, stable=True)
        scores, items = scores[:, :n], items.gather(1, places[:, :n])
    return scores, items


def _order(
    states: Tensor, catalogue: Tensor | Rows, scores: Tensor, items: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k best of the candidates, rescored; equal scores by item id."""
    rescored = rescore(states, catalogue, items)
    rescored.masked_fill_((scores == -torch.inf) | rescored.isnan(), -torch.inf)
    items, order = items.sort(dim=1)
    best, order = rescored.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best[:, :k].contiguous(), items.gather(1, order)[:, :k].contiguous()


def rescore(
    states: Tensor, catalogue: Tensor | Rows, items: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Products of states [b, d] with some items [b, n] each, of bits that depend on nothing else.

    In float64, added up in one order, element by element. With `dtype`, items are rounded to it.
    """
    number, dim = torch.arange(len(items), device=items.device), states.shape[1]
    at_once, found = max(1, _PRODUCTS_AT_ONCE // dim), [states.new_empty(0)]
    pairs = items.flatten().split(at_once), number.repeat_interleave(items.shape[1]).split(at_once)
    for some, of in zip(*pairs, strict=True):
        rounded = catalogue[some].to(dtype or catalogue.dtype)
        products, width = rounded.double().mul_(states[of]), dim
        while width > 1:
            half = width // 2
            products[:, :half] += products[:, width - half : width]
            width -= half
        found.append(products[:, 0].float() + 0.0)  # + 0.0: there are two zeros
    return torch.cat(found).view(items.shape)


class Popularity:
    """The most popular items for everybody: the baseline of any model, a ranker of width 1."""

    def __init__(self, train: Ragged, n_items: int, *, device: torch.device | str = "cpu") -> None:
        """Count how often each item occurs in the training sequences."""
        self.counts = count_items(train.items, n_items)
        places = np.argsort(np.argsort(-self.counts, kind="stable"))
        # Scores by place, not count: float32 could not tell large counts apart, and without ties
        # ranking is quicker. Beyond 16 million items the rarest share the score 0.
        scores = np.maximum(_EXACT_INTEGERS - places, 0).astype(np.float32)
        self.catalogue = torch.from_numpy(scores[:, None]).to(device)

    def __call__(self, histories: Tensor) -> Tensor:
        """Return the same state for every history."""
        return torch.ones(*histories.shape, 1, device=self.catalogue.device)


def _mask(scores: Tensor, items: Tensor, rows: Tensor, first: int) -> None:
    # Adding -inf where an item is in this chunk and 0 where not: choosing those that are would
    # need their number, a sync.
    width = scores.shape[1]
    columns = items - first
    inside = (columns >= 0) & (columns < width)
    places = rows * width + columns.clamp(0, width - 1)
    penalties = torch.zeros_like(places, dtype=scores.dtype).masked_fill_(inside, -torch.inf)
    scores.view(-1).scatter_add_(0, places, penalties)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what topk does, faster on long rows: the largest lie in k groups of largest maxima."""
    rows, width = scores.shape
    groups = width // _GROUP
    if groups < 2 * k:
        return scores.topk(k)
    grouped = scores[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    chosen = grouped.amax(2).topk(k, sorted=False).indices
    values = grouped.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    offsets = torch.arange(_GROUP, device=scores.device)
    columns = (chosen[:, :, None] * _GROUP + offsets).flatten(1)
    rest = torch.arange(groups * _GROUP, width, device=scores.device)
    values = torch.cat([values, scores[:, groups * _GROUP :]], dim=1)
    columns = torch.cat([columns, rest.expand(rows, -1)], dim=1)
    values, places = values.topk(k)
    return values, columns.gather(1, places)


def _largest_by_id(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what topk does, with ties by column."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    columns = key_items(pack_keys(scores, columns).topk(k).values)
    return scores.gather(1, columns), columns


def pack_keys(scores: Tensor, items: Tensor) -> Tensor:
    """Pack float32 scores and items below 2³¹ into integers: larger scores first, lower items."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: there are two zeros
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # negative floats order backwards
    return (bits << 32) | (0x7FFFFFFF - items)


def key_items(keys: Tensor) -> Tensor:
    """Return the items that were packed."""
    return 0x7FFFFFFF - (keys & 0xFFFFFFFF)


def key_scores(keys: Tensor) -> Tensor:
    """Return the scores that were packed."""
    bits = (keys >> 32).int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)
