"""The k best items of a sharded table for each state: the ranking of one process."""

import torch
from torch import Tensor

from sce.distributed.nearest import NO_KEY
from sce.distributed.table import ShardedTable
from sce.evaluation.ranking import (
    NOTHING,
    Ranking,
    key_items,
    key_scores,
    pack_keys,
    top_k,
)


@torch.no_grad()
def sharded_top_k(
    states: Tensor, table: ShardedTable, k: int, *, seen: tuple[Tensor, Tensor] | None = None
) -> Ranking:
    """Rank the k items with the largest product with each state, as `top_k` does in one process.

    Args:
        states: [b, d] of this rank; ranks may have different numbers of them.
        table: The items.
        k: Number of items.
        seen: Items never to be ranked: flat item ids, and the row of each. All ranks give them, or
            none does.
    """
    ranks = table.ranks
    items, rows = seen or (torch.empty(0, dtype=torch.int64, device=states.device),) * 2
    found = ranks.gather_counts(len(states), len(items))
    counts, pairs = [n for n, _ in found], [n for _, n in found]
    rows = rows + sum(counts[: ranks.rank])
    every = ranks.gather(states.float(), counts)
    items, rows = ranks.gather(torch.stack([items, rows], dim=1), pairs).unbind(1)
    here = items % ranks.size == ranks.rank
    theirs = items[here] // ranks.size, rows[here]
    scores, places = top_k(every, table.shard.detach(), k, seen=theirs)
    keys = pack_keys(scores, places * ranks.size + ranks.rank)
    keys = keys.masked_fill(places == NOTHING, NO_KEY)
    n = len(states)
    merged = ranks.exchange(keys, counts, [n] * ranks.size).unflatten(0, (ranks.size, n))
    merged = merged.transpose(0, 1).flatten(1).topk(k).values
    nothing = merged == NO_KEY
    return Ranking(
        scores=key_scores(merged).masked_fill(nothing, -torch.inf),
        items=key_items(merged).masked_fill(nothing, NOTHING),
    )
