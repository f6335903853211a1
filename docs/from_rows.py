"""Write the tables and numbers of README.md and docs/*.md from the rows of runs and benchmarks.

python docs/from_rows.py            # rewrites what is between <!-- rows: NAME --> and <!-- end -->,
                                    # and the numbers of the sentences in claims.py
python docs/from_rows.py --check    # changes nothing; fails where a page is not what the rows say
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import calls
import first_version
import running
import studies
import trainings
from claims import put_right
from running import rounded
from trainings import ROOT, Row, read, rows_with, table

LOSSES = {
    "CE": "`CrossEntropy()`", "CE, chunked": "`CrossEntropy(chunk_size=1024)`",
    "SCE": "`ScalableCrossEntropy(bucket_size_y=256)`", "CE-": "`SampledCrossEntropy(256)`",
    "gBCE": "`GeneralizedBinaryCrossEntropy(256)`", "BCE": "`BinaryCrossEntropy(1)`",
}  # fmt: skip


def _cost(row: Row | None) -> str:
    """Time and extra memory of a call."""
    if row is None:
        return ""
    return row.get("failed") or f"{rounded(row['ms'])} ms, {row['extra MiB']:,.0f} MiB"


def losses() -> str:
    """Time and extra memory of one call of each loss in float32, on a GPU."""
    sizes = {10_000: "10 k items", 100_000: "100 k", 1_000_000: "1 M", 10_000_000: "10 M"}
    usual = {"dtype": "float32", "dim": 64, "batch": 128, "bucket_size_y": 256}
    rows = rows_with("benchmarks/results/loss_gpu.jsonl", **usual)
    found = {(row["loss"], row["items"]): row for row in rows}
    return table(["loss", *sizes.values()], (
        [shown, *(_cost(found.get((loss, size))) for size in sizes)]
        for loss, shown in LOSSES.items()
    ))  # fmt: skip


def _kernels(dtype: str, others: dict[str, str]) -> str:
    """The kernels beside other code, for each shape that was measured."""
    usual, shapes = (128, 64, 256), {}
    for row in read("benchmarks/results/loss_gpu.jsonl"):
        if row["dtype"] == dtype:
            shape = row["items"], (row["batch"], row["dim"], row["bucket_size_y"])
            shapes.setdefault(shape, {})[row["loss"]] = row
    changed = {256: "d = 256", 640: "128,000 states, 715 buckets"}

    def cells(found: dict[str, Row], loss: str, graph: str) -> list[str]:
        rows = (found.get(name) for name in (loss, graph))
        times = [f"{rounded(row['ms'])} ms" if row else "" for row in rows]
        return [*times, f"{found[loss]['extra MiB']:,.0f} MiB"]

    rows = []
    for (items, sizes), found in sorted(shapes.items(), key=lambda one: (one[0][1] != usual, one)):
        name = f"{items // 10**6} M" if items >= 10**6 else f"{items // 1000} k"
        for size, common in zip(sizes, usual, strict=True):
            if size != common:
                name += f", {changed.get(size, f'b_y = {size:,}')}"
        if "SCE" in found:
            beside = [_cost(found.get(one)) for one in others]
            rows.append([name, *cells(found, "SCE", "SCE, CUDA graph"), *beside])
        if "SCE, sparse gradient" in found:
            sparse = cells(found, "SCE, sparse gradient", "none")
            rows.append([f"{name}, `sparse_grad`", *sparse, *[""] * len(others)])
    return table(["items", "SCE, eager", "as a graph", "extra memory", *others.values()], rows)


def kernels_bf16() -> str:
    """The kernels in bfloat16."""
    others = {"SCE, tensor code": "SCE, tensor code",
              "CE, Liger, tuned": "exact: Liger, large chunks"}  # fmt: skip
    return _kernels("bfloat16", others | {"CE, cut-cross-entropy": "exact: cut-cross-entropy"})


def kernels_float32() -> str:
    """The kernels in float32."""
    others = {"SCE, tensor code": "SCE, tensor code", "SCE, tensor code, TF32": "with TF32"}
    return _kernels("float32", others | {"SCE, RePlay": "RePlay's"})


def exact_ce() -> str:
    """Exact cross-entropy in half precision, and its errors."""
    names = {"CE, fused": "ours: kernels", "CE, chunked": "ours: chunks of 1,024 items",
             "CE, chunked, tuned": "large chunks", "CE, cut-cross-entropy": "cut-cross-entropy",
             "CE, cut-cross-entropy, unfiltered": "without its filter",
             "CE, Liger, tuned": "Liger, large chunks",
             "SCE, default": "SCE (default), not exact"}  # fmt: skip
    found: dict[tuple[int, int, str], dict[str, Row]] = {}
    for row in read("benchmarks/results/loss_gpu.jsonl"):
        loss, _, cast = row["loss"].partition(", auto")
        usual = row["batch"] == 128 and row["items"] >= 10**6
        if usual and loss in names and (cast or row["dtype"] == "bfloat16"):
            found.setdefault((row["items"], row["dim"], cast), {})[loss] = row

    def errors(row: Row) -> str:
        both = (row.get(f"{of} error") for of in ("states", "catalogue"))
        return ", ".join(f"{100 * error:.2g} %" for error in both if error is not None)

    rows = [[f"{items // 10**6} M, d = {dim}{cast and ', float32 under autocast'}",
             *(_cost(of.get(name)) for name in names)]
            for (items, dim, cast), of in sorted(found.items())]  # fmt: skip
    wrong = [errors(found[10**6, 64, ""].get(name, {})) for name in names]
    return table(["items", *names.values()], [*rows, ["errors at 1 M, d = 64", *wrong]])


def captured() -> str:
    """Exact cross-entropy and SCE as a training in half precision calls them, as a CUDA graph."""
    names = {"CE": "exact CE", "SCE": "SCE, the default"}
    found: dict[int, dict[tuple[int, str], str]] = {}
    for row in read("benchmarks/results/loss_gpu.jsonl"):
        if row["loss"].endswith("autocast, CUDA graph"):
            of, states = row["loss"].partition(",")[0], row["batch"] * row["length"]
            found.setdefault(row["items"], {})[states, of] = _cost(row)
    kinds = [(states, of) for states in (6400, 25_600) for of in names]
    heads = (f"{states:,} states: {names[of]}" for states, of in kinds)
    return table(["items", *heads], (
        [f"{items:,}", *(cells.get(kind, "") for kind in kinds)]
        for items, cells in sorted(found.items())
    ))  # fmt: skip


def catalogues() -> str:
    """Peak training memory against the size of the catalogue."""
    names = {"bce": "BCE", "bce+": "BCE⁺", "gbce": "gBCE", "ce-": "CE⁻", "ce": "CE", "sce": "SCE"}
    sizes = [3_000, 10_000, 40_000, 174_000, 10**6, 10**7]
    found = {}
    for row in read("experiments/results/memory.jsonl"):
        settings, items = row["settings"], row["dataset"]["n_items"]
        if settings["training.batch_size"] == 64:
            peak = row["memory_mib"]["training"] if row["status"] == "finished" else None
            shown = f"{peak:,.0f} MiB" if peak else row["failure"]["kind"]
            found[settings["loss.name"], settings["training.row_wise"], items] = shown
    head = ["items", *(f"{n // 10**6} M" if n >= 10**6 else f"{n // 1000} k" for n in sizes)]
    rows = [[name, *(found[loss, False, size] for size in sizes)] for loss, name in names.items()]
    return table(head, [*rows, ["SCE, row-wise", *(found["sce", True, size] for size in sizes)]])


def scale() -> str:
    """Quality, time and memory at a million items and on union7, at equal epochs."""
    names = {"SCE": "SCE (default)", "CE, cut-cross-entropy": "exact CE, cut-cross-entropy",
             "CE, chunked": "exact CE, ours"}  # fmt: skip
    found: dict[str, dict[str, Row]] = {}
    for row in read("benchmarks/results/scale.jsonl"):
        found.setdefault(row["loss"], {})[row["data"]] = row

    def cells(row: Row | None, test: str, *, first: bool) -> list[str]:
        if row is None:
            return [""] * (4 if first else 3)
        whole = row["epochs"] == (5 if first else 3)
        head = [f"{row['validation'][0]:.3f}"] if first else []
        return [*head, test if whole else "", rounded(row["ms"]), f"{row['peak MiB']:,}"]

    head = ["loss", "synthetic: NDCG@10 after 1 epoch (validation)", "after 5 (test)", "ms a step",
            "peak MiB", "union7: NDCG@10 after 3 (test)", "ms a step", "peak MiB"]  # fmt: skip
    rows = []
    for loss, data in found.items():
        made, union = data.get("synthetic"), data.get("union7")
        rows.append([
            names.get(loss, loss),
            *cells(made, f"{made['ndcg@10']:.3f}" if made else "", first=True),
            *cells(union, f"{union['ndcg@10']:.4f}" if union else "", first=False),
        ])  # fmt: skip
    return table(head, rows)


def peers() -> str:
    """SASRec by sce and by others: an epoch and its peak memory, recommending, and quality."""
    names = {"sce": "sce", "sce-chunked": "sce, exact CE without logits", "replay": "RePlay",
             "replay-plain": "RePlay, without length buckets", "rectools": "RecTools",
             "recbole": "RecBole"}  # fmt: skip
    kinds = {(loss, on): head + shown for on, head in ((False, ""), (True, "NDCG@10, "))
             for loss, shown in {"ce": "exact CE", "ce-": "CE⁻", "sce": "SCE"}.items()}  # fmt: skip
    found: dict[str, dict[str, dict[Any, list[str]]]] = {}
    for row in read("benchmarks/results/train_peers.jsonl"):
        theirs = row["shared"] != "batch" or row["library"] == "sce"
        if "failed" in row or row["ligr"] or row["data"] == "steam" or not theirs:
            continue
        machine = "H200" if row["device"] == "cuda" else row["machine"]
        where = f"{machine}; {row['batch']:,}; {row['precision']}"
        cells = found.setdefault(where, {}).setdefault(row["library"], {})
        if row["together"]:
            shown = f"{row['ndcg@10']:.4f}, {row['epochs trained']:.0f} epochs"
            shown += f", {row['peak MiB']:,.0f} MiB"
        else:
            shown = f"{rounded(row['epoch s'])} s, {row['peak MiB']:,.0f} MiB"
            cells.setdefault("recommending", [f"{rounded(row['recommend s'])} s"])
        shown += ", the batch's negatives" if row["shared"] == "batch" else ""
        cells.setdefault(kinds[row["loss"], row["together"]], []).append(shown)
    made = [(where, *one) for where, libraries in found.items() for one in libraries.items()]
    heads = [head for head in (*kinds.values(), "recommending") if any(head in c for *_, c in made)]
    return table(["machine; batch; precision", "library", *heads], (
        [where, names[library], *("; ".join(cells.get(head, [])) for head in heads)]
        for where, library, cells in made
    ))  # fmt: skip


def peers_equal() -> str:
    """Test NDCG@10 of exact CE by sce and by others after as many epochs, each seed."""
    names = {"sce": "sce", "sce-chunked": "sce, without logits", "rectools": "RecTools",
             "replay": "RePlay", "recbole": "RecBole"}  # fmt: skip
    return table(["library", "NDCG@10", "peak memory of the process"], (
        [names[row["library"]], ", ".join(f"{one:.4f}" for one in row["each ndcg@10"]),
         f"{row['peak MiB']:,.0f} MiB"]
        for row in read("benchmarks/results/train_peers.jsonl")
        if (row["data"], row["loss"], row["epochs"]) == ("steam", "ce", 20) and "failed" not in row
    ))  # fmt: skip


def planned() -> str:
    """Errors of `sce plan` as it is now, in percent of the measured peak."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from plan_cells import job_of
    from sce.planning import predict

    names = {"bce": "BCE", "bce+": "BCE⁺", "gbce": "gBCE", "ce-": "CE⁻", "ce": "CE",
             "ce chunked": "CE, chunked", "sce": "SCE", "sce row-wise": "SCE, row-wise",
             "rece": "RECE", "ligr": "LiGR", "bert4rec": "BERT4Rec", "gru4rec": "GRU4Rec",
             "hstu": "HSTU"}  # fmt: skip
    errors: dict[str, list[float]] = {name: [] for name in names}
    for row in read("benchmarks/results/plan_grid.jsonl"):
        found = predict(job_of(row), row["loss"]).total / 2**20
        error = round(100 * (found / row["peak MiB"] - 1), 1) + 0.0
        errors[row.get("backbone") or row["loss"]].append(error)
    return table(["", "sizes", "mean error, %", "from, %", "to, %"], (
        [names[name], f"{len(some)}", f"{mean(map(abs, some)):.1f}",
         f"{min(some):.1f}", f"{max(some):.1f}"]
        for name, some in errors.items()
    ))  # fmt: skip


MADE: list[Callable[[], str]] = [
    *trainings.MADE, *studies.MADE, *first_version.MADE, *running.MADE, calls.profile, losses,
    kernels_bf16, kernels_float32, exact_ce, captured, catalogues, scale, peers, peers_equal,
    planned,
]  # fmt: skip
BLOCKS = {made.__name__: made for made in MADE}
MARK = re.compile(r"(<!-- rows: (\w+) -->\n\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(page: str, text: str) -> str:
    """A page with its blocks and numbers as the rows have them now."""
    blocks = MARK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n\n{found[3]}", text)
    return put_right(page, blocks)


def main() -> int:
    """Rewrite the pages, or say what is stale."""
    check, stale = "--check" in sys.argv, False
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text("utf-8")
        new = rewritten(page.name, text)
        for line in [line for line in new.splitlines() if line not in text.splitlines()]:
            print(f"{page.name}, {'should be' if check else 'rewritten'}: {line}")
        stale = stale or new != text
        if new != text and not check:
            page.write_text(new, "utf-8")
    return int(stale and check)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LookupError as error:
        sys.exit(str(error))
