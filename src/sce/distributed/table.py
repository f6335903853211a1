"""An item table of which each rank holds a shard: rows by id, and their gradients home.

Item i is at place i // R of rank i % R: no index is needed, the order of a shard is that of the
ids, and no shard has more of the popular items than another, however ids were given.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sce.distributed.ranks import Ranks
from sce.errors import InputError, checked

_BLOCK = 1 << 16  # ids whose rows are drawn together
_MOST_ITEMS = 2**31 - 1  # an id is 31 bits of a key


@dataclass(frozen=True)
class Rows:
    """Rows of the table, fetched from all ranks: a table of their own for one step."""

    ids: Tensor  # [u], ascending
    values: Tensor  # [u, d], a leaf, in float32 or wider
    told: list[int] | None = None  # by each rank to all: see `ShardedCrossEntropy.look_up`

    def places(self, ids: Tensor) -> Tensor:
        """Return where ids are among the rows; negative ones, such as padding, stay."""
        return torch.searchsorted(self.ids, ids.long().contiguous()).where(ids >= 0, ids)


@dataclass(frozen=True)
class Wanted:
    """Rows that are to be fetched; the host of every rank knows how many from whom."""

    ids: Tensor  # [u], by the rank that has them, ascending there
    send: list[int]  # ids for each rank
    receive: list[int]  # how many each wants from here
    notes: list[int]  # what each rank told beside


class _Plan(NamedTuple):
    """Rows that are to be wanted; only the device knows how many."""

    ids: Tensor  # [n], by the rank that has them, ascending there; behind them what is not wanted
    told: Tensor  # [R, 2]: ids for each rank, and the note
    ends: Tensor  # [2], or none: the smallest id and the largest


class _OnItsWay:
    """A number that is copied to the host while the device goes on."""

    def __init__(self, number: Tensor) -> None:
        self.number, self.event = number.to("cpu", non_blocking=True), None
        if number.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(number.device))

    def get(self) -> int:
        """Wait for what was computed before the number, and for nothing that came after."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.number)


class _Sorted(NamedTuple):
    """The entries of a gradient, by place in the shard."""

    places: Tensor  # [n], ascending
    order: Tensor  # [n]
    run: Tensor  # [n]: the number of the row, from 0
    n_rows: _OnItsWay


class _Fetch(NamedTuple):
    """An exchange of rows, which gradients go back along."""

    values: Tensor  # [u, d], of which the gradient is sent home
    order: Tensor  # [u]: the rows by the rank that has them
    send: list[int]  # rows from each rank
    served: Tensor  # [n]: places in the shard that others, and we, asked for, by rank
    receive: list[int]  # how many each asked for


class ShardedTable(nn.Module):
    """Item embeddings [n_items, dim] over all ranks, of which `shard` are those here.

    All ranks make it together, and call its methods together.

    A step looks up rows, computes with them, and calls `send_gradients` after `backward`: `shard`
    then has a coalesced sparse gradient, summed over ranks, for `sce.RowwiseAdagrad`. Where a rank
    has several batches a step, `collect_gradients` follows each, and `send_gradients` the last.

    Args:
        n_items: Items in the catalogue.
        dim: Their width.
        ranks: The processes that share it, by default this one alone.
        seed: New rows follow from it and their ids: the same table for any number of ranks.
        dtype: Of the shard. Gradients are added up in float32 or wider.
        rows: All rows of the table, of which the shard is copied, in place of new ones.
    """

    @checked
    def __init__(
        self,
        n_items: int,
        dim: int,
        ranks: Ranks | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        rows: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.ranks = Ranks() if ranks is None else ranks
        rank, size = self.ranks.rank, self.ranks.size
        if not 1 <= n_items <= _MOST_ITEMS:
            raise InputError(f"a table has from 1 to {_MOST_ITEMS:,} items; got {n_items:,}")
        if dim < 1 or seed < 0:
            raise InputError(f"dim is at least 1, and seed not negative; got {dim} and {seed}")
        if not dtype.is_floating_point:
            raise InputError(f"dtype must be floating point; got {dtype}")
        if rows is not None and rows.shape != (n_items, dim):
            raise InputError(f"rows must be [{n_items}, {dim}]; got {list(rows.shape)}")
        self.n_items, self.dim = n_items, dim
        if rows is None:
            n_rows = first_place(n_items, rank, size)
            shard = torch.empty(n_rows, dim, dtype=dtype, device=self.ranks.device)
            self._draw(shard, seed)
        else:
            shard = rows.detach()[rank::size].to(self.ranks.device, dtype, copy=True)
        self.shard = nn.Parameter(shard)
        self._fetches: list[_Fetch] = []
        self._entries: list[tuple[Tensor, Tensor]] = []  # places in the shard, and gradients
        self._sorted: _Sorted | None = None  # of all of them
        self._expected: tuple[Tensor, _Plan] | tuple[None, None] = (None, None)
        self._ready: tuple[Tensor, Wanted] | None = None

    def _draw(self, shard: Tensor, seed: int) -> None:
        """Draw the rows of a shard: each rank draws some blocks of the table, for all ranks."""
        bound = math.sqrt(6 / (self.n_items + self.dim))  # of Xavier, as in one process
        for each in rounds(self.ranks, self.n_items, _BLOCK):
            drawn = torch.empty(sum(each.receive), self.dim)
            if each.part is not None:
                state = np.random.SeedSequence([seed, each.part]).generate_state(1, np.uint64)
                generator = torch.Generator().manual_seed(int(state[0]) >> 1)
                drawn.uniform_(-bound, bound, generator=generator)
            given = each.cut(drawn.to(shard.device, shard.dtype))
            shard[each.here] = self.ranks.exchange(given, each.receive, each.send)

    def look_up(self, ids: Tensor) -> Rows:
        """Fetch the rows of some ids, each once; negative ones, such as padding, are passed over.

        With gradients enabled, those of the rows go home with `send_gradients`.
        """
        return self.fetch(self.want(ids, padded=True))

    @checked
    @torch.no_grad()
    def want(
        self,
        ids: Tensor,
        *,
        padded: bool = False,
        besides: Tensor | None = None,
        note: int | Tensor = 0,
    ) -> Wanted:
        """Tell each rank how many of its rows are wanted: a sync, the only one of a look-up.

        With `padded`, negative ids are passed over. `besides` are ids that are not wanted,
        ascending; `note` is a number for all ranks, not negative, which travels along.
        """
        if self._ready is not None and self._ready[0] is ids:
            (_, wanted), self._ready = self._ready, None
            return wanted
        size, (later, plan), self._expected = self.ranks.size, self._expected, (None, None)
        plans = [self._plan(ids, note, besides), plan or self._plan(ids.flatten()[:0], -1)]
        told = torch.cat([plan.told for plan in plans], dim=1)
        theirs = self.ranks.exchange(told.flatten(), [4] * size, [4] * size).view(size, 4)
        numbers = torch.cat([told[:, ::2], theirs], dim=1).T.flatten()
        known = torch.cat([numbers, *(plan.ends for plan in plans)]).tolist()
        by_rank, ends = [known[n : n + size] for n in range(0, 6 * size, size)], known[6 * size :]
        whole = 0 if padded else len(plans[0].ends)
        outside = [i for i in ends if i >= self.n_items] + [i for i in ends[:whole] if i < 0]
        if outside:
            raise InputError(f"item {outside[0]} is not in the catalogue of {self.n_items:,} items")
        wanted, next_wanted = (
            Wanted(plan.ids[: sum(send)], send, *others)
            for plan, send, *others in zip(
                plans, by_rank[:2], by_rank[2::2], by_rank[3::2], strict=True
            )
        )
        if later is not None and min(next_wanted.notes) >= 0:
            self._ready = later, next_wanted
        return wanted

    @checked
    @torch.no_grad()
    def expect(self, ids: Tensor, note: int | Tensor = 0) -> None:
        """Let the next `want` tell the sizes of a later `want(ids, padded=True)` of this tensor.

        That is a sync after all if a rank expects nothing. Ranks want the same in the same order.
        """
        self._expected = ids, self._plan(ids, note)

    def _plan(self, ids: Tensor, note: int | Tensor, besides: Tensor | None = None) -> _Plan:
        """Put ids in order, each once. Shapes that depend on values would be a sync each."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != self.shard.device:
            what = f"ids of items must be int64 or int32, on {self.shard.device} as the table is"
            raise InputError(f"{what}; got {ids.dtype} on {ids.device}")
        size, ids = self.ranks.size, ids.long().flatten().sort().values
        new = ids >= 0
        new[1:] &= ids[1:] != ids[:-1]
        if besides is not None:
            near = torch.cat([besides, besides.new_full((1,), -1)])
            new &= near[torch.searchsorted(besides, ids)] != ids
        owners, order = (ids % size).where(new, size).sort(stable=True)
        counts = torch.searchsorted(owners, torch.arange(size + 1, device=ids.device)).diff()
        notes = note.expand(size) if isinstance(note, Tensor) else counts.new_full((size,), note)
        ends = torch.cat([ids[:1], ids[-1:]])
        return _Plan(ids[order], torch.stack([counts, notes], dim=1), ends)

    def fetch(self, wanted: Wanted) -> Rows:
        """Fetch the rows that were wanted."""
        ranks, send, receive = self.ranks, wanted.send, wanted.receive
        served = ranks.exchange((wanted.ids // ranks.size).int(), send, receive)
        found = ranks.exchange(self.shard.detach()[served], receive, send)
        ids = wanted.ids.sort().values
        order = torch.searchsorted(ids, wanted.ids)
        wide = torch.promote_types(found.dtype, torch.float32)
        values = torch.empty_like(found, dtype=wide)
        values[order] = found.to(wide)
        if torch.is_grad_enabled() and self.shard.requires_grad:
            values.requires_grad_()
            self._fetches.append(_Fetch(values, order, send, served, receive))
            self._sorted = None
        return Rows(ids, values)

    @torch.no_grad()
    def sort_places(self) -> _Sorted:
        """Sort the rows that are to have a gradient, and begin to count them.

        Before the backward pass it spares the host to wait in `send_gradients`, which else does it.
        """
        if self._sorted is None:
            parts = [places for places, _ in self._entries]
            if self._fetches:
                parts.append(_served(self._fetches))
            places, order = torch.cat(parts).sort(stable=True)
            first = torch.ones_like(places)
            first[1:] = places[1:] != places[:-1]
            run = first.cumsum(0)
            self._sorted = _Sorted(places, order, run - 1, _OnItsWay(run[-1:].sum()))
        return self._sorted

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Send the gradients of fetched rows home, where they wait for `send_gradients`."""
        fetches, self._fetches = self._fetches, []
        if not fetches:
            return
        # To each rank the rows of one fetch after another, so that entries come in the order of
        # ranks, and of fetches within a rank.
        parts = [
            (torch.zeros_like(f.values) if f.values.grad is None else f.values.grad)[f.order]
            for f in fetches
        ]
        send, receive = [f.send for f in fetches], [f.receive for f in fetches]
        sums = ([*map(sum, zip(*each, strict=True))] for each in (send, receive))
        values = self.ranks.exchange(_interleave(parts, send), *sums)
        self._entries.append((_served(fetches), values))

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Send the gradients of fetched rows home, and add them up there, rank by rank."""
        self.collect_gradients()
        if not self._entries:
            return
        places, order, run, n_rows = self.sort_places()
        values = torch.cat([values for _, values in self._entries])
        self._entries, self._sorted = [], None
        begins = torch.searchsorted(run, torch.arange(n_rows.get() + 1, device=run.device))
        rows = places[begins[:-1]]
        if len(rows):  # a segment must have something in it
            lengths = begins.diff()
            values = torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True)
        self.shard.grad = torch.sparse_coo_tensor(
            rows.long().unsqueeze(0),
            values.to(self.shard.dtype),
            self.shard.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def _served(fetches: list[_Fetch]) -> Tensor:
    """Return the places of all entries, in the order in which gradients come."""
    return _interleave([f.served for f in fetches], [f.receive for f in fetches])


def _interleave(parts: list[Tensor], counts: list[list[int]]) -> Tensor:
    """Join parts that are cut by rank: those of all parts for rank 0, for rank 1, ..."""
    cut = [part.split(each) for part, each in zip(parts, counts, strict=True)]
    return torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces])


class Round(NamedTuple):
    """An exchange in which each rank has one part of the table, or none."""

    part: int | None  # number of the part here
    offsets: list[int]  # of the first row of each rank in it
    receive: list[int]  # rows of each rank in it
    send: list[int]  # rows of this rank in each part
    here: slice  # places of these in the shard

    def cut(self, rows: Tensor) -> Tensor:
        """Put the rows of the part by the rank that has them."""
        return torch.cat([rows[offset :: len(self.offsets)] for offset in self.offsets])


def rounds(ranks: Ranks, n_items: int, part_items: int) -> Iterator[Round]:
    """Yield the exchanges between parts and shards of a table."""
    rank, size = ranks.rank, ranks.size

    def place(part: int, of: int) -> int:
        return first_place(min(part * part_items, n_items), of, size)

    n_parts = -(-n_items // part_items)
    for base in range(0, n_parts, size):
        mine = base + rank
        yield Round(
            part=mine if mine < n_parts else None,
            offsets=[(of - mine * part_items) % size for of in range(size)],
            receive=[place(mine + 1, of) - place(mine, of) for of in range(size)],
            send=[place(part + 1, rank) - place(part, rank) for part in range(base, base + size)],
            here=slice(place(base, rank), place(base + size, rank)),
        )


def first_place(item: int, of: int, size: int) -> int:
    """Return the first place in the shard of a rank that is of this item or a later one."""
    return -(-(item - of) // size)
