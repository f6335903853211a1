"""Tables and claims of docs/paper.md, of trainings with version 0.1 by the paper's rule."""

from statistics import mean, median, stdev

from calls import WORDS, Claims, ends
from studies import memory, mib, percent, times
from trainings import Row, against_ce, ndcg, read, table

LOGS = ("beauty", "ml1m", "globo")
SETTINGS: dict[str, Row] = {
    "BCE": {"name": "bce"}, "BCE⁺, 64 negatives": {"name": "bce+", "n_negatives": 64},
    "BCE⁺, 256": {"name": "bce+", "n_negatives": 256},
    "gBCE, 256, t = 0.75": {"name": "gbce", "t": 0.75},
    "gBCE, 256, t = 0.9": {"name": "gbce", "t": 0.9},
    "CE⁻, 64": {"name": "ce-", "n_negatives": 64}, "CE⁻, 256": {"name": "ce-", "n_negatives": 256},
    "CE": {"name": "ce"}, "SCE, b_y = 64": {"name": "sce", "bucket_size_y": 64},
    "SCE, b_y = 256": {"name": "sce", "bucket_size_y": 256},
    "SCE, b_y = 1,024": {"name": "sce", "bucket_size_y": 1024},
}  # fmt: skip


def _chosen(log: str, name: str, of: str = "", *, half: bool = False) -> list[Row]:
    """Trainings by a line of the table, with the whole batch or half of it."""
    wanted = {f"loss.{key}": value for key, value in SETTINGS[name].items()}
    wanted["training.batch_size"] = (1024 if log == "beauty" else 128) // (1 + half)
    if "sce" in wanted.values():
        centres = "random" if log == "beauty" else "states"
        wanted |= {"loss.alpha": 2.0, "loss.beta": 1.0, "loss.centres": centres}
    return [
        row for row in read(f"experiments/results/{of}{log}.jsonl")
        if row["status"] == "finished" and wanted.items() <= {
            key: value for key, value in row["settings"].items() if not isinstance(value, list)
        }.items()
    ]  # fmt: skip


def _validated(log: str, name: str) -> float:
    return mean(row["validation"]["ndcg@10"] for row in _chosen(log, name) if row["seed"] < 3)


def _star(log: str, loss: str) -> str:
    """The line of the table that validation chooses for a loss."""
    ours = [name for name, one in SETTINGS.items() if one["name"] == loss]
    return max(ours, key=lambda name: _validated(log, name))


def _cells(log: str) -> dict[str, str]:
    """NDCG@10 of each setting; bold: the best; a star: what validation chooses for its loss."""
    digits = 4 - (log == "globo")
    found = {name: ndcg(_chosen(log, name)) for name in SETTINGS}
    best = max(round(mean(some), digits) for some in found.values())
    cells = {}
    for name, some in found.items():
        bold = "**" * (round(mean(some), digits) == best)
        cells[name] = f"{bold}{mean(some):.{digits}f}{bold} ± {stdev(some):.{digits}f}"
    for loss in {one["name"] for one in SETTINGS.values()}:
        cells[_star(log, loss)] += " *"
    return cells


def _peak(log: str, name: str, *, half: bool = False) -> float:
    """Of whole trainings for CE, of ten epochs for all others and for half the batch."""
    rows = _chosen(log, name, "" if name == "CE" and not half else "ten-epochs/", half=half)
    return median(row["memory_mib"]["training"] for row in rows)


def main_table() -> str:
    """Losses by the paper's settings."""
    cells = {log: _cells(log) for log in LOGS}
    return table(["", *LOGS, "memory, MiB"], (
        [name, *(cells[log][name] for log in LOGS),
         ", ".join(f"{_peak(log, name):,.0f}" for log in LOGS)]
        for name in SETTINGS
    ))  # fmt: skip


# The authors' code on the same data, one run each: NDCG@10 of it, or of two, and HR@10.
PUBLISHED = {
    ("beauty", "SCE"): ("0.0553", "0.0936"), ("beauty", "CE"): ("0.0504", "0.0865"),
    ("ml1m", "SCE, mix of all"): ("0.0700, 0.0685", "0.118"), ("ml1m", "CE"): ("0.0659", "0.112"),
    ("ml1m", "CE⁻"): ("0.0580", "0.100"), ("globo", "SCE, mix of all"): ("0.158, 0.137", "0.270"),
    ("globo", "CE"): ("0.126", "0.223"), ("globo", "CE⁻"): ("0.138", "0.247"),
}  # fmt: skip


def _kind(row: Row) -> str | None:
    """The loss of a training in the table; None: it is of another table."""
    variant, four = row.get("variant") or "", "mixes of 4 states with positive weights"
    others = ("bf16", "bucket", "noise 2", "mix-of")
    if any(option in row["options"] for option in others):
        return None
    if row["loss"] != "sce":
        return {"ce": "CE", "ce-": "CE⁻"}[row["loss"]]
    if row["data"] == "beauty":
        return "SCE" if "no-mix" in row["options"] else None
    if variant == f"{four}, noise 1":
        return "SCE, mix of four and noise"
    return (
        "SCE, mix of four" if variant.startswith(four) else None if variant else "SCE, mix of all"
    )


def _parity() -> dict[tuple[str, str, str], list[Row]]:
    """Trainings by data, loss and model."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in read("benchmarks/results/parity.jsonl"):
        if (kind := _kind(row)) is not None:
            found.setdefault((row["data"], kind, row["model"]), []).append(row)
    return found


def parity() -> str:
    """Quality beside the published code."""
    found = _parity()

    def cell(log: str, kind: str, model: str) -> str:
        values, digits = ndcg(found.get((log, kind, model), [])), 4 - (log == "globo")
        if not values:
            return ""
        return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f} ({len(values)})"

    rows = []
    for log in LOGS:
        for kind in ("SCE", "SCE, mix of all", "SCE, mix of four", "SCE, mix of four and noise",
                     "CE", "CE⁻"):  # fmt: skip
            if sink := found.get((log, kind, "eight sinks")):
                theirs, hits = PUBLISHED.get((log, kind), ("", ""))
                ours = f"{mean(row['test']['hr@10'] for row in sink):.{3 + (log == 'beauty')}f}"
                cells = [cell(log, kind, model) for model in ("eight sinks", "no sink")]
                rows.append([log, kind, theirs, *cells, ours, hits])
    return table(["data", "loss", "published code, NDCG@10", "with sink", "without sink",
                  "HR@10, with sink", "published HR@10"], rows)  # fmt: skip


def _beauty() -> list[float]:
    rows = _parity()["beauty", "SCE", "eight sinks"]
    hits = mean(row["test"]["hr@10"] for row in rows)
    return [mean(ndcg(rows)), stdev(ndcg(rows)), hits, len(rows)]


def _lead(log: str, other: str) -> float:
    """Of SCE over another loss in percent, each as validation chooses."""
    ours, theirs = (mean(ndcg(_chosen(log, _star(log, loss)))) for loss in ("sce", other))
    return 100 * (ours / theirs - 1)


def _mixed(log: str, centres: str) -> list[Row]:
    """Trainings in bf16 with the paper's Mix, or without it."""
    variant = f"{'mix' if centres == 'mix' else 'without mix'}, bf16, compiled"
    usual = {"loss.centres": centres, "loss.bucket_size_y": 256, "loss.alpha": 2.0,
             "training.batch_size": 1024 if log == "beauty" else 128}  # fmt: skip
    return [
        *(row for row in read("benchmarks/results/parity.jsonl")
          if (row["data"], row.get("variant")) == (log, variant)),
        *(row for row in read(f"experiments/results/{log}.jsonl")
          if usual.items() <= row["settings"].items()),
    ]  # fmt: skip


def _picked_once(log: str, centres: str) -> float:
    """The largest share of states in exactly one bucket, in percent, mean over seeds."""
    every = (row.get("history", {}).get("picked_once") for row in _mixed(log, centres))
    return 100 * mean(max(shares) for shares in every if shares)


def _loss_share(loss: str, items: int) -> float:
    parts = memory(loss, items, 128)["components_mib"]
    return float(100 * parts["loss"] / parts["peak"])


def _at(log: str, name: str, *, half: bool = False) -> tuple[float, float]:
    """NDCG@10 and peak memory."""
    return mean(ndcg(_chosen(log, name, half=half))), _peak(log, name, half=half)


def _without_sink(log: str) -> list[float]:
    """NDCG@10 without the sink, to that with it, in percent, loss by loss."""
    found = _parity()
    return [
        percent(mean(ndcg(found[log, loss, "no sink"])) / mean(ndcg(rows)))
        for (of, loss, model), rows in found.items()
        if (of, model) == (log, "eight sinks") and (log, loss, "no sink") in found
    ]


MIXED = [(log, centres) for log in ("ml1m", "globo", "beauty") for centres in ("mix", "random")]
OURS = "SCE, b_y = 256"
PAPER: Claims = {
    "{:.4f} ± {:.4f} and {:.4f} ({} runs)": _beauty,
    "beauty {:+.0f} % over CE, ml1m {:+.0f} % over BCE⁺, globo {:+.0f} % against CE⁻": lambda: [
        _lead(log, other) for log, other in (("beauty", "ce"), ("ml1m", "bce+"), ("globo", "ce-"))],
    "level on ml1m ({:.4f} with, {:.4f} without) and globo ({:.3f} and {:.3f}), worse on beauty "
    "({:.4f} and {:.4f}), means of {} to {} runs": lambda: [
        *(mean(ndcg(_mixed(*one))) for one in MIXED), *ends(len(_mixed(*one)) for one in MIXED)],
    "yes: {:.1f} against {:.1f} % (ml1m), {:.1f} against {:.1f} % (globo), {:.1f} against {:.1f} % "
    "(beauty)": lambda: [_picked_once(*one) for one in MIXED],
    "{:.0f} % at 20 k items, {:.0f} % at 100 k; of SCE's {:.0f} and {:.0f} %": lambda: [
        _loss_share(loss, items) for loss in ("ce", "sce") for items in (20_000, 100_000)],
    "{:.0f} against {:,.0f} MiB, {:+.1f} %": lambda: [
        sce := mib("sce", 174_000), ce := mib("ce", 174_000), 100 * (sce / ce - 1)],
    "hardly: {:.0f} against {:.0f} MiB of BCE⁺ at 3 k items": lambda: [
        mib(loss, 3000) for loss in ("sce", "bce+")],
    "with row-wise updates {:.0f} against {:,.0f} there": lambda: [
        mib("sce", 10**6, row_wise=True), mib("bce+", 10**6)],
    "as good in {:.1f} to {:.0f} times less memory on {} logs, in {:.1f} to {:.1f} times": lambda: [
        *ends(one["peaks"][1] / one["peaks"][0] for one in against_ce()),
        len(times()), *ends(times())],
    "(SCE with b_y = 256: {} on ml1m, {} on globo)": lambda: [
        WORDS[len(_chosen(log, OURS))] for log in ("ml1m", "globo")],
    "are ahead of it ({:.4f} and {:.4f} against {:.4f})": lambda: [
        _validated("ml1m", _star("ml1m", loss)) for loss in ("gbce", "bce+", "sce")],
    "SCE with half the batch has {:.4f} in {:.0f} MiB": lambda: _at("ml1m", OURS, half=True),
    "CE has {:.4f} in {:.0f} MiB with half the batch, BCE⁺ {:.4f} in {:.0f}": lambda: [
        *_at("ml1m", "CE", half=True), *_at("ml1m", "BCE⁺, 256")],
    "beauty: SCE has {:.4f} in {:.0f} MiB": lambda: _at("beauty", OURS),
    "With half the batch it has {:.4f} in {:.0f} MiB, where CE⁻ has {:.4f} in {:.0f}": lambda: [
        *_at("beauty", OURS, half=True), *_at("beauty", "CE⁻, 256", half=True)],
    "SCE has {:.3f} in {:.0f} MiB, where CE⁻ has {:.3f} in {:.0f}": lambda: [
        *_at("globo", OURS, half=True), *_at("globo", "CE⁻, 256", half=True)],
    "loses {:.0f} to {:.0f} % of its NDCG@10": lambda: ends(_without_sink("globo")),
    "On beauty it costs {:.0f} to {:.0f} %": lambda: ends(_without_sink("beauty")),
}  # fmt: skip
MADE = [main_table, parity]
