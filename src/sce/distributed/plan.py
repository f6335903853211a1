"""A step of several ranks that share a catalogue: what each holds, sends and computes, modelled."""

import math
from dataclasses import dataclass, replace

from sce.distributed.nearest import n_candidates
from sce.errors import InputError
from sce.losses import ScalableCrossEntropy
from sce.planning import ROW_WISE, Job, fits, predict, usable

# Milliseconds on an H200 with 10⁸ rows of 64 dimensions in bfloat16, 320 centres and 256 items of
# each: the pass over the rows, and selecting (docs/kernels.md).
_PASS, _SELECTING = 10.4, 4.2
_ROWS, _CENTRES, _DIM, _SELECTED = 1e8, 320, 64, 256
LINKS = {"InfiniBand": 50e9, "NVLink": 450e9}  # bytes a second that a rank sends


@dataclass(frozen=True)
class RankPlan:
    """One of several ranks in a step with row-wise updates."""

    ranks: int
    rows: int  # items of the shard
    sizes: dict[str, int]  # of the loss: buckets of a rank, and items in each
    candidates: int  # items that a shard sends for each centre
    holds: dict[str, float]  # bytes: the shard with its accumulators, and all else at the peak
    sends: dict[str, float]  # bytes of a step
    pass_ms: float  # scoring the shard for the centres of all ranks, on an H200 in bfloat16
    selecting_ms: float

    def sending_ms(self, bytes_a_second: float) -> float:
        """Milliseconds of all that is sent, one after another."""
        return 1e3 * sum(self.sends.values()) / bytes_a_second


def plan_ranks(job: Job, ranks: int) -> RankPlan:
    """Model a step of as many ranks, each with the batch of the job."""
    if not 1 <= ranks <= job.items:
        raise InputError(f"ranks lie between 1 and the number of items; got {ranks}")
    loss = job.build_loss(ROW_WISE)
    assert isinstance(loss, ScalableCrossEntropy)
    shape, dim, targets = job.shape, job.backbone.dim, round(job.shape.targets)
    sizes, events = loss.named_sizes(job.items, targets), job.batch * job.mean_events
    n_buckets, size_y = sizes["n_buckets"], sizes["bucket_size_y"]
    rows, places = -(-job.items // ranks), n_buckets * size_y
    candidates, away = n_candidates(size_y, ranks), (ranks - 1) / ranks
    backbone = sum(p.numel() for p in job.build_model().parameters()) - job.items * dim
    # Rows and ids of what is looked up; keys of 8 bytes; gradients in float32.
    centre = dim * (2 if job.precision == "bf16" else 4)
    sends = {
        "rows of histories": away * events * (4 * dim + 4),
        "centres": (ranks - 1) * n_buckets * centre,
        "candidates": (ranks - 1) * n_buckets * (candidates + 1) * 8,
        "rows of buckets": away * places * (4 * dim + 4),
        "gradients of rows": away * (places + events) * 4 * dim,
        "gradients of the model": 2 * away * backbone * 4,
    }
    shard = 4 * rows * (dim + 1)
    here = predict(replace(job, items=max(rows, size_y)), ROW_WISE)
    centres = ranks * n_buckets
    return RankPlan(
        ranks=ranks,
        rows=rows,
        sizes=sizes,
        candidates=candidates,
        holds={"shard": shard, "step": here.total - shard + 8 * dim * (places + shape.max_targets)},
        sends=sends,
        pass_ms=_PASS * centres / _CENTRES * rows / _ROWS * dim / _DIM,
        selecting_ms=_SELECTING
        * (centres / _CENTRES)
        * math.sqrt(rows * candidates / (_ROWS * _SELECTED)),
    )


def needs_shards(job: Job, ranks: int, memory: int, *, row_wise: bool) -> bool:
    """True if the job with sce fits on GPUs that share its catalogue, and on one of them not."""
    if fits(job, ROW_WISE if row_wise else "sce", memory):
        return False
    return sum(plan_ranks(job, ranks).holds.values()) <= usable(memory)
