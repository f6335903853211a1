"""Exact top-k rows of a catalogue for each centre, in one pass and a few megabytes.

The rows are cut into groups. A row among the k best of a bucket lies in a group whose maximum is
among the k best maxima: if k groups had a larger maximum, k rows would score higher. So one pass
keeps only the maximum of each group, and the rows of the k best groups are scored again. Nothing is
random, no two programs write to the same place, and the host never waits for the device.

Four small groups at a time interleave (`groups.py`), so among equal scores the order of groups is
the order of rows only to within three: groups taken beyond k absorb that, and that two passes round
differently.

Where k is large but few of the rows, a threshold finds them sooner (`threshold.py`).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sce.losses.buckets import LARGE_K, score_bytes
from sce.losses.kernels.best import best
from sce.losses.kernels.groups import Cut, Rows, group_maxima, interleaves, score_again
from sce.losses.kernels.launch import ceil_div
from sce.losses.kernels.threshold import sparse_enough, top_rows_by_threshold


@dataclass(frozen=True)
class Plan:
    """Sizes of the cuts of centres and rows."""

    at_once: int  # centres
    group: int  # rows of a group; 1: every row is scored once
    part: int  # rows of the parts that the best groups are cut into; 1: rows


@functools.lru_cache(maxsize=4096)  # batches differ
def make_plan(n: int, m: int, d: int, k: int) -> Plan:
    """Choose the cuts such that selecting takes little time and memory."""
    # As many groups as rows to look at again, if memory allows: one pass for all centres.
    taken, values = k + spare(k), score_bytes(m, d) // 4
    group = 1
    while group < 4096 and (2 * group) ** 2 * taken <= 2 * m:
        group *= 2
    while group < 4096 and n * m // group > values and m // (2 * group) >= 4 * taken:
        group *= 2
    at_once = min(n, max(1, values // (4 * ceil_div(m, 4 * group))))
    part = 1
    while part < group and at_once * taken * (group // part) > values:
        part *= 2
    return Plan(at_once, group, part)


def spare(k: int) -> int:
    """Return the number of groups taken beyond k."""
    return max(8, k // 16)


def top_rows(
    centres: Tensor,  # [n, d]
    rows: Tensor,  # [m, d]
    k: int,
    *,
    targets: Tensor | None = None,  # [m]: rows with a negative one are not picked
    out: Tensor | None = None,  # [n, k] int32
    plan: Plan | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the k rows with the largest dot product with each centre, [n, k], in any order.

    Equal scores go to the lower index. Rows with a negative target come last. With
    `autocast_dtype`, rows are rounded to it first. Centres in the precision of the rows are scored
    by matrix units of that precision; others as float32.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    centres = centres.float() if centres.dtype == torch.float64 else centres
    (n, d), m = centres.shape, len(rows)
    k = min(k, m)
    if out is None:
        out = torch.empty(n, k, device=rows.device, dtype=torch.int32)
    if k == m:
        return out.copy_(torch.arange(m, device=rows.device, dtype=torch.int32).expand(n, m))
    given = Rows(rows, targets, autocast_dtype or rows.dtype)
    if plan is None and targets is None and k > LARGE_K and sparse_enough(m, k):
        top_rows_by_threshold(centres, given, k, spare(k), out)
        return out
    plan = plan or make_plan(n, m, d, k)
    for start in range(0, n, plan.at_once):
        end = min(n, start + plan.at_once)
        _top_rows(centres[start:end], given, k, plan, out[start:end])
    return out


def _top_rows(centres: Tensor, rows: Rows, k: int, plan: Plan, out: Tensor) -> None:
    n, m = len(centres), len(rows.values)
    group, part = plan.group, plan.part
    interleaved = interleaves(group)
    # Rows of numbers are read fastest in multiples of 16, which a tile can fill up to.
    multiple = 16 if interleaves(4 * group) else 4
    n_groups = multiple * ceil_div(m, multiple * group) if interleaved else ceil_div(m, group)
    taken = min(k + spare(k), n_groups)
    n_parts = taken * (group // part)
    parts_taken = min(k + spare(k), n_parts) if part > 1 else 0
    width = max(n_groups, n_parts, parts_taken * part)
    values = torch.empty(n * width, device=out.device, dtype=torch.float32)
    group_maxima(centres, rows, group, n_groups, values)
    if group == 1:
        best(values, n_groups, k, out)
        return
    cut = Cut(group, part, interleaved)
    groups = torch.empty(n, taken, device=out.device, dtype=torch.int32)
    best(values, n_groups, taken, groups)
    if part > 1:
        score_again(centres, rows, groups, cut, values)
        parts = torch.empty(n, parts_taken, device=out.device, dtype=torch.int32)
        best(values, n_parts, parts_taken, parts, groups, cut)
        groups = parts
    cut = Cut(part if part > 1 else group, 1, cut.interleaved)
    score_again(centres, rows, groups, cut, values)
    best(values, groups.shape[1] * cut.group, k, out, groups, cut)
