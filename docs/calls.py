"""The profile and the claims of docs/kernels.md: calls of a loss on a GPU."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from trainings import Row, read, rows_with, table

Claims = dict[str, Callable[[], Iterable[Any]]]
K, M = 1000, 10**6
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def ends(values: Iterable[float]) -> tuple[float, float]:
    """From, to."""
    some = list(values)
    return min(some), max(some)


def call(loss: str, items: int, dtype: str = "bfloat16", of: str = "ms", **shape: int) -> float:
    """Of one call on the GPU with 25,600 states of 64 dimensions, 256 items in a bucket."""
    wanted = {"loss": loss, "items": items, "dtype": dtype, "batch": 128, "dim": 64}
    wanted |= {"bucket_size_y": 256, **shape}
    return float(rows_with("benchmarks/results/loss_gpu.jsonl", **wanted)[0][of])


def _profiles() -> dict[tuple[int, str, int, float], Row]:
    """The newest of each size, and of each number of buckets: α √targets."""
    rows = read("benchmarks/results/kernel_profile.jsonl")
    keys = ("items", "dtype", "bucket_size_y")
    return {(*(row[key] for key in keys), row.get("alpha", 2.0)): row for row in rows}


LONGEST = "us, times, kernel"


def profile() -> str:
    """Where the time of a call goes, in ms."""
    parts = {
        "passes over the catalogue": "_group_maxima|_maxima|_mark", "scoring again": "_score",
        "selecting": "_best|_list|_thresholds", "sorting": ".*radix_sort", "logits": "_losses",
        "gradients": "_grad", "adding by item": "_add", "zeros": ".*FillFunc",
        "nearest centre of each state": "_nearest",
        "looking at the states, drawing centres": "_states|_few_states",
    }  # fmt: skip
    rows = [row for _, row in sorted(_profiles().items())]

    def name(row: Row) -> str:
        size = f"{row['items'] // M} M" if row["items"] >= M else f"{row['items'] // K} k"
        size += f", b_y = {row['bucket_size_y']:,}" if row["bucket_size_y"] > 256 else ""
        size += ", 1,280 buckets" if row.get("alpha") == 8 else ""
        return f"{size}, {row['dtype']}{', sparse gradient' if row['sparse_grad'] else ''}"

    def taken(row: Row, part: str) -> str:
        kernels = (us for us, _, kernel in row[LONGEST] if re.match(part, kernel))
        return f"{sum(kernels) / 1000:.2f}"

    return table(["", *map(name, rows)], [
        *([shown, *(f"{row[of]:.2f}" for row in rows)]
          for shown, of in (("eager", "ms"), ("as a graph", "graph ms"), ("GPU busy", "busy ms"))),
        *([shown, *(taken(row, part) for row in rows)] for shown, part in parts.items()),
        ["launches", *(f"{sum(times for _, times, _ in row[LONGEST])}" for row in rows)],
        ["extra memory, MiB", *(f"{row['extra MiB']:.0f}" for row in rows)],
    ])  # fmt: skip


def _faster(loss: str, than: str, items: int = M, dtype: str = "bfloat16") -> float:
    return call(than, items, dtype) / call(loss, items, dtype)


def _wide(than: str, dim: int, of: str = "ms") -> float:
    """Exact cross-entropy of others to ours."""
    return call(than, M, of=of, dim=dim) / call("CE, fused", M, of=of, dim=dim)


GRAPH, TENSORS, CUT = "SCE, CUDA graph", "SCE, tensor code", "CE, cut-cross-entropy"
LARGE = (2048, 4096, 16_384)
SMALL = [(items, dtype) for items in (100 * K, M) for dtype in ("bfloat16", "float32")]
KERNELS: Claims = {
    "takes {:.0f} ms and {:.1f} GiB at 100 k items in bfloat16": lambda: [
        call("CE, torch", 100 * K), call("CE, torch", 100 * K, of="extra MiB") / 1024],
    "its own choice of chunks it takes {:.0f} s at a million": lambda: [
        call("CE, Liger", M) / 1000],
    "SCE is {:.1f} times faster eager and {:.0f} times as a graph; at ten million {:.0f} and "
    "{:.0f} times": lambda: [
        _faster(loss, TENSORS, items) for items in (M, 10 * M) for loss in ("SCE", GRAPH)],
    "it is {:.0f} times faster than chunks, {:.1f} times faster than Liger in {:.1f} % of its "
    "memory, and {:.0f} to {:.0f} times faster than cut-cross-entropy": lambda: [
        _faster("CE, fused", "CE, chunked"), _faster("CE, fused", "CE, Liger, tuned"),
        100 * call("CE, fused", M, of="extra MiB") / call("CE, Liger, tuned", M, of="extra MiB"),
        _faster("CE, fused", CUT), _faster("CE, fused", f"{CUT}, unfiltered")],
    "At 256 dimensions it is {:.1f} times faster than Liger in {:.0f} % of its memory, and {:.1f} "
    "times faster than cut-cross-entropy": lambda: [
        _wide("CE, Liger, tuned", 256), 100 / _wide("CE, Liger, tuned", 256, "extra MiB"),
        _wide(CUT, 256)],
    "At 512 dimensions Liger and cut-cross-entropy are {:.1f} times faster than ours**, Liger in "
    "{:.0f} times the memory": lambda: [
        1 / _wide(CUT, 512), _wide("CE, Liger, tuned", 512, "extra MiB")],
    "It takes {:.2f} ms with 256 items in a bucket and {:.2f} with 2,048": lambda: [
        call("SCE, GraphedLoss", M, bucket_size_y=size) for size in (256, 2048)],
    "At 20 M items it takes {:.0f} times as long as SCE": lambda: [
        call("CE, fused", 20 * M) / call("SCE, default", 20 * M, bucket_size_y=2048)],
    "They take {:.2f}, {:.2f} and {:.2f} ms": lambda: [
        call(GRAPH, M, bucket_size_y=size) for size in LARGE],
    "which is what coverage adds, takes {:.2f} ms": lambda: [
        us / 1000 for us, _, kernel in _profiles()[M, "bfloat16", 2048, 2.0][LONGEST]
        if kernel.startswith("_nearest")],
    "when there are no gradients yet, took {:.0f} MiB": lambda: [
        call(GRAPH, M, of="forward MiB", bucket_size_y=16_384)],
    "call takes {:.1f} to {:.1f} ms, and the GPU is busy for {:.2f} to {:.2f} ms in such a "
    "call": lambda: [
        *ends(call("SCE", *size) for size in SMALL),
        *ends(_profiles()[*size, 256, 2.0]["busy ms"] for size in SMALL)],
}  # fmt: skip
