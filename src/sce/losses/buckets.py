"""Buckets of Scalable Cross-Entropy: their sizes, centres, states and items, and statistics.

Nothing here carries a gradient. Scores are computed in tiles of bounded size, of which only each
bucket's best rows so far are kept.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sce.losses.inputs import check_number, rounded

MAX_SCORES = 1 << 23  # held at once (32 MiB in float32)
# Rows of a run; only runs whose maximum passes a bucket's threshold are looked at row by row.
RUN = 32
MAX_PARTS = 16 << 20  # bytes of parts of the catalogue's gradient that the kernels hold at once
MAX_SORTED = 3 << 18  # places in buckets that they sort at once, in 27 MiB
LARGE_K = 1024  # items of a bucket beyond which the kernels find a threshold first
MAX_SEARCH = 1 << 28  # products of centres and items, for which there are more than a few buckets
MIXED_STATES = 4  # in a centre of the kind "states"
_SORTED = 1 << 18  # items of buckets that statistics sort at once: some ten megabytes

Centres = Literal["random", "states", "mix"]


class Members(NamedTuple):
    """The states of the buckets as one list, bucket by bucket."""

    states: Tensor  # [p]; behind the last bucket's come those of none
    offsets: Tensor  # [n_buckets + 1]: where the states of each bucket begin


@dataclass(frozen=True)
class Buckets:
    """The states and the items of each bucket, as indices."""

    members: Members
    items: Tensor  # [n_buckets, bucket_size_y] into the catalogue


def suggest_sizes(
    sequences: int, mean_length: float, *, alpha: float = 2.0, beta: float = 1.0
) -> tuple[int, int]:
    """Return (n_buckets, bucket_size_x) for a batch, by the paper's rule.

    With s sequences of mean length l̄: bucket_size_x = α √(s·l̄·β) and n_buckets = α √(s·l̄/β), so
    that α² is how often a state is picked on average and β the ratio of the two sizes.

    >>> suggest_sizes(128, 200)
    (320, 320)
    >>> suggest_sizes(128, 200, beta=4)
    (160, 640)
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        check_number(name, value)
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    states = sequences * mean_length
    if not 0 <= states < math.inf:
        raise ValueError(f"sequences · mean_length must be finite, not negative, got {states}")
    sizes = [max(1, round(alpha * math.sqrt(each))) for each in (states / beta, states * beta)]
    if max(sizes) >= 2**31:
        raise ValueError(f"alpha {alpha} and beta {beta} make {sizes[0]:,} buckets of {sizes[1]:,}")
    return sizes[0], sizes[1]


def auto_alpha(n_items: int, targets: float, beta: float = 1.0) -> float:
    """Return how many buckets there are by default where every state is in its nearest one.

    Eight times the square root of the targets: more make the model a little better. Fewer, but at
    least twice it, where centres times items would be more than `MAX_SEARCH` products.

    >>> auto_alpha(100_000, 25_600), auto_alpha(1_000_000, 25_600)
    (8.0, 2.0)
    """
    return min(8.0, max(2.0, MAX_SEARCH / (n_items * math.sqrt(max(1.0, targets) / beta))))


def score_bytes(n_items: int, dim: int) -> int:
    """Return the most bytes of scores that the kernels hold: groups of items stay small."""
    return max(28 << 20, min(192 << 20, int(0.04 * n_items * dim * 2)))


def draw_centres(
    states: Tensor,  # [v, d], the valid states only
    n_buckets: int,
    kind: Centres,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the centres of the buckets: [n_buckets, d], in float32 or wider.

    "random": standard normal. "states": a sum of four states, weighted by absolute values of normal
    numbers and scaled to length one, plus a normal vector of about that length. "mix": distributed
    as the rows of Ω X, with Ω standard normal [n_buckets, v], which is never made: G Lᵀ, with
    L Lᵀ = XᵀX and G standard normal [n_buckets, d], has the same distribution.
    """
    v, d = states.shape
    dtype = torch.promote_types(states.dtype, torch.float32)
    options: dict[str, Any] = {"dtype": dtype, "device": states.device}
    if kind == "states":
        centres = torch.zeros(n_buckets, d, **options)
        if v == 0:
            return centres
        shape = (MIXED_STATES, n_buckets)
        drawn = torch.randint(v, shape, device=states.device, generator=generator)
        weights = torch.randn(shape, generator=generator, **options).abs()
        for rows, weight in zip(drawn, weights, strict=True):
            centres += weight[:, None] * states[rows].to(centres.dtype)
        normal = torch.randn(n_buckets, d, generator=generator, **options)
        return of_length_one(centres) + 1 / math.sqrt(d) * normal
    normal = torch.randn(n_buckets, d, generator=generator, **options)
    if kind == "random":
        return normal
    # The factor is computed in float64 (where there is one): XᵀX squares the condition of X.
    wide = torch.float32 if states.device.type == "mps" else torch.float64
    gram = torch.zeros(d, d, dtype=wide, device=states.device)
    for part in states.split(max(1, MAX_SCORES // (4 * d))):
        part = part.to(wide)
        gram.addmm_(part.T, part)
    # The factorisation succeeds when X has not full rank; rounding in float32 moves it by more.
    ridge = gram.diagonal().sum() * 1e-12 + torch.finfo(wide).tiny
    gram.diagonal().add_(ridge)
    factor: Tensor = torch.linalg.cholesky_ex(gram).L
    return (normal.to(wide) @ factor.T).to(normal.dtype)


def round_centres(centres: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale centres to length one, and round them as a half-precision catalogue is: faster so."""
    centres = of_length_one(centres)
    return centres.to(dtype) if dtype in (torch.float16, torch.bfloat16) else centres


def of_length_one(vectors: Tensor) -> Tensor:
    """Scale vectors [n, d] to length one."""
    # Squares of large numbers would be infinite: not before the largest is 1.
    most = vectors.abs().amax(dim=1, keepdim=True)
    return torch.nn.functional.normalize(vectors / most.where(most > 0, 1), dim=1)


@torch.no_grad()
def top_rows(
    centres: Tensor,  # [b, d]
    rows: Tensor,  # [m, d]
    k: int,
    *,
    max_scores: int = MAX_SCORES,
    autocast_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the k rows with the largest dot product with each centre, as ascending indices [b, k].

    Equal scores go to the lower index, so the answer does not depend on `max_scores`, held at once.
    With `autocast_dtype`, rows are rounded to it first, a chunk at a time.
    """
    m = rows.shape[0]
    if k >= m:
        return torch.arange(m, device=rows.device).expand(centres.shape[0], m)
    # Whole runs, no fewer rows than k, so that the first chunk fills the buckets.
    # A chunk holds scores, and under autocast as many rounded rows.
    across = centres.shape[0] if autocast_dtype is None else max(centres.shape)
    chunk = max(math.ceil(k / RUN), max_scores // (across * RUN))
    chunk = RUN * min(chunk, math.ceil(m / RUN))
    group = max(1, max_scores // chunk)
    parts = centres.split(group)
    return torch.cat([_top_rows_of_group(part, rows, k, chunk, autocast_dtype) for part in parts])


def _top_rows_of_group(
    centres: Tensor, rows: Tensor, k: int, chunk: int, autocast_dtype: torch.dtype | None
) -> Tensor:
    """Pass over the rows once, chunk by chunk, with a running top-k for each centre."""
    scores = centres.new_empty(centres.shape[0], chunk)
    _score(centres, rounded(rows[:chunk], autocast_dtype), out=scores)
    best = _top_columns(scores, k)
    values = scores.gather(1, best)
    for start in range(chunk, rows.shape[0], chunk):
        _score(centres, rounded(rows[start : start + chunk], autocast_dtype), out=scores)
        columns = _candidates(scores, threshold=values.amin(dim=1, keepdim=True))
        if columns is None:
            continue
        # Both halves are in the order of their indices, and every index of the second half is
        # larger: the order of the columns is the order of the rows.
        both = torch.cat([values, scores.gather(1, columns)], dim=1)
        keep = _top_columns(both, k)
        values = both.gather(1, keep)
        best = torch.cat([best, columns.add_(start)], dim=1).gather(1, keep)
    return best


def _score(centres: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """Write the scores of the rows of a chunk; columns without a row get -inf, and never win."""
    torch.mm(centres, rows.to(centres.dtype).T, out=out[:, : rows.shape[0]])
    out[:, rows.shape[0] :] = -math.inf


def _candidates(scores: Tensor, threshold: Tensor) -> Tensor | None:
    """Return columns [b, w], ascending, that hold all scores above each bucket's threshold, if any.

    Equal scores do not pass: their index is higher. NaN does, to reach the loss and be noticed.
    """
    peaks: Tensor = scores.unflatten(1, (-1, RUN)).amax(dim=2)
    most = int((peaks <= threshold).logical_not_().sum(dim=1).max())
    if most == 0:
        return None
    # Buckets with fewer runs that pass take others, which lose against the rows already there.
    runs: Tensor = peaks.topk(most, dim=1).indices.sort(dim=1).values
    return (runs.unsqueeze(2) * RUN + torch.arange(RUN, device=scores.device)).flatten(1)


def _top_columns(values: Tensor, k: int) -> Tensor:
    """Return the columns of each row's k largest values, ascending; ties go to the lower column."""
    top = values.topk(k, dim=1, sorted=False)
    columns, unknown = top.indices, top.values.isnan()
    # torch.topk takes any of several equal values: where the least has equals beyond the k taken,
    # take them in order. NaN counts as larger than anything, as it does for torch.topk.
    least = top.values.masked_fill_(unknown, torch.inf).amin(dim=1, keepdim=True)
    reach = (values < least).logical_not_().sum(dim=1)
    tied = ((reach > k) & ~unknown.all(dim=1)).nonzero().squeeze(1)
    if tied.numel():
        some, least = values[tied], least[tied]
        above = (some <= least).logical_not_()
        equal = some == least
        left = k - above.sum(dim=1, keepdim=True)
        taken = above | (equal & (equal.cumsum(dim=1) <= left))
        columns[tied] = taken.nonzero()[:, 1].view(-1, k)
    return columns.sort(dim=1).values


def nearest_centres(states: Tensor, centres: Tensor) -> Tensor:
    """Return the centre [n], of length one, nearest to each state; the lowest of equals."""
    chunks = states.to(centres.dtype).split(max(1, MAX_SCORES // len(centres)))
    return torch.cat([(chunk @ centres.T).argmax(dim=1) for chunk in chunks])


def of_equal_size(bucket_states: Tensor) -> Members:
    """List the states of buckets [n_buckets, size_x]."""
    n_buckets, size = bucket_states.shape
    ends = torch.arange(n_buckets + 1, device=bucket_states.device, dtype=torch.int32)
    return Members(bucket_states.flatten(), ends * size)


def group_by_bucket(bucket_of: Tensor, n_buckets: int) -> Members:
    """List the states by their bucket [n]; n_buckets: in none."""
    buckets, states = bucket_of.sort(stable=True)
    edges = torch.arange(n_buckets + 1, device=buckets.device, dtype=buckets.dtype)
    return Members(states, torch.searchsorted(buckets, edges, out_int32=True))


def bucket_of_places(members: Members) -> Tensor:
    """Return the bucket of each place in the list [p]; n_buckets: of none."""
    place = torch.arange(len(members.states), device=members.states.device, dtype=torch.int32)
    return torch.searchsorted(members.offsets[1:], place, right=True)


class BucketStatistics(NamedTuple):
    """Shares that tell how the buckets lie, as scalar tensors."""

    picked_once: Tensor  # of the valid states: those in exactly one bucket
    placed: Tensor  # of the valid states: those in any bucket
    correct_in_bucket: Tensor  # of bucket rows: those whose target is among the bucket's items
    occupied: Tensor  # of the buckets: those that have any state


def count_placed(buckets: Buckets, targets: Tensor) -> Tensor:
    """Count the states [n] in any bucket; those with a negative target are not valid."""
    return (_count_picks(buckets, targets)[2] > 0).sum()


def _count_picks(buckets: Buckets, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bucket and the target (-1: none) of each place, and each state's buckets [n]."""
    bucket, states = bucket_of_places(buckets.members), buckets.members.states.long()
    positives = targets.long()[states].masked_fill(bucket == len(buckets.items), -1)
    picks = torch.zeros(len(targets), device=targets.device, dtype=torch.int64)
    return bucket, positives, picks.scatter_add_(0, states, (positives >= 0).long())


def count_buckets(buckets: Buckets, targets: Tensor) -> BucketStatistics:
    """Count over the states [n], of which those with a negative target are not valid."""
    n_buckets, size_y = buckets.items.shape
    offsets, device = buckets.members.offsets, targets.device
    bucket, positives, picks = _count_picks(buckets, targets)
    rows = positives >= 0
    # Buckets and items as one number, sorted: a target is looked up in its bucket.
    wanted = (bucket << 32) + positives
    correct = torch.zeros((), device=device, dtype=torch.int64)
    at_once = max(1, _SORTED // max(1, size_y))
    for start in range(0, n_buckets, at_once):
        items = buckets.items[start : start + at_once].long()
        number = torch.arange(start, start + len(items), device=device).unsqueeze(1)
        keys = ((number << 32) + items).flatten().sort().values
        found = keys[torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)]
        correct += (rows & (found == wanted)).sum()
    valid = (targets >= 0).sum().clamp(min=1)
    return BucketStatistics(
        picked_once=(picks == 1).sum() / valid,
        placed=(picks > 0).sum() / valid,
        correct_in_bucket=correct / rows.sum().clamp(min=1),
        occupied=(offsets[1:] > offsets[:-1]).sum() / n_buckets,
    )
