"""The k best items of a sharded table for each state, and metrics of them, as in one process."""

import torch
from torch import Tensor
from torch.func import functional_call

from sce.data.batches import SeenItems
from sce.distributed.nearest import NO_KEY
from sce.distributed.table import ShardedTable
from sce.errors import InputError, checked
from sce.evaluation import ranking
from sce.evaluation.evaluate import KS, Evaluated, Metrics, Progress, Split, Tally, evaluating
from sce.models.base import Backbone


class ShardedRanker:
    """A model whose catalogue is sharded.

    Args:
        model: Has a parameter `catalogue`, in whose place it is given the rows that it needs.
        table: The catalogue.
    """

    def __init__(self, model: Backbone, table: ShardedTable) -> None:
        self.model, self.table = model, table

    def evaluate(
        self,
        dataset: Evaluated,
        *,
        split: Split = "validation",
        batch_size: int = 512,
        progress: Progress = None,
    ) -> Metrics:
        """Return what `sce.evaluate` does; all ranks call it, and each ranks for some users."""
        ranks, norm = self.table.ranks, ranking.largest_norm(self.table.shard.detach())
        given = KS, self.model.max_length, ranks.device
        tally = Tally(dataset, split, *given, times=ranking.uses_times(self.model))

        def rank(states: Tensor, seen: SeenItems) -> Tensor:
            return sharded_top_k(states, self.table, max(KS), seen=seen, norm=norm).items

        with evaluating(self.model), torch.no_grad():
            tally.count(self._states, rank, batch_size, progress, ranks.rank, ranks.size)
        return tally.metrics(self._add_up(tally))

    def _states(self, histories: Tensor, times: Tensor | None) -> Tensor:
        rows = self.table.look_up(histories)
        if not len(histories):
            return rows.values.new_empty(0, self.table.dim)

        def model(given: Tensor, **more: Tensor) -> Tensor:
            states: Tensor = functional_call(self.model, {"catalogue": rows.values}, given, more)
            return states

        return ranking.last_states(model, rows.places(histories), self.model.max_length, times)

    def _add_up(self, tally: Tally) -> list[int]:
        """Give a tally the counts of all ranks; return how many items any of them recommended."""
        ranks, size = self.table.ranks, self.table.ranks.size
        hits = tally.ranks.nonzero().squeeze(1)
        # An item's rank looks whether any other has recommended it.
        flags = tally.recommended[:, :-1].T.view(torch.uint8)
        by_owner = [flags[owner::size] for owner in range(size)]
        receive = [len(self.table.shard)] * size
        theirs = ranks.exchange(torch.cat(by_owner), [len(each) for each in by_owner], receive)
        recommended = (
            theirs.view(size, len(self.table.shard), len(tally.ks)).amax(0).sum(0).tolist()
        )
        every = ranks.gather_counts(len(hits), int(tally.seen_targets), *recommended)
        _, repeated, *totals = map(sum, zip(*every, strict=True))
        tally.seen_targets = torch.tensor(repeated)
        found = torch.stack([hits, tally.ranks[hits].long()], dim=1)
        users, places = ranks.gather(found, [n for n, *_ in every]).unbind(1)
        tally.ranks[users] = places.int()
        return totals


@checked
@torch.no_grad()
def sharded_top_k(
    states: Tensor,
    table: ShardedTable,
    k: int,
    *,
    seen: tuple[Tensor, Tensor] | None = None,
    norm: Tensor | None = None,
) -> ranking.Ranking:
    """Rank the k items with the largest product with each state, as `top_k` does in one process.

    Args:
        states: [b, d] of this rank; ranks may have different numbers of them.
        table: The items.
        k: Number of items.
        seen: Items never to be ranked: flat item ids, and the row of each. All ranks give them, or
            none does.
        norm: `largest_norm(table.shard)`, where it is known.
    """
    ranks = table.ranks
    if k < 1:
        raise InputError(f"k must be at least 1; got {k}")
    fits = states.dim() == 2 and states.shape[1] == table.dim and states.is_floating_point()
    if not fits or states.device != table.shard.device:
        raise InputError(
            f"states must be [b, {table.dim}], floating point, on {table.shard.device}; got "
            f"{list(states.shape)}, {str(states.dtype).removeprefix('torch.')}, on {states.device}"
        )
    items, rows = seen or (torch.empty(0, dtype=torch.int64, device=states.device),) * 2
    if items.dim() != 1 or items.shape != rows.shape:
        shapes = f"{list(items.shape)} and {list(rows.shape)}"
        raise InputError(f"seen are flat item ids, and the row of each; got shapes {shapes}")
    found = ranks.gather_counts(len(states), len(items))
    counts, pairs = [n for n, _ in found], [n for _, n in found]
    rows = rows + sum(counts[: ranks.rank])
    every = ranks.gather(states.float(), counts)
    items, rows = ranks.gather(torch.stack([items, rows], dim=1), pairs).unbind(1)
    here = items % ranks.size == ranks.rank
    theirs = items[here] // ranks.size, rows[here]
    scores, places = ranking.top_k(every, table.shard.detach(), k, seen=theirs, norm=norm)
    keys = ranking.pack_keys(scores, places * ranks.size + ranks.rank)
    keys = keys.masked_fill(places == ranking.NOTHING, NO_KEY)
    n = len(states)
    merged = ranks.exchange(keys, counts, [n] * ranks.size).unflatten(0, (ranks.size, n))
    merged = merged.transpose(0, 1).flatten(1).topk(k).values
    nothing = merged == NO_KEY
    return ranking.Ranking(
        scores=ranking.key_scores(merged).masked_fill(nothing, -torch.inf),
        items=ranking.key_items(merged).masked_fill(nothing, ranking.NOTHING),
    )
