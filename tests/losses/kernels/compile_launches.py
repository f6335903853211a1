"""Compile what calls of the losses would launch on a GPU, without one: python -m, chip, cases.

Triton's interpreter runs kernels as Python: it sees no types, and no limits of a chip. Here each
launch is compiled instead of run; buffers stay as they are made, which is of zeros.
"""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sce.losses import kernels
from sce.losses.kernels import tiles

SHARED_BYTES = {90: 227 << 10, 86: 99 << 10, 100: 227 << 10}  # that a program may have on a chip
chip = 90
_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
_compiled: set[Any] = set()


def compile_launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Tensor | int,
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> None:
    signature, values, attributes = {}, {}, {}
    for place, (name, given) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(given, Tensor):
            signature[name], aligned = _POINTERS[given.dtype], given.data_ptr() % 16 == 0
        elif given == 1:
            signature[name], values[(place,)], aligned = "constexpr", 1, False
        else:
            signature[name], aligned = "i32" if abs(given) < 1 << 31 else "i64", given % 16 == 0
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    for name, value in constants.items():
        signature[name], values[(kernel.arg_names.index(name),)] = "constexpr", value
    assert [*signature] == kernel.arg_names, "arguments and constants in the order of the kernel"
    numbers = (num_warps, num_stages, registers, *attributes)
    key = (kernel.fn.__name__, *signature.items(), *values.items(), *numbers)
    if key in _compiled:
        return
    _compiled.add(key)
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": registers}
    target = GPUTarget("cuda", chip, 32)
    shared = triton.compile(source, target=target, options=options).metadata.shared
    assert shared <= SHARED_BYTES[chip], (kernel.fn.__name__, constants, shared)


def run(dtype: str, d: int, kind: str) -> None:
    """Call a loss, forward and backward, as a case says."""
    half = torch.float16 if dtype == "float16" else torch.bfloat16
    cast = half if dtype == "autocast" else None
    made = torch.float32 if dtype in ("autocast", "float32") else half
    # So many items and, in a bucket, so many of them that each way to choose them is taken.
    n, c = 300, {"paper": 100_000, "wide": 40_000}.get(kind, 20_000)
    kinds = (torch.float32, half) if dtype == "mixed" else (made, made)
    states, items = (
        torch.zeros(m, d, dtype=each, requires_grad=True)
        for m, each in zip((n, c), kinds, strict=True)
    )
    targets = torch.zeros(n, dtype=torch.int64)
    if kind == "exact":
        kernels.fused_full_cross_entropy(states, items, targets, cast or made).sum().backward()
        return
    choices: dict[str, tuple[list[int], Any, str]] = {
        "coverage": ([40, 0, 1152], "random", "mean"),
        "paper": ([40, 100, 256], "mix", "none"),
        "wide": ([4, 100, 6000], "states", "sum"),
    }
    sizes, centres, reduction = choices[kind]
    options = kernels.FusedOptions(sizes, centres, reduction=reduction, autocast_dtype=cast)
    seed = torch.zeros(1, dtype=torch.int64)
    given = (states, items, targets, options, None, seed, kind == "paper")
    kernels.fused_cross_entropy(*given).loss.sum().backward()


def main() -> None:
    global chip
    chip = int(sys.argv[1])
    vars(tiles).update(_is_small=lambda _: chip == 86, _is_blackwell=lambda _: chip == 100)
    for name, module in list(sys.modules.items()):
        if name.startswith("sce.losses.kernels.") and hasattr(module, "launch"):
            vars(module)["launch"] = compile_launch
    vars(torch).update(empty=torch.zeros, empty_like=torch.zeros_like)
    Tensor.new_empty = Tensor.new_zeros  # type: ignore[method-assign]
    vars(torch)["_assert_async"] = lambda *_: None  # of what no kernel has looked at
    for case in sys.argv[2:]:
        dtype, d, kind = case.split(",")
        run(dtype, int(d), kind)
    print("compiled:", *sorted({key[0] for key in _compiled}))


if __name__ == "__main__":
    main()
