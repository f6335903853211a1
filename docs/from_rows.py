"""Write the tables of README.md and docs/*.md from the rows of runs and benchmarks.

python docs/from_rows.py            # rewrites what is between <!-- rows: NAME --> and <!-- end -->
python docs/from_rows.py --check    # changes nothing; fails where a page is not what the rows say
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from studies import ROOT, STUDIES, Row, read, table

# Over test users, by `sce compare` from the ranks of the runs, which are too large to keep.
INTERVALS = {
    "ml1m": "0.984–1.097", "steam": "0.991–1.022", "yoochoose_buys": "0.997–1.003",
    "globo": "1.030–1.065", "beauty": "1.010–1.035", "reddit": "1.008–1.020",
    "yelp2019": "0.995–1.049", "food": "0.992–1.260", "beauty2": "0.997–1.025",
    "union7": "0.974–1.029",
}  # fmt: skip
RIVALS = {
    ("sce", None): "SCE", ("ce-", "uniform"): "CE⁻, uniform",
    ("ce-", "popularity"): "CE⁻, popularity", ("ce-", "in-batch"): "CE⁻, in-batch",
    ("ce-", "mixed"): "CE⁻, mixed", ("ce-", "scaled"): "CE⁻, scaled",
    ("bce+", "uniform"): "BCE⁺", ("gbce", "uniform"): "gBCE", ("rece", None): "RECE",
}  # fmt: skip
LOSSES = {
    "CE": "`CrossEntropy()`", "CE, chunked": "`CrossEntropy(chunk_size=1024)`",
    "SCE": "`ScalableCrossEntropy(bucket_size_y=256)`", "CE-": "`SampledCrossEntropy(256)`",
    "gBCE": "`GeneralizedBinaryCrossEntropy(256)`", "BCE": "`BinaryCrossEntropy(1)`",
}  # fmt: skip


def _trainings() -> dict[str, dict[tuple[str, str | None], list[Row]]]:
    """Trainings of SASRec for each log, by loss and source of negatives; small catalogues first."""
    found: dict[str, dict[tuple[str, str | None], list[Row]]] = {}
    rows = [row for row in read("experiments/results/default") if row["status"] == "finished"]
    for row in sorted(rows, key=lambda row: (row["dataset"]["n_items"], row["seed"])):
        settings = row["settings"]
        if settings["model.name"] == "sasrec":
            loss = settings["loss.name"], settings.get("loss.negatives")
            found.setdefault(row["dataset"]["name"], {}).setdefault(loss, []).append(row)
    return found


def _ndcg(rows: Iterable[Row], on: str = "test") -> list[float]:
    return [row[on]["ndcg@10"] for row in rows]


def _against_ce() -> Iterator[dict[str, Any]]:
    """The default and exact CE on each log."""
    for log, losses in _trainings().items():
        ce, sce = losses["ce", None], losses["sce", None]
        peaks = [mean(row["memory_mib"]["training"] for row in rows) for rows in (sce, ce)]
        yield {
            "log": log, "items": ce[0]["dataset"]["n_items"], "users": ce[0]["users"]["test"],
            "seeds": len(sce), "ce": _ndcg(ce), "sce": _ndcg(sce), "peaks": peaks,
            **{on: mean(_ndcg(sce, on)) / mean(_ndcg(ce, on)) for on in ("test", "validation")},
        }  # fmt: skip


def _ms(value: float) -> str:
    if value < 0.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


def default() -> str:
    """SCE by default against exact CE, log by log."""
    head = ["log", "items", "test users", "CE, test NDCG@10", "SCE", "ratio, test", "interval",
            "ratio, validation"]  # fmt: skip
    found = list(_against_ce())
    rows = [
        [one["log"], f"{one['items']:,}", f"{one['users']:,}", _spread(one["ce"]),
         _spread(one["sce"]), f"{one['test']:.3f}", INTERVALS.get(one["log"], ""),
         f"{one['validation']:.3f}"]
        for one in found
    ]  # fmt: skip
    for name, of in (("mean", mean), ("median", median)):
        both = [f"**{of(one[on] for one in found):.3f}**" for on in ("test", "validation")]
        rows.append([name, "", "", "", "", both[0], "", both[1]])
    return table(head, rows)


def short() -> str:
    """The same for README: what a reader decides by."""
    head = ["log", "items", "CE, NDCG@10", "SCE, NDCG@10", "CE, memory", "SCE, memory"]
    return table(head, (
        [one["log"], f"{one['items']:,}", f"{mean(one['ce']):.4f}", f"{mean(one['sce']):.4f}",
         *(f"{peak:,.0f} MiB" for peak in reversed(one["peaks"]))]
        for one in _against_ce()
    ))  # fmt: skip


def summary() -> str:
    """The same in three sentences."""
    found = list(_against_ce())
    ratios = [one["test"] for one in found]
    shares = [100 * one["peaks"][0] / one["peaks"][1] for one in found]
    items = [one["items"] for one in found]
    return (
        f"On {len(found)} logs of {min(items):,} to {max(items):,} items, the test NDCG@10 of SCE "
        f"is {min(ratios):.2f} to {max(ratios):.2f} times that of exact CE.\n"
        f"The median is {median(ratios):.2f}, the mean {mean(ratios):.2f}.\n"
        f"SCE takes {min(shares):.0f} to {max(shares):.0f} % of the peak "
        "training memory of exact CE that keeps all logits."
    )


def rivals() -> str:
    """Ratios to exact CE of the same seeds, test / validation; bold: the best on test."""
    logs = _trainings()
    kinds = [kind for kind in RIVALS if any(kind in losses for losses in logs.values())]
    ratios: dict[str, dict[Any, tuple[float, float]]] = {}
    for log, losses in logs.items():
        for kind in kinds:
            # SCE has more seeds than the others: all are compared on those that the others have.
            seeds = {row["seed"] for other in kinds[1:] for row in losses.get(other, ())}
            rows = [row for row in losses.get(kind, ()) if row["seed"] in seeds]
            ce = [row for row in losses["ce", None] if row["seed"] in {one["seed"] for one in rows}]
            if rows:
                of = ("test", "validation")
                test, other = (mean(_ndcg(rows, on)) / mean(_ndcg(ce, on)) for on in of)
                ratios.setdefault(log, {})[kind] = test, other

    def cell(found: dict[Any, tuple[float, float]], kind: Any) -> str:
        if kind not in found:
            return ""
        test, validation = (f"{ratio:.2f}" for ratio in found[kind])
        best = found[kind][0] == max(one[0] for one in found.values())
        return f"{f'**{test}**' if best else test} / {validation}"

    rows = [[log, *(cell(found, kind) for kind in kinds)] for log, found in ratios.items()]
    last = ["mean (logs)"]
    for kind in kinds:
        some = [found[kind] for found in ratios.values() if kind in found]
        means = " / ".join(f"{mean(one[place] for one in some):.2f}" for place in (0, 1))
        last.append(f"{means} ({len(some)})")
    return table(["log", *(RIVALS[kind] for kind in kinds)], [*rows, last])


def losses() -> str:
    """Time and extra memory of one call of each loss in float32, on a GPU."""
    sizes = {10_000: "10 k items", 100_000: "100 k", 1_000_000: "1 M", 10_000_000: "10 M"}
    found = {
        (row["loss"], row["items"]): row
        for row in read("benchmarks/results/loss_gpu.jsonl")
        if row["dtype"] == "float32"
        and (row["dim"], row["batch"], row["bucket_size_y"]) == (64, 128, 256)
    }  # fmt: skip

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        return row.get("failed") or f"{_ms(row['ms'])} ms, {row['extra MiB']:,.0f} MiB"

    return table(["loss", *sizes.values()], (
        [shown, *(cell(found.get((loss, size))) for size in sizes)]
        for loss, shown in LOSSES.items()
    ))  # fmt: skip


def backbones() -> str:
    """Test NDCG@10 of each backbone with SCE and with exact CE, of seed 0."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in sorted(
        read("experiments/results/default"), key=lambda row: row["dataset"]["n_items"]
    ):
        loss, model = row["settings"]["loss.name"], row["settings"]["model.name"]
        if loss in ("sce", "ce") and row["seed"] == 0:
            log = found.setdefault(row["dataset"]["name"], {})
            log.setdefault(model, {})[loss] = row["test"]["ndcg@10"]
    names = {"sasrec": "SASRec", "ligr": "LiGR", "hstu": "HSTU", "gru4rec": "GRU4Rec",
             "bert4rec": "BERT4Rec"}  # fmt: skip

    def cell(of: dict[str, float]) -> str:
        return " / ".join(f"{of[loss]:.4f}" if loss in of else "–" for loss in ("sce", "ce"))

    return table(["log", *names.values()], (
        [log, *(cell(models.get(name, {})) for name in names)]
        for log, models in found.items() if len(models) > 1
    ))  # fmt: skip


def _kernels(dtype: str, others: dict[str, str]) -> str:
    """The kernels beside other code, for each shape that was measured."""
    usual, shapes = (128, 64, 256), {}
    for row in read("benchmarks/results/loss_gpu.jsonl"):
        if row["dtype"] == dtype:
            shape = row["items"], (row["batch"], row["dim"], row["bucket_size_y"])
            shapes.setdefault(shape, {})[row["loss"]] = row
    changed = {256: "d = 256", 640: "128,000 states, 715 buckets of 715"}

    def cells(found: dict[str, Row], loss: str, graph: str) -> list[str]:
        times = [f"{_ms(found[name]['ms'])} ms" if name in found else "" for name in (loss, graph)]
        return [*times, f"{found[loss]['extra MiB']:,.0f} MiB"]

    def other(row: Row | None) -> str:
        return f"{_ms(row['ms'])} ms, {row['extra MiB']:,.0f} MiB" if row and "ms" in row else ""

    rows = []
    for (items, sizes), found in sorted(shapes.items(), key=lambda one: (one[0][1] != usual, one)):
        name = f"{items // 10**6} M" if items >= 10**6 else f"{items // 1000} k"
        for size, common in zip(sizes, usual, strict=True):
            if size != common:
                name += f", {changed.get(size, f'b_y = {size:,}')}"
        if "SCE" in found:
            beside = [other(found.get(one)) for one in others]
            rows.append([name, *cells(found, "SCE", "SCE, CUDA graph"), *beside])
        if "SCE, sparse gradient" in found:
            sparse = cells(found, "SCE, sparse gradient", "none")
            rows.append([f"{name}, `sparse_grad`", *sparse, *[""] * len(others)])
    return table(["items", "SCE, eager", "as a graph", "extra memory", *others.values()], rows)


def kernels_bf16() -> str:
    """The kernels in bfloat16."""
    others = {
        "SCE, tensor code": "SCE, tensor code",
        "CE, Liger, tuned": "exact: Liger, large chunks",
    }
    return _kernels("bfloat16", others | {"CE, cut-cross-entropy": "exact: cut-cross-entropy"})


def kernels_float32() -> str:
    """The kernels in float32."""
    others = {"SCE, tensor code": "SCE, tensor code", "SCE, tensor code, TF32": "with TF32"}
    return _kernels("float32", others | {"SCE, RePlay": "RePlay's"})


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
             "CE, chunked": "exact CE, chunks of 8,192 items"}  # fmt: skip
    found: dict[str, dict[str, Row]] = {}
    for row in read("benchmarks/results/scale.jsonl"):
        found.setdefault(row["loss"], {})[row["data"]] = row

    def cells(row: Row | None, test: str, *, first: bool) -> list[str]:
        if row is None:
            return [""] * (4 if first else 3)
        whole = row["epochs"] == (5 if first else 3)
        head = [f"{row['validation'][0]:.3f}"] if first else []
        return [*head, test if whole else "", _ms(row["ms"]), f"{row['peak MiB']:,}"]

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


def serving() -> str:
    """Requests a second, and how long half, 90 % and 99 % of them waited at most, in ms."""
    servers = {"sce serve": "`sce serve`, exact", "sce serve --index": "with the index",
               "FastAPI + torch, one at a time": "FastAPI + torch"}  # fmt: skip
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in read("benchmarks/results/serve.jsonl"):
        if row["server"] in servers and row["seconds"] < 60:
            waits = (_ms(row[percentile]) for percentile in ("p50", "p90", "p99"))
            where = found.setdefault((row["items"], row["concurrency"]), {})
            where[row["server"]] = f"{row['requests/s']:,.0f}; {', '.join(waits)}"
    return table(["items", "clients", *servers.values()], (
        [f"{items:,}", f"{clients}", *(cells.get(server, "") for server in servers)]
        for (items, clients), cells in sorted(found.items())
    ))  # fmt: skip


def ranks() -> str:
    """The share of one rank."""
    head = ["items, ranks", "step", "choosing candidates", "the same, modelled", "norms and bounds",
            "MB sent", "by the formula", "peak memory", "sending by InfiniBand, modelled",
            "by NVLink, modelled"]  # fmt: skip
    return table(head, (
        [f"10{'⁸' if row['items'] == 10**8 else '⁹'}, {row['ranks']}",
         *(f"{row[f'{what} ms']:.0f} ms"
           for what in ("step", "selection", "modelled selection", "norm and bounds")),
         f"{row['MB']:.1f}", f"{row['MB by the formulas']:.1f}",
         f"{row['peak MiB']:,} MiB", f"{row['ms by InfiniBand']:.1f} ms",
         f"{row['ms by NVLink']:.1f} ms"]
        for row in read("benchmarks/results/rank_share.jsonl")
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


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        default,
        short,
        summary,
        rivals,
        backbones,
        losses,
        kernels_bf16,
        kernels_float32,
        catalogues,
        scale,
        serving,
        ranks,
        planned,
    )
} | STUDIES
MARK = re.compile(r"(<!-- rows: (\w+) -->\n\n).*?(<!-- end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A page with its blocks as the rows have them now."""
    return MARK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    """Rewrite the pages, or say which are stale."""
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text("utf-8")
        if (new := rewritten(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, "utf-8")
    if stale:
        print("stale:" if "--check" in sys.argv else "rewritten:", *stale)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
