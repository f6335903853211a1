"""The k largest of each row of numbers, wherever they are: exact, and the same in every run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.kernels.groups import Cut
from sce.losses.kernels.keys import number_of, ordered, write_largest
from sce.losses.kernels.launch import ceil_div, launch, power_of_2
from sce.losses.kernels.wide import best_wide

# The most values of a row that one program of the selection holds.
MAX_WIDTH = 1 << 14
# Longer rows are first reduced to the maxima of as many folds, if the best ones are then fewer.
# Others are the work of many programs (`wide.py`).
FOLDED_WIDTH = 1 << 12


def best(
    values: Tensor,
    width: int,
    k: int,
    out: Tensor,  # [n, k]
    groups: Tensor | None = None,
    cut: Cut | None = None,
) -> None:
    """Write the columns of each row's k largest values, in any order; ties go to the lower one.

    With `groups` [n, g], each of which was cut into parts, a column each, write the number of the
    part (the row, where a part is one) instead of the column.
    """
    n = len(out)
    cut = cut or Cut(2, 1, False)  # not used without groups
    n_groups = 0 if groups is None else groups.shape[1]
    arguments = (values, out if groups is None else groups, out, width, k, out.stride(0), n_groups)
    numbering: dict[str, int | bool] = {
        "GROUP": 0 if groups is None else cut.group,
        "INTERLEAVED": cut.interleaved,
        "PART": cut.part,
    }
    fold = power_of_2(ceil_div(width, FOLDED_WIDTH))
    while fold > 1:
        # Folds interleave as groups do.
        taken = k + (8 if groups is None else 8 + 3 * max(1, cut.group // cut.part // fold))
        block_folds, block = power_of_2(ceil_div(width, fold)), power_of_2(taken * fold)
        if 2 * taken * fold <= width and max(block_folds, block) <= MAX_WIDTH:
            folds = torch.empty(n, taken, device=values.device, dtype=torch.int32)
            launch(
                _best_folded_kernel, (n,),
                *arguments, folds, taken, FOLD=fold, BLOCK_FOLDS=block_folds, BLOCK=block,
                num_warps=16 if max(block_folds, block) > 8192 else 8, **numbering,
            )  # fmt: skip
            return
        fold //= 2
    if width > MAX_WIDTH:
        best_wide(*arguments, numbering)
        return
    block = power_of_2(width)
    launch(
        _best_kernel, (n,), *arguments, BLOCK=block,
        num_warps=16 if block > 8192 else 8 if block > 2048 else 4, **numbering,
    )  # fmt: skip


@triton.jit
def _best_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read if GROUP is not 0
    best_ptr,  # [n, k]
    width, k, stride_best, n_groups,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, INTERLEAVED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups_ptr += row * n_groups
    i = tl.arange(0, BLOCK)
    keys = ordered(values_ptr + row * width, i, width)
    number = number_of(i, i < width, groups_ptr, GROUP, INTERLEAVED, PART)
    write_largest(best_ptr + row * stride_best, keys, number, k, -2147483648, 2147483647)


@triton.jit
def _best_folded_kernel(
    values_ptr,  # [n, width] float32
    groups_ptr,  # [n, n_groups], read if GROUP is not 0
    best_ptr,  # [n, k]
    width, k, stride_best, n_groups,
    folds_ptr,  # [n, n_folds]: the best folds, which hold the best values
    n_folds,
    FOLD: tl.constexpr, BLOCK_FOLDS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * width
    groups_ptr += row * n_groups
    folds_ptr += row * n_folds
    i = tl.arange(0, BLOCK_FOLDS)
    keys = ordered(values_ptr, i * FOLD, width)
    for part in tl.static_range(1, FOLD):
        keys = tl.maximum(keys, ordered(values_ptr, i * FOLD + part, width))
    write_largest(folds_ptr, keys, i, n_folds, -2147483648, 2147483647)
    tl.debug_barrier()
    j = tl.arange(0, BLOCK)
    mask = j < n_folds * FOLD
    fold = tl.load(folds_ptr + j // FOLD, mask=mask, other=0)
    column = tl.where(mask, fold * FOLD + j % FOLD, width)
    keys = ordered(values_ptr, column, width)
    number = number_of(column, column < width, groups_ptr, GROUP, INTERLEAVED, PART)
    write_largest(best_ptr + row * stride_best, keys, number, k, -2147483648, 2147483647)
