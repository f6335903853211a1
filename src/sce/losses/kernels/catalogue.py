"""The gradient of the catalogue: rows of places in buckets and of targets, added up by item.

Entries are sorted by item, and one program adds up all of an item's in that order: no atomics, the
same bits in every run. Beyond `MAX_PARTS` they are added up in groups of buckets; the sums between
groups are in the catalogue's precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.buckets import MAX_PARTS
from sce.losses.kernels.backward import (
    Ordered,
    Saved,
    common_scale,
    grad_places,
    order_states,
    parts_dtype,
)
from sce.losses.kernels.bucketed import packed_value
from sce.losses.kernels.launch import ceil_div, launch, power_of_2
from sce.losses.kernels.precision import half_name, load_rows

_NO_ROW = 2**31 - 1


def grad_catalogue(saved: Saved, grad: Tensor, reduction: str, *, sparse: bool) -> Tensor:
    """Return the gradient of the catalogue [c, d]: dense, or sparse with the touched rows alone."""
    y, (n_buckets, size_y) = saved.y, saved.items.shape
    at_once = max(1, MAX_PARTS // (size_y * y.shape[1] * parts_dtype(saved).itemsize))
    whole, states = at_once >= n_buckets, order_states(saved, grad, reduction)
    if sparse and whole and len(saved.keys) <= len(y):
        out = y.new_zeros(len(saved.keys), y.shape[1])
        places = grad_places(saved, states, reduction, 0, n_buckets)
        items = _add(saved, saved.keys, places, grad, reduction, out, sparse=True)
        return _as_sparse(items, out, y.shape)
    # Where it is sparse: rows for all entries would be more than items, or entries come in groups.
    rows, keys = _compact(saved.keys, len(y)) if sparse else (None, saved.keys)
    out = y.new_zeros(len(y) if rows is None else len(rows), y.shape[1])
    if whole:
        _add(saved, keys, grad_places(saved, states, reduction, 0, n_buckets), grad, reduction, out)
    else:
        _add_in_groups(saved, states, keys, grad, reduction, out, at_once)
    if rows is None:
        return out
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), out, y.shape, is_coalesced=not _capturing(), check_invariants=False
    )


def _add_in_groups(
    saved: Saved, states: Ordered, keys: Tensor, grad: Tensor, reduction: str, out: Tensor,
    at_once: int,
) -> None:  # fmt: skip
    """Add up to the rows of `out` that keys name, so many buckets at once; targets come last."""
    n_buckets, size_y = saved.items.shape
    for first in range(0, n_buckets, at_once):
        last = min(n_buckets, first + at_once)
        # Parts have no name here: they must be gone before the next.
        _add(
            saved, keys[first * size_y : last * size_y if last < n_buckets else None],
            grad_places(saved, states, reduction, first, last), grad, reduction, out,
            more=first > 0,
        )  # fmt: skip


def _compact(keys: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """Number the items that occur among the keys: the items, ascending, and each key's number.

    Keys of no item have a number behind all others.
    """
    items, order = keys.sort()
    first = items < n_items
    first[1:] &= items[1:] != items[:-1]
    number = first.cumsum(0, dtype=keys.dtype) - 1
    if _capturing():
        # How many there are is not known on the host, which must not wait here: behind the last
        # come rows of zeros, for the last item.
        most = min(len(keys), n_items)
        place = number.where(first, most).long()
        rows = items.new_full((most + 1,), n_items - 1).scatter_(0, place, items)[:most].long()
    else:
        rows = items[first].long()
    number = number.where(items < n_items, _NO_ROW)
    return rows, torch.empty_like(keys).scatter_(0, order, number)


def _add(
    saved: Saved,
    keys: Tensor,
    places: Tensor,
    grad: Tensor,
    reduction: str,
    out: Tensor,
    *,
    sparse: bool = False,
    more: bool = False,
) -> Tensor:
    """Add up by item the rows of places and, where their keys follow, of targets.

    The sums go to the rows of `out` that the keys name; where `sparse`, to the places of the first
    of equal keys once they are sorted, which are returned. Keys beyond the catalogue are of no
    item.
    """
    items, order = keys.sort(stable=True)
    x, block_d = saved.x, power_of_2(saved.x.shape[1])
    # Of a program: more where items have many. Dense or sparse, recorded or not, they are as many.
    entries = 8 if len(items) <= 4 * len(saved.y) else 16
    launch(
        _add_by_item_kernel, (ceil_div(len(items), entries),),
        items, order, places, x, saved.packed, saved.n_won, grad, out,
        len(items), places.shape[0] * places.shape[1], len(saved.y),
        x.shape[1], x.stride(0), REDUCTION=reduction, SPARSE=sparse, MORE=more, BLOCK=entries,
        BLOCK_D=block_d, ROUND=half_name(saved.autocast_dtype),
        num_warps=max(entries // 8, block_d // 64),
    )  # fmt: skip
    return items


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _as_sparse(items: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Make a sparse tensor of sums, each of which is at the first of its item's entries."""
    if _capturing():
        # How many rows are touched is not known on the host, which must not wait here: the other
        # entries of an item stay, with zeros, and those of no item go to the last row.
        index = items.long().clamp_(max=shape[0] - 1).unsqueeze(0)
        return torch.sparse_coo_tensor(index, values, shape, check_invariants=False)
    first = torch.ones_like(items, dtype=torch.bool)
    torch.ne(items[1:], items[:-1], out=first[1:])
    kept = (first & (items < shape[0])).nonzero().squeeze(1)
    index = items[kept].long().unsqueeze(0)
    return torch.sparse_coo_tensor(
        index, values[kept], shape, is_coalesced=True, check_invariants=False
    )


@triton.jit
def _entries(
    i, mask, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr, n_places, d, stride_x,
    REDUCTION: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the rows that entries add to their items, [i, d]."""
    source = tl.load(order_ptr + i, mask=mask, other=0)
    part = load_rows(places_ptr, source, mask & (source < n_places), d, 0, d, BLOCK_D, "")
    is_positive = mask & (source >= n_places)
    state = source - n_places
    loss = packed_value(tl.load(packed_ptr + state, mask=is_positive, other=0))
    x = load_rows(x_ptr, state, is_positive, stride_x, 0, d, BLOCK_D, ROUND)
    weight = tl.exp(-loss) - 1.0
    if REDUCTION == "none":
        weight *= tl.load(grad_ptr + state, mask=is_positive, other=0.0).to(tl.float32)
    return part.to(tl.float32) + weight[:, None] * x.to(tl.float32)


@triton.jit
def _add_by_item_kernel(
    items_ptr,  # [n] ascending
    order_ptr,  # [n] where each came from: a place in a bucket, or a state with this target
    places_ptr, x_ptr, packed_ptr, count_ptr, grad_ptr, out_ptr, n, n_places, n_items, d, stride_x,
    REDUCTION: tl.constexpr, SPARSE: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.load(items_ptr + i, mask=i < n, other=2147483647)
    mask = item < n_items  # what belongs to no item sorts behind the last
    if tl.max(mask.to(tl.int32), axis=0) > 0:
        i_d = tl.arange(0, BLOCK_D)
        rows = _entries(
            i, mask, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr,
            n_places, d, stride_x, REDUCTION, BLOCK_D, ROUND,
        )  # fmt: skip
        # Each entry adds up itself and the later ones of its item in this block. Only the first of
        # an item is kept.
        column = tl.arange(0, BLOCK)
        same = (item[:, None] == item[None, :]) & (column[None, :] >= column[:, None])
        total = tl.sum(tl.where(same[:, :, None], rows[None, :, :], 0.0), axis=1)
        before = tl.load(items_ptr + i - 1, mask=(i > 0) & (i < n), other=-1)
        first = mask & (item != before)
        # The last item of the block may go on behind it.
        final = tl.max(tl.where(mask, item, -1), axis=0)
        rest = tl.zeros((BLOCK_D,), tl.float32)
        starts = tl.max((first & (item == final)).to(tl.int32), axis=0)
        begin = (tl.program_id(0) + 1) * BLOCK
        while starts > 0:
            j = begin + tl.arange(0, BLOCK)
            more = tl.load(items_ptr + j, mask=j < n, other=-1) == final
            starts = tl.sum(more.to(tl.int32), axis=0)
            if starts > 0:
                others = _entries(
                    j, more, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr,
                    n_places, d, stride_x, REDUCTION, BLOCK_D, ROUND,
                )  # fmt: skip
                rest += tl.sum(others, axis=0)
            starts = starts // BLOCK  # 1 while the whole block was of this item
            begin += BLOCK
        total += tl.where((item == final)[:, None], rest[None, :], 0.0)
        total *= common_scale(grad_ptr, count_ptr, REDUCTION)
        row = i if SPARSE else item
        at = out_ptr + row[:, None].to(tl.int64) * d + i_d[None, :]
        kept = first[:, None] & (i_d < d)[None, :]
        if MORE:
            total += tl.load(at, mask=kept, other=0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=kept)
