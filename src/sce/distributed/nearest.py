"""The items nearest to each centre over all shards: exactly those of one process.

A shard sends a few candidates for each centre, as keys: scores above the complements of ids, so
that all keys are ordered, with ties by id. What it did not send lies below its last key, which it
sends as well. Where no such bound is above the last key that was taken, the merged keys are the
global top; where one is, more candidates are asked for.

The bits of a matrix product depend on its shape, and so on the number of ranks. Keys therefore hold
the scores of `rescore`, and a shard says if rounding may have hidden a better row from it.
"""

import math

import torch
from torch import Tensor

from sce.distributed.table import ShardedTable
from sce.errors import InputError
from sce.evaluation.precision import matmul_precision
from sce.evaluation.ranking import key_items, key_scores, largest_norm, pack_keys, rescore
from sce.losses.backend import Backend, why_not_triton
from sce.losses.buckets import top_rows

NO_KEY, ANY_KEY = -(1 << 63), (1 << 63) - 1  # below and above all keys
_SCORES_AT_ONCE = 1 << 22
_CENTRES_AT_ONCE = 320  # for more, the kernels would make groups of rows too large, to save memory


def n_candidates(k: int, ranks: int) -> int:
    """Return how many candidates a shard sends for the top k of all.

    A shard's share of the k is hypergeometric: its mean and seven standard deviations fail once in
    millions of buckets.
    """
    mean = k / ranks
    return min(k, math.ceil(mean + 7 * math.sqrt(mean * (1 - 1 / ranks))) + 9)


class NearestItems:
    """Finds the items nearest to each rank's centres.

    `candidates` are the items that a shard sends for a centre at first; they change no result. By
    default so many that they hardly ever fail, twice as many where one step in a hundred does.
    """

    def __init__(
        self, table: ShardedTable, backend: Backend = "auto", candidates: int | None = None
    ) -> None:
        if candidates is not None and candidates < 1:
            raise InputError(f"candidates must be at least 1; got {candidates}")
        self.table, self.backend, self.candidates = table, backend, candidates
        self.steps = self.fallbacks = 0

    @torch.no_grad()
    def guess(
        self, centres: Tensor, counts: list[int], k: int, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys [n, k], hardly ever not the largest, and where that is not certain.

        `counts` has the number of centres of each rank; with `dtype`, rows are rounded to it.
        """
        ranks = self.table.ranks
        if not any(counts):
            empty = torch.empty(0, k, dtype=torch.int64, device=centres.device)
            return empty, empty[:, 0] > 0
        often = 100 * self.fallbacks > self.steps + 100
        self.steps += 1
        most = self.candidates or (1 + often) * n_candidates(k, ranks.size)
        sent = self._keys(ranks.gather(centres, counts), min(most, k), dtype)
        keys, proven = self._merge(sent, counts, k)
        return keys, proven.logical_not()

    @torch.no_grad()
    def settle(
        self,
        centres: Tensor,
        keys: Tensor,
        failed: Tensor,
        counts: list[int],
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Return the items of a guess, ascending; `counts` are those not certain, by rank."""
        if any(counts):
            self.fallbacks += 1
            doubtful = failed.nonzero().squeeze(1)
            again = self.table.ranks.gather(centres[doubtful], counts)
            sent = self._keys(again, keys.shape[1], dtype, exact=True)
            keys[doubtful] = self._merge(sent, counts, keys.shape[1])[0]
        return key_items(keys).sort(dim=1).values

    def _merge(self, sent: Tensor, counts: list[int], k: int) -> tuple[Tensor, Tensor]:
        """Send keys [sum(counts), k' + 1] home; return the k largest for each, and if certain."""
        ranks, n = self.table.ranks, counts[self.table.ranks.rank]
        found = ranks.exchange(sent, counts, [n] * ranks.size).unflatten(0, (ranks.size, n))
        keys, bounds = found[:, :, :-1].transpose(0, 1).flatten(1), found[:, :, -1].amax(0)
        keys = keys.topk(min(k, keys.shape[1])).values
        if keys.shape[1] < k:  # never certain: there are k items
            keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=NO_KEY)
        return keys, keys[:, -1] >= bounds

    def _keys(
        self, centres: Tensor, k: int, dtype: torch.dtype | None, *, exact: bool = False
    ) -> Tensor:
        """Return the k largest keys of the shard for each centre, and a bound on the others."""
        shard, given, centres = self.table.shard.detach(), centres, centres.float()
        k_here = min(k, len(shard))
        n = min(k_here + max(8, k_here // 16), len(shard))
        keys = self._pack(centres, self._candidates(given, n, dtype), dtype)
        bounds = keys.new_full((len(centres),), NO_KEY)
        if k_here < len(shard):
            keys = keys.topk(n).values
            last, least = key_scores(keys[:, k_here - 1]), key_scores(keys[:, -1])
            # Products that chose candidates, maxima of groups, and scores were each rounded.
            error = (centres.shape[1] + 8) * 2**-21 * largest_norm(shard)
            error = error * torch.linalg.vector_norm(centres, dim=1)
            proven = last > least + error
            if n == len(shard):
                proven = torch.ones_like(proven)
            if exact and not proven.all():
                keys[~proven, :k_here] = self._every_row(centres[~proven], k_here, dtype)
                proven = torch.ones_like(proven)
            keys = keys[:, :k_here]
            bounds = keys[:, -1].where(proven, ANY_KEY)
        missing = (0, k - k_here)
        keys = torch.nn.functional.pad(keys, missing, value=NO_KEY)
        return torch.cat([keys, bounds.unsqueeze(1)], dim=1)

    def _candidates(self, centres: Tensor, n: int, dtype: torch.dtype | None) -> Tensor:
        """Return n places of the shard [b, n] for each centre: the largest, up to rounding."""
        shard = self.table.shard.detach()
        autocast = torch.autocast(centres.device.type, enabled=False)
        if centres.dtype != (dtype or shard.dtype):
            centres = centres.float()  # not rounded to the precision of the rows: scored as it is
        with autocast, matmul_precision(centres.device, "float32"):
            if why_not_triton(centres, shard, self.backend) is not None:
                return top_rows(centres.float(), shard, n, autocast_dtype=dtype)
            from sce.losses.kernels import selection

            found = [
                selection.top_rows(some, shard, n, autocast_dtype=dtype)
                for some in centres.split(_CENTRES_AT_ONCE)
            ]
            return torch.cat(found).long()

    def _pack(self, centres: Tensor, places: Tensor, dtype: torch.dtype | None) -> Tensor:
        scores = rescore(centres, self.table.shard.detach(), places, dtype)
        # A row that is not a number is taken first, to be noticed in the loss.
        scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
        ranks = self.table.ranks
        return pack_keys(scores, places * ranks.size + ranks.rank)

    def _every_row(self, centres: Tensor, k: int, dtype: torch.dtype | None) -> Tensor:
        """Return the k largest keys of the shard, scored row by row: many rows are about equal."""
        rows = torch.arange(len(self.table.shard), device=centres.device)
        keys = rows.new_empty(len(centres), 0)
        for some in rows.split(max(k, _SCORES_AT_ONCE // len(centres))):
            more = self._pack(centres, some.expand(len(centres), -1), dtype)
            keys = torch.cat([keys, more], dim=1)
            keys = keys.topk(min(k, keys.shape[1])).values
        return keys
