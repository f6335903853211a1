"""Exact top-k rows of a catalogue for each centre where k is large: those that pass a threshold.

A sample of the rows, one of every few, says which score about 1.3 k of them reach: a threshold. One
pass by matrix units marks the rows that do, a bit each. They are listed, scored again, and the k
best are taken.

Nothing is random, and the host never waits. The list has room for more rows than usually pass.
Where it has not, since many scores are equal, as in a catalogue of zeros, or where fewer than k
pass, since the sample misled, one program looks at all rows of its centre until it has the k best.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sce.losses.buckets import score_bytes
from sce.losses.kernels.best import best
from sce.losses.kernels.groups import Cut, Rows, rows_of, score_again, scores_of
from sce.losses.kernels.keys import kth_largest, ordered
from sce.losses.kernels.launch import ceil_div, launch, power_of_2
from sce.losses.kernels.precision import half_name, load_rows, product_of_rows
from sce.losses.kernels.tiles import ROWS, again_tile, block, grouping_tile

_CENTRES = 64  # of a tile, which is best full
_SAMPLED = 256, 512  # of the rows wanted: at least, and from 16,384 on
_DEVIATIONS = 5.5  # that the sample may be wrong by: too few pass for one bucket in 10 million
_GROUP_TILES = 64  # of groups of the sample: so many that few of its best rows share one
_CHUNKS = 16  # of the words of a centre, each for a program
_WORDS = 1024  # that it reads at once


def sparse_enough(m: int, k: int) -> bool:
    """True if k of m rows are few enough for a threshold to leave out most."""
    return 8 * k <= m


def sample(m: int, least: int) -> tuple[int, int, int, int]:
    """Choose a sample of m rows whose threshold almost surely lets so many pass, or some more.

    One row of so many, tiles of groups, the threshold's rank among the groups' best, and the most
    rows that pass.
    """
    wanted = min(max(_SAMPLED[0], least // 32), _SAMPLED[1])
    every = power_of_2(max(1, least // wanted) + 1) // 2
    expected = least / every
    rank = math.ceil(expected + _DEVIATIONS * math.sqrt(expected * (1 - 1 / every)))
    tiles = min(_GROUP_TILES, ceil_div(m, ROWS * every))
    # Rows of the sample share groups: more of them pass than groups do.
    passing = -tiles * ROWS * math.log1p(-rank / (tiles * ROWS))
    most = int(every * (passing + _DEVIATIONS * math.sqrt(rank)))
    return every, tiles, rank, max(least, most)


def top_rows_by_threshold(
    centres: Tensor,  # [n, d]
    rows: Rows,
    k: int,
    spare: int,  # rows that must pass beyond k: they absorb that two passes round differently
    out: Tensor,  # [n, k] int32
    room: int | None = None,  # of the list; None: for all that pass, almost surely
) -> None:
    """Write the k rows with the largest dot product with each centre, in any order."""
    n, (m, d) = len(centres), rows.values.shape
    tiles = ceil_div(m, ROWS)
    every, group_tiles, rank, expected = sample(m, k + spare)
    room = min(m, 16 * ceil_div(expected if room is None else room, 16))
    budget = score_bytes(m, d) // 4
    at_once = max(1, budget // (max(group_tiles * ROWS, room) + room))
    at_once = min(n, max(at_once // _CENTRES * _CENTRES, min(at_once, _CENTRES)))
    # Words of bits, which stand where scores of the list do later.
    words = max(budget // at_once - room, room)
    slab = min(tiles, max(1, words // (ROWS // 32)))
    for start in range(0, n, at_once):  # nothing of one part is there in the next
        some = slice(start, start + at_once)
        _top_rows(
            centres[some], rows, k, k + spare, every, rank, group_tiles, room, slab, out[some]
        )


def _top_rows(
    centres: Tensor,
    rows: Rows,
    k: int,
    least: int,  # rows that must pass
    every: int,  # of these rows one is sampled
    rank: int,  # of the threshold in the sample
    group_tiles: int,
    room: int,
    slab: int,  # tiles whose bits are held
    out: Tensor,
) -> None:
    n, m, device = len(centres), len(rows.values), out.device
    tiles = ceil_div(m, ROWS)
    width = max(group_tiles * ROWS, slab * (ROWS // 32), room)
    values = torch.empty(n * width, device=device, dtype=torch.float32)
    listed = torch.empty(n, room, device=device, dtype=torch.int32)
    counts = torch.empty(n, device=device, dtype=torch.int32)
    chunks = counts.new_empty(n, _CHUNKS * ceil_div(tiles, slab))
    thresholds = torch.empty(n, device=device, dtype=torch.float32)
    _maxima(centres, rows, every, group_tiles, values)
    launch(
        _thresholds_kernel, (n,), values, thresholds, group_tiles * ROWS, rank,
        BLOCK=power_of_2(group_tiles * ROWS), num_warps=8,
    )  # fmt: skip
    words = values.view(torch.int32)
    for number, first in enumerate(range(0, tiles, slab)):
        last = min(tiles, first + slab)
        _mark(centres, rows, thresholds, first, last, words)
        _list(words, first, last, m, listed, chunks, number * _CHUNKS, counts)
    score_again(centres, rows, listed, Cut(1, 1, False), values)
    best(values, room, k, out, listed, Cut(1, 1, False))
    _search(centres, rows, thresholds, counts, least, room, out)


def _maxima(centres: Tensor, rows: Rows, every: int, group_tiles: int, out: Tensor) -> None:
    """Write the largest score of each group of the sample, [n, group_tiles * ROWS].

    A group has one row of every tile of the sample from a first one on, `group_tiles` tiles apart.
    """
    (n, d), m, half = centres.shape, len(rows.values), _is_half(centres, rows)
    tile = grouping_tile(rows.values, half=half)
    launch(
        _maxima_kernel, (group_tiles * ceil_div(n, tile.x),),
        centres, rows.values, out, n, m, d, rows.values.stride(0), group_tiles,
        EVERY=every, BLOCK_ROWS=ROWS, BLOCK_N=tile.x, BLOCK_D=block(d), SLICE=tile.slice,
        ROUND=half_name(rows.dtype), PRECISION="ieee" if half else "tf32x3",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _mark(
    centres: Tensor, rows: Rows, thresholds: Tensor, first: int, last: int, words: Tensor
) -> None:
    """Set a bit for each row of some tiles that passes, in words [n, tiles * ROWS / 32]."""
    (n, d), m, half = centres.shape, len(rows.values), _is_half(centres, rows)
    tile = grouping_tile(rows.values, half=half)
    launch(
        _mark_kernel, (last - first,),
        centres, rows.values, thresholds, words, first, (last - first) * (ROWS // 32), n, m, d,
        rows.values.stride(0), BLOCK_ROWS=ROWS, BLOCK_N=tile.x, BLOCK_D=block(d), SLICE=tile.slice,
        ROUND=half_name(rows.dtype), PRECISION="ieee" if half else "tf32x3",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _list(
    words: Tensor, first: int, last: int, m: int, listed: Tensor, chunks: Tensor, before: int,
    counts: Tensor,
) -> None:  # fmt: skip
    """Append the rows that have a bit to the lists; behind them comes m, which is no row.

    Each program has a chunk of a centre's words: it counts them first, and writes them when the
    counts of all chunks before it are known. Those of earlier tiles are so many in `chunks`.
    """
    for write in (False, True):
        launch(
            _list_kernel, (len(listed) * _CHUNKS,),
            words, listed, chunks, counts, (last - first) * (ROWS // 32), first * (ROWS // 32), m,
            listed.shape[1], chunks.shape[1], before, CHUNKS=_CHUNKS,
            ALL=power_of_2(chunks.shape[1]), BLOCK=_WORDS, WRITE=write, LAST=last * ROWS >= m,
        )  # fmt: skip


def _search(
    centres: Tensor, rows: Rows, thresholds: Tensor, counts: Tensor, least: int, room: int,
    out: Tensor,
) -> None:  # fmt: skip
    """Write the best rows where fewer passed than must, or more than the list has room for."""
    (n, d), m = centres.shape, len(rows.values)
    block_rows, columns = again_tile(d, 1)
    launch(
        _search_kernel, (n,),
        centres, rows.values, thresholds, counts, out, m, d, out.shape[1], least, room,
        rows.values.stride(0), out.stride(0), BLOCK_ROWS=block_rows, BLOCK_D=power_of_2(d),
        SLICE=columns, ROUND=half_name(rows.dtype), num_warps=8,
    )  # fmt: skip


def _is_half(centres: Tensor, rows: Rows) -> bool:
    return centres.dtype == rows.dtype != torch.float32


@triton.jit
def _maxima_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    maxima_ptr,  # [n, group_tiles * BLOCK_ROWS]
    n, m, d, stride_row, group_tiles,
    EVERY: tl.constexpr,  # a power of two
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs that read the same rows come one after the other.
    n_tiles = tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // n_tiles
    i_n = tl.program_id(0) % n_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = i_n < n
    column = tl.arange(0, BLOCK_ROWS)
    centres = load_rows(centres_ptr, i_n, in_n, d, 0, d, SLICE, "")
    best = tl.full((BLOCK_N, BLOCK_ROWS), float("-inf"), tl.float32)
    for tile in range(group, tl.cdiv(m, BLOCK_ROWS * EVERY), group_tiles):
        # One row of each stretch, by the golden section: whatever repeats in the catalogue.
        stretch = tile * BLOCK_ROWS + column
        i_row = stretch.to(tl.int64) * EVERY + ((stretch % 65536 * 40503 >> 8) & (EVERY - 1))
        mask = i_row < m
        rows = load_rows(rows_ptr, i_row, mask, stride_row, 0, d, SLICE, ROUND)
        scores = product_of_rows(
            centres, rows, centres_ptr, i_n, in_n, d, rows_ptr, i_row, mask, stride_row, d,
            BLOCK_D, SLICE, "", ROUND, PRECISION,
        )  # fmt: skip
        scores = tl.where(mask[None, :], scores, float("-inf"))
        # NaN is lost in a common maximum: it must win, reach the loss, and be noticed there.
        best = tl.maximum(best, scores, propagate_nan=tl.PropagateNan.ALL)
    at = i_n[:, None].to(tl.int64) * (group_tiles * BLOCK_ROWS) + group * BLOCK_ROWS
    tl.store(maxima_ptr + at + column[None, :], best, mask=in_n[:, None])


@triton.jit
def _thresholds_kernel(
    values_ptr,  # [n, width]
    thresholds_ptr,  # [n]
    width, rank,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    keys = ordered(values_ptr + row * width, tl.arange(0, BLOCK), width)
    least = kth_largest(keys, rank, -2147483648, 2147483647)
    bits = tl.where(least < 0, least ^ 0x7FFFFFFF, least)
    value = bits.to(tl.float32, bitcast=True)
    tl.store(thresholds_ptr + row, tl.where(value == value, value, float("-inf")))


@triton.jit
def _mark_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    thresholds_ptr,  # [n]
    words_ptr,  # [n, n_words]
    first, n_words, n, m, d, stride_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    ROUND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = BLOCK_ROWS // 32
    tile = tl.program_id(0)
    column = tl.arange(0, BLOCK_ROWS)
    i_row = (first + tile).to(tl.int64) * BLOCK_ROWS + column
    mask = i_row < m
    rows = load_rows(rows_ptr, i_row, mask, stride_row, 0, d, SLICE, ROUND)
    # The rows of a word interleave as those of a group do: one thread has the scores of all.
    bit = tl.where(mask, 1 << (column // 8 * 2 + column % 2), 0)
    for start in range(0, n, BLOCK_N):
        i_n = start + tl.arange(0, BLOCK_N)
        in_n = i_n < n
        centres = load_rows(centres_ptr, i_n, in_n, d, 0, d, SLICE, "")
        scores = product_of_rows(
            centres, rows, centres_ptr, i_n, in_n, d, rows_ptr, i_row, mask, stride_row, d,
            BLOCK_D, SLICE, "", ROUND, PRECISION,
        )  # fmt: skip
        threshold = tl.load(thresholds_ptr + i_n, mask=in_n, other=0.0)
        fails = scores < threshold[:, None]  # which NaN does not
        bits = tl.reshape(tl.where(fails, 0, bit[None, :]), (BLOCK_N, 16, 4, 2))
        word = tl.sum(tl.sum(bits, axis=3), axis=1)
        at = i_n[:, None].to(tl.int64) * n_words + tile * WORDS + tl.arange(0, WORDS)[None, :]
        tl.store(words_ptr + at, word, mask=in_n[:, None])


@triton.jit
def _list_kernel(
    words_ptr,  # [n, n_words]
    listed_ptr,  # [n, room]
    chunks_ptr,  # [n, n_chunks]
    counts_ptr,  # [n]
    n_words,
    first,  # the number of the first word
    m, room, n_chunks, before,
    CHUNKS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    bucket = (tl.program_id(0) // CHUNKS).to(tl.int64)
    chunk = tl.program_id(0) % CHUNKS
    words_ptr += bucket * n_words
    listed_ptr += bucket * room
    chunks_ptr += bucket * n_chunks
    count = 0
    if WRITE:
        earlier = tl.arange(0, ALL)
        count = tl.sum(
            tl.load(chunks_ptr + earlier, mask=earlier < before + chunk, other=0), axis=0
        )
    size = tl.cdiv(n_words, CHUNKS * BLOCK) * BLOCK
    for start in range(chunk * size, tl.minimum((chunk + 1) * size, n_words), BLOCK):
        i = start + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + i, mask=i < n_words, other=0)
        ones = word - ((word >> 1) & 0x55555555)
        ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
        ones = (((ones + (ones >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 0x3F
        if WRITE:
            at = count + tl.cumsum(ones, axis=0) - ones
            left = tl.max(ones, axis=0)
            while left > 0:
                lowest = word & -word
                # A power of two is known by the exponent of its float; the sign is that of bit 31.
                exponent = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF
                row = rows_of(first + i, exponent - 127, 32, True)
                tl.store(listed_ptr + at, row.to(tl.int32), mask=(word != 0) & (at < room))
                at += (word != 0).to(tl.int32)
                word = word & (word - 1)
                left -= 1
        count += tl.sum(ones, axis=0)
    if not WRITE:
        tl.store(chunks_ptr + before + chunk, count)
    elif LAST:
        end = tl.where(chunk == CHUNKS - 1, room, 0)
        for start in range(tl.minimum(count, room), end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(listed_ptr + i, tl.full((BLOCK,), m, tl.int32), mask=i < room)
        tl.store(counts_ptr + bucket, count, mask=end > 0)


@triton.jit
def _all_keys(
    centre_ptr, rows_ptr, start, m, d, stride_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block of rows as integers of the same order; behind m the lowest."""
    row = start + tl.arange(0, BLOCK_ROWS)
    scores = scores_of(centre_ptr, rows_ptr, row, row < m, stride_row, d, BLOCK_D, SLICE, ROUND)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(row < m, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def _search_kernel(
    centres_ptr,  # [n, d]
    rows_ptr,  # [m, d]
    thresholds_ptr,  # [n]
    counts_ptr,  # [n]
    out_ptr,  # [n, k]
    m, d, k, least, room, stride_row, stride_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    bucket = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + bucket)
    if (count < least) | (count > room):
        centre_ptr = centres_ptr + bucket * d
        out_ptr += bucket * stride_out
        # As in `kth_largest`, over all rows; the threshold and what follows it are tried first,
        # since many equal scores are why a list is too short.
        bits = tl.load(thresholds_ptr + bucket).to(tl.int32, bitcast=True)
        middle = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        low = tl.cast(-2147483648, tl.int32)
        high = tl.cast(2147483647, tl.int32)
        reach = k + 1
        above = k * 0  # rows that reach `high`
        tries = 0
        while (reach != k) & (low + 1 < high):
            reach = k * 0
            for start in range(0, m, BLOCK_ROWS):
                keys = _all_keys(
                    centre_ptr, rows_ptr, start, m, d, stride_row, BLOCK_ROWS, BLOCK_D, SLICE, ROUND
                )
                reach += tl.sum((keys >= middle).to(tl.int32), axis=0)
            above = tl.where(reach < k, reach, above)
            high = tl.where(reach < k, middle, high)
            low = tl.where(reach < k, low, middle)
            tries += 1
            half = (low >> 1) + (high >> 1) + (low & high & 1)
            middle = tl.where((tries == 1) & (reach > k), middle + 1, half)
        # Of equal scores the first rows are taken, as many as are left.
        left = tl.where(reach == k, k, k - above)
        ceiling = tl.where(reach == k, 2147483647, high)
        written = k * 0
        for start in range(0, m, BLOCK_ROWS):
            keys = _all_keys(
                centre_ptr, rows_ptr, start, m, d, stride_row, BLOCK_ROWS, BLOCK_D, SLICE, ROUND
            )
            equal = ((keys >= low) & (keys < ceiling)).to(tl.int32)
            before = tl.cumsum(equal, axis=0) - equal
            taken = (keys >= ceiling) | ((equal > 0) & (before < left))
            place = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int32)
            tl.store(out_ptr + place, row, mask=taken)
            left -= tl.minimum(left, tl.sum(equal, axis=0))
            written += tl.sum(taken.to(tl.int32), axis=0)
