"""Searching numbers by their bits: what the kernels in `best.py` and `wide.py` share."""

import triton
import triton.language as tl

from sce.losses.kernels.groups import rows_of


@triton.jit
def ordered(ptr, i, width):
    """Load float32 numbers as integers of the same order, below all of them what is not there."""
    value = tl.load(ptr + i, mask=i < width, other=0.0)
    value = tl.where(value == value, value, float("inf"))
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # no negative zero: it equals zero
    return tl.where(i < width, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def number_of(
    column,
    there,
    groups_ptr,
    GROUP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PART: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    """Return what columns stand for, of those that are there."""
    number = column
    if WITH_GROUPS:
        PARTS: tl.constexpr = GROUP // PART
        group = tl.load(groups_ptr + column // PARTS, mask=there, other=0)
        if PART == 1:
            number = rows_of(group, column % PARTS, GROUP, INTERLEAVED).to(tl.int32)
        elif INTERLEAVED:
            number = ((group // 4) * PARTS + column % PARTS) * 4 + group % 4
        else:
            number = group * PARTS + column % PARTS
    return number


@triton.jit
def kth_largest(keys, k, DIGITS: tl.constexpr):
    """Return a number that exactly k keys reach, or, if there is none, the k-th largest key."""
    if DIGITS:
        unsigned = keys.to(tl.uint32, bitcast=True) ^ 0x80000000
        base = tl.full((), 0, tl.int64)
        reach = k + 1
        above = 0
        shift = 24
        while (shift >= 0) & (reach != k):
            counts = count_digits(unsigned, base, shift)
            base, reach, above = take_digit(counts, k, base, shift, reach, above)
            shift -= 8
        least = (base - 2147483648).to(tl.int32)
    else:
        least = -2147483648
        reach = k + 1
        bit = 31
        while (bit >= 0) & (reach != k):  # bit by bit from the top
            tried = tl.where(bit == 31, 0, least + (1 << (bit & 31)))
            reach = tl.sum((keys >= tried).to(tl.int32), axis=0)
            least = tl.where(reach >= k, tried, least)
            bit -= 1
    return least


@triton.jit
def count_digits(keys, base, shift):
    """Count the keys by what follows the base: 256 digits; what is below counts as the lowest."""
    start = base.to(tl.uint32)
    digit = tl.minimum((keys - start) >> shift.to(tl.uint32), 255)
    return tl.histogram(tl.where(keys < start, 0, digit).to(tl.int32), 256)


@triton.jit
def take_digit(counts, k, base, shift, reach, above):
    """Add to the base the largest digit that k keys reach.

    With it goes how many keys reach the new base, and how many all that begins like it.
    """
    i = tl.arange(0, 256)
    reached = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.max(tl.where(reached >= k, i, 0), axis=0)
    # The lowest digit is not counted alone, nor is the highest.
    reach = tl.where(digit > 0, tl.sum(tl.where(i == digit, reached, 0), axis=0), reach)
    above = tl.where(digit < 255, tl.sum(tl.where(i == digit + 1, reached, 0), axis=0), above)
    return base + (digit.to(tl.int64) << shift), reach, above


@triton.jit
def lowest(equal, number, room):
    """Return the number up to which `room` of the equal ones are taken, lowest first."""
    last = 2147483647
    if tl.sum(equal.to(tl.int32), axis=0) > room:
        below = -1  # the largest number that fewer of them than there is room for reach down to
        for bit in range(31):
            tried = below + (1 << (30 - bit))
            reach = tl.sum((equal & (number <= tried)).to(tl.int32), axis=0)
            below = tl.where(reach < room, tried, below)
        last = below + 1
    return last
