"""Half precision on the chip: rows are read as they are, and rounded where a product needs them."""

import torch
import triton
import triton.language as tl

from sce.losses.kernels.launch import IS_INTERPRETED

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def half_name(dtype: torch.dtype | None) -> str:
    """Name a half precision for a kernel; any other dtype has no name: nothing is rounded."""
    return "" if dtype is None else _NAMES.get(dtype, "")


@triton.jit
def rounded(values, ROUND: tl.constexpr):
    """Round to a half precision, by its name: what a matrix unit of that precision takes."""
    if ROUND == "fp16":
        values = values.to(tl.float16)
    elif ROUND == "bf16":
        if IS_INTERPRETED:
            # The interpreter cuts bits off instead of rounding, and multiplies bfloat16 as if they
            # were integers: there they stay float32 numbers.
            values = values.to(tl.float32)
            bits = values.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
        else:
            values = values.to(tl.bfloat16)
    return values


@triton.jit
def load_rows(ptr, rows, mask, stride, first, d, BLOCK_D: tl.constexpr, ROUND: tl.constexpr):
    """Load rows of a matrix by their numbers, from a first column on, and round them.

    Zeros stand for masked rows, and behind the end of a row.
    """
    i_d = first + tl.arange(0, BLOCK_D)
    values = tl.load(
        ptr + rows[:, None].to(tl.int64) * stride + i_d[None, :],
        mask=mask[:, None] & (i_d < d)[None, :],
        other=0.0,
    )
    return rounded(values, ROUND)


@triton.jit
def store_rows(ptr, rows, values, mask, d, BLOCK_D: tl.constexpr):
    """Write rows of a contiguous matrix by their numbers, in its precision."""
    i_d = tl.arange(0, BLOCK_D)
    at = ptr + rows[:, None].to(tl.int64) * d + i_d[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=mask[:, None] & (i_d < d)[None, :])


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Return x · yᵀ, by matrix units of their precision, or in float32 where they differ."""
    if x.dtype != y.dtype:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, tl.trans(y), input_precision=PRECISION)


@triton.jit
def product_of_rows(
    x, y, x_ptr, x_rows, in_x, stride_x, y_ptr, y_rows, in_y, stride_y, d,
    BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
    ROUND_X: tl.constexpr, ROUND_Y: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return x · yᵀ for rows that are held, or else read once more, a slice of columns at a time.

    What was loaded of rows too wide to be held is then not used, and the compiler drops the load.
    """
    if SLICE == BLOCK_D:
        return product(x, y, PRECISION)
    total = tl.zeros((x_rows.shape[0], y_rows.shape[0]), tl.float32)
    for first in range(0, d, SLICE):
        # Of other shapes than x and y, whose names these must not take.
        a = load_rows(x_ptr, x_rows, in_x, stride_x, first, d, SLICE, ROUND_X)
        b = load_rows(y_ptr, y_rows, in_y, stride_y, first, d, SLICE, ROUND_Y)
        total += product(a, b, PRECISION)
    return total


@triton.jit
def exponential(values, less=0.0):
    """Return e to the power of values - less, by one instruction; 0 for what is below 2⁻¹²⁶.

    `less` is scaled before it is subtracted, in one instruction with the scaling of the values.
    """
    if IS_INTERPRETED:
        return tl.exp(values - less)
    powers = values * 1.4426950408889634 - less * 1.4426950408889634
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [powers], tl.float32, True, 1
    )


@triton.jit
def add_weighted(
    total, weights, rows, ROUND: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr
):
    """Add weights · rows for weights of at most one, by matrix units of the rows' precision.

    Weights in half precision are good enough for a sum that is itself kept in it. Split into two
    halves, they have the bits that one in float32 deserves. `added` gives what was added up.
    """
    # Not by an early return: what stands behind one is compiled, and rows may be of any type.
    if ROUND == "":
        total = tl.dot(weights, rows.to(tl.float32), total, input_precision=PRECISION)
    else:
        if ROUND == "fp16":
            weights = weights * 4096.0  # it has few bits below 1
        high = rounded(weights, ROUND)
        total = tl.dot(high, rows, total)
        if SPLIT:
            total = tl.dot(rounded(weights - high.to(tl.float32), ROUND), rows, total)
    return total


@triton.jit
def added(total, ROUND: tl.constexpr):
    """Return a sum of weighted rows."""
    return total * (1.0 / 4096.0) if ROUND == "fp16" else total
