"""A table in parts of consecutive ids, of which each rank has one at a time, and its shards."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sce.distributed.ranks import Ranks


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
