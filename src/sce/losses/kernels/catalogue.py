"""The gradient of the catalogue: rows of places in buckets and of targets, added up by item.

Entries are sorted by item, and one program adds up all of an item's in that order: no atomics, the
same bits in every run. Beyond `MAX_PARTS` they are added up in groups of buckets; the sums between
groups are in the catalogue's precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.buckets import MAX_PARTS, MAX_SORTED
from sce.losses.kernels.backward import (
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
    states = order_states(saved, grad, reduction)
    if sparse and at_once >= n_buckets and len(saved.keys) <= len(y):
        out = y.new_zeros(len(saved.keys), y.shape[1])
        places = grad_places(saved, states, reduction, 0, n_buckets)
        items, order = saved.keys.sort(stable=True)
        _add(saved, items, order, places, grad, reduction, out, sparse=True)
        return _as_sparse(items, out, y.shape)
    # Where it is sparse: rows for all entries would be more than items, or entries come in groups.
    rows, keys = _compact(saved.keys, len(y)) if sparse else (None, saved.keys)
    out = y.new_zeros(len(y) if rows is None else len(rows), y.shape[1])
    # Groups are sorted together: a sort takes long, however little it sorts.
    groups = min(MAX_SORTED // (at_once * size_y), _NO_ROW // (len(y) + 1))
    together = max(1, groups) * at_once
    for first in range(0, n_buckets, together):
        last = min(n_buckets, first + together)
        some = keys[first * size_y : last * size_y if last < n_buckets else None]
        items, order = _sort_in_groups(
            some, len(y), at_once * size_y, ceil_div(last - first, at_once)
        )
        for begin in range(first, last, at_once):
            end = min(last, begin + at_once)
            group, place = (begin - first) // at_once, (begin - first) * size_y
            its = slice(place, None if end == last else (end - first) * size_y)
            # Parts have no name here: they must be gone before the next.
            _add(
                saved, items[its], order[its],
                grad_places(saved, states, reduction, begin, end), grad, reduction, out,
                more=begin > 0, before=group * (len(y) + 1), place=place,
            )  # fmt: skip
        del items, order  # before the next are sorted
    if rows is None:
        return out
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), out, y.shape, is_coalesced=not _capturing(), check_invariants=False
    )


def _sort_in_groups(keys: Tensor, n_items: int, size: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """Sort each group of so many keys, the last with what remains, and say where each was.

    A key has n_items + 1 added for each group before its own.
    """
    if n_groups > 1:
        group = torch.arange(len(keys), device=keys.device, dtype=keys.dtype).div_(
            size, rounding_mode="floor"
        )
        keys = group.clamp_(max=n_groups - 1).mul_(n_items + 1).add_(keys.clamp(max=n_items))
    items, order = keys.sort(stable=True)
    return items, order


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
    items: Tensor,
    order: Tensor,
    places: Tensor,
    grad: Tensor,
    reduction: str,
    out: Tensor,
    *,
    sparse: bool = False,
    more: bool = False,
    before: int = 0,
    place: int = 0,
) -> None:
    """Add up by item the rows of places and, behind them, of targets.

    They are listed by item, with where each was: numbers that begin with `before` and `place`. The
    sums go to the rows of `out` that the items name; where `sparse`, to the places of the first of
    equal items in the list. Numbers beyond the catalogue are of no item.
    """
    x, block_d = saved.x, power_of_2(saved.x.shape[1])
    entries, n_places = 8, places.shape[0] * places.shape[1]
    launch(
        _add_by_item_kernel, (ceil_div(len(items), entries),),
        items, order, places, x, saved.packed, saved.n_won, grad, out,
        len(items), before, place, n_places, len(saved.y), x.shape[1], x.stride(0),
        REDUCTION=reduction, SPARSE=sparse, MORE=more, TARGETS=len(items) > n_places,
        BLOCK=entries, BLOCK_D=block_d, ROUND=half_name(saved.autocast_dtype),
        num_warps=max(1, block_d // 64),
    )  # fmt: skip


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
    i, mask, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr, place, n_places, d, stride_x,
    REDUCTION: tl.constexpr, TARGETS: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the rows that entries add to their items, [i, d]."""
    source = tl.load(order_ptr + i, mask=mask, other=place) - place
    rows = load_rows(places_ptr, source, mask & (source < n_places), d, 0, d, BLOCK_D, "")
    rows = rows.to(tl.float32)
    if TARGETS:
        is_positive = mask & (source >= n_places)
        state = source - n_places
        loss = packed_value(tl.load(packed_ptr + state, mask=is_positive, other=0))
        x = load_rows(x_ptr, state, is_positive, stride_x, 0, d, BLOCK_D, ROUND)
        weight = tl.exp(-loss) - 1.0
        if REDUCTION == "none":
            weight *= tl.load(grad_ptr + state, mask=is_positive, other=0.0).to(tl.float32)
        rows += weight[:, None] * x.to(tl.float32)
    return rows


@triton.jit
def _add_by_item_kernel(
    items_ptr,  # [n] ascending
    order_ptr,  # [n] where each came from: a place in a bucket, or a state with this target
    places_ptr, x_ptr, packed_ptr, count_ptr, grad_ptr, out_ptr,
    n, before, place, n_places, n_items, d, stride_x,
    REDUCTION: tl.constexpr, SPARSE: tl.constexpr, MORE: tl.constexpr,
    TARGETS: tl.constexpr,  # are among the entries
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Add up the items whose entries begin in a block; they may go on behind it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.load(items_ptr + i, mask=i < n, other=2147483647) - before
    mask = item < n_items  # what belongs to no item sorts behind the last
    previous = tl.load(items_ptr + i - 1, mask=(i > 0) & (i < n), other=-1) - before
    first = mask & ((item != previous) | (i == 0))
    if tl.max(first.to(tl.int32), axis=0) > 0:
        rows = _entries(
            i, first, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr,
            place, n_places, d, stride_x, REDUCTION, TARGETS, BLOCK_D, ROUND,
        )  # fmt: skip
        # All but the last item of the block have their entries in it, mostly few.
        final = tl.max(tl.where(mask, item, -1), axis=0)
        count = tl.sum((item[:, None] == item[None, :]).to(tl.int32), axis=1)
        count = tl.where(first & (item != final), count, 1)
        for step in range(1, tl.max(count, axis=0)):
            rows += _entries(
                i + step, step < count, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr,
                place, n_places, d, stride_x, REDUCTION, TARGETS, BLOCK_D, ROUND,
            )  # fmt: skip
        # The last may go on behind it, and have many: first they are counted.
        begin = tl.max(tl.where(first & (item == final), i, -1), axis=0) + 1
        end = begin
        more = tl.minimum(begin, 1)  # 0: it began in an earlier block
        while more > 0:
            j = end + tl.arange(0, 128)
            same = tl.load(items_ptr + j, mask=j < n, other=-1) == final + before
            found = tl.sum(same.to(tl.int32), axis=0)
            end += found
            more = found // 128  # 1 while all were of this item
        rest = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(begin, end, BLOCK):
            j = start + tl.arange(0, BLOCK)
            others = _entries(
                j, j < end, order_ptr, places_ptr, x_ptr, packed_ptr, grad_ptr,
                place, n_places, d, stride_x, REDUCTION, TARGETS, BLOCK_D, ROUND,
            )  # fmt: skip
            rest += tl.sum(others, axis=0)
        rows += tl.where((item == final)[:, None], rest[None, :], 0.0)
        rows *= common_scale(grad_ptr, count_ptr, REDUCTION)
        i_d = tl.arange(0, BLOCK_D)
        row = i if SPARSE else item
        at = out_ptr + row[:, None].to(tl.int64) * d + i_d[None, :]
        kept = first[:, None] & (i_d < d)[None, :]
        if MORE:
            rows += tl.load(at, mask=kept, other=0.0).to(tl.float32)
        tl.store(at, rows.to(out_ptr.dtype.element_ty), mask=kept)
