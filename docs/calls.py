"""Claims of docs/kernels.md, for docs/claims.py: calls of a loss, and their profiles."""

from collections.abc import Callable, Iterable
from typing import Any

from trainings import Row, read

Claims = dict[str, Callable[[], Iterable[Any]]]
K, M = 1000, 10**6


def ends(values: Iterable[float]) -> tuple[float, float]:
    """From, to."""
    some = list(values)
    return min(some), max(some)


def call(loss: str, items: int, dtype: str = "bfloat16", of: str = "ms") -> float:
    """Of one call on the GPU with 25,600 states of 64 dimensions, 256 items in a bucket."""
    wanted = {"loss": loss, "items": items, "dtype": dtype, "batch": 128, "dim": 64}
    rows = read("benchmarks/results/loss_gpu.jsonl")
    found = (row for row in rows if row.items() >= (wanted | {"bucket_size_y": 256}).items())
    return float(next(found)[of])


def _profile(items: int, dtype: str = "bfloat16") -> Row:
    rows = read("benchmarks/results/kernel_profile.jsonl")
    wanted = {"items": items, "dtype": dtype, "bucket_size_y": 256}
    return next(row for row in rows if row.items() >= wanted.items())


def _kernels(items: int, *names: str) -> float:
    """Milliseconds of the kernels whose names contain one of these."""
    every = _profile(items)["us, times, kernel"]
    return sum(us for us, _, name in every if any(one in name for one in names)) / 1000


def _faster(loss: str, than: str, items: int = M, dtype: str = "bfloat16") -> float:
    return call(than, items, dtype) / call(loss, items, dtype)


def _step(items: int, loop: str = "sce train", of: str = "ms") -> float:
    rows = read("benchmarks/results/train_step.jsonl")
    return next(float(row[of]) for row in rows if (row["items"], row["loop"]) == (items, loop))


SELECTING, SORTING = ("_best_folded", "_best_kernel"), ("radix_sort",)
GRAPH, TENSORS, CUT = "SCE, CUDA graph", "SCE, tensor code", "CE, cut-cross-entropy"
KERNELS: Claims = {
    "mix of all states: {:.1f} ms at 1 M items in bfloat16 and {:.1f} in float32, eager. {:.1f} ms":
        lambda: [call("SCE, mix", M), call("SCE, mix", M, "float32"), _profile(10 * M)["graph ms"]],
    "takes {:.0f} ms and {:.1f} GiB at 100 k items in bfloat16": lambda: [
        call("CE, torch", 100 * K), call("CE, torch", 100 * K, of="extra MiB") / 1024],
    "its own choice of chunks takes {:.0f} s at a million": lambda: [call("CE, Liger", M) / 1000],
    "drops small gradients, takes {:.0f} ms at a million": lambda: [call(f"{CUT}, unfiltered", M)],
    "it is {:.0f} times faster than chunks, {:.1f} times faster than Liger in {:.1f} % of its "
    "memory, and {:.0f} to {:.0f} times faster than cut-cross-entropy": lambda: [
        _faster("CE, fused", "CE, chunked"), _faster("CE, fused", "CE, Liger, tuned"),
        100 * call("CE, fused", M, of="extra MiB") / call("CE, Liger, tuned", M, of="extra MiB"),
        _faster("CE, fused", CUT), _faster("CE, fused", f"{CUT}, unfiltered")],
    "SCE is {:.1f} times faster eager and {:.0f} times as a graph": lambda: [
        _faster("SCE", TENSORS), _faster(GRAPH, TENSORS)],
    "which is exact, it is {:.0f} and {:.0f} times faster": lambda: [
        _faster("SCE", CUT), _faster(GRAPH, CUT)],
    "At ten million items it is {:.0f} and {:.0f} times faster than the tensor code": lambda: [
        _faster(loss, TENSORS, 10 * M) for loss in ("SCE", GRAPH)],
    "| scoring the best groups again | {:.2f} | {:.2f} |": lambda: [
        _kernels(items, "_score_again") for items in (M, 10 * M)],
    "| the pass over the catalogue | {:.2f}; its arithmetic alone 0.05 | {:.2f};": lambda: [
        _kernels(items, "_group_maxima") for items in (M, 10 * M)],
    "| selecting | {:.2f} | {:.2f} |": lambda: [
        _kernels(items, *SELECTING) for items in (M, 10 * M)],
    "| sorting | {:.2f} |": lambda: [_kernels(M, *SORTING)],
    "| zeros for the dense gradient | {:.2f} |": lambda: [_kernels(M, "FillFunc")],
    "| logits | {:.2f} |": lambda: [_kernels(M, "_losses")],
    "| backward, items and states | {:.2f} and {:.2f} |": lambda: [
        _kernels(M, name) for name in ("_grad_places", "_grad_states")],
    "| adding by item | {:.2f} |": lambda: [_kernels(M, "_add_by_item")],
    "| looking at the states, drawing centres | {:.2f} |": lambda: [_kernels(M, "states_kernel")
                                                                   - _kernels(M, "_grad_states")],
    "| all, {} kernels | {:.2f} | {:.2f} |": lambda: [
        sum(times for _, times, _ in _profile(M)["us, times, kernel"]),
        _profile(M)["busy ms"], _profile(10 * M)["busy ms"]],
    "| 0.6 ms | {:.1f} ms | {:.2f} ms |": lambda: [
        call("SCE", 100 * K), _profile(100 * K)["busy ms"]],
    "| 0.3 ms | {:.2f} ms | {:.2f} ms |": lambda: [
        call(GRAPH, 100 * K), _profile(100 * K)["busy ms"]],
    "| 0.7 ms | {:.1f} ms (graph {:.2f}) | {:.1f} ms |": lambda: _missed(100 * K, "float32"),
    "| 1.0 ms | {:.1f} ms (graph {:.2f}) | {:.2f} ms |": lambda: _missed(M, "bfloat16"),
    "| 1.6 ms | {:.1f} ms (graph {:.1f}) | {:.1f} ms |": lambda: _missed(M, "float32"),
    "| 5 x | {:.1f} x, float32 {:.1f} x (graph {:.0f} and {:.1f} x)": lambda: [
        _faster(loss, TENSORS, M, dtype)
        for loss in ("SCE", GRAPH) for dtype in ("bfloat16", "float32")],
    "| 2.5 ms | {:.1f} ms (graph {:.1f}) | {:.2f} ms |": lambda: [
        call("SCE, sparse gradient", 10 * M), _profile(10 * M)["graph ms"],
        _profile(10 * M)["busy ms"]],
    "make {:.1f} to {:.1f} ms of each call (hosts and days differ: on that of the profiles {:.1f} "
    "to {:.1f} ms)": lambda: [
        end for of in (call, _profiled) for end in ends(
            of("SCE", items, dtype)
            for items in (100 * K, M) for dtype in ("bfloat16", "float32"))],
    "selecting {:.3f} ms, scoring again {:.3f}, the sort {:.3f}, logits {:.3f}, gradients {:.3f}, "
    "the pass {:.3f}, adding {:.3f}, states and centres {:.3f}": lambda: [
        *(_kernels(100 * K, *names) for names in (
            SELECTING, ("_score_again",), ("Onesweep",), ("_losses",),
            ("_grad_places", "_grad_states"), ("_group_maxima",), ("_add_by_item",))),
        _kernels(100 * K, "states_kernel") - _kernels(100 * K, "_grad_states")],
    "| `sce train`, 100 k items | {:.2f} ms |": lambda: [_step(100 * K)],
    "| `sce train`, 1 M | {:.2f} ms |": lambda: [_step(M)],
    "| `sce train`, 10 M, row-wise updates | {:.2f} ms |": lambda: [_step(10 * M)],
    "| straightforward loop, 1 M | {:.1f} ms |": lambda: [_step(M, "authors' style")],
    "| straightforward loop, 10 M | {:.1f} ms |": lambda: [_step(10 * M, "authors' style")],
    "would take {:.1f} ms for the backbone, {:.1f} ms for the loss and {:.1f} ms for the optimizer":
        lambda: [_step(M, of=f"{part} ms") for part in ("backbone", "loss", "optimizer")],
}  # fmt: skip


def _profiled(_: str, items: int, dtype: str) -> float:
    return float(_profile(items, dtype)["ms"])


def _missed(items: int, dtype: str) -> list[float]:
    """Eager, as a graph, and how long the GPU is busy."""
    return [call("SCE", items, dtype), call(GRAPH, items, dtype), _profile(items, dtype)["busy ms"]]
