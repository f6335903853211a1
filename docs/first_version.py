"""Tables of docs/paper.md, of trainings with version 0.1 by the paper's rule."""

from statistics import mean, median, stdev

from trainings import Row, ndcg, read, table

LOGS = ("beauty", "ml1m", "globo")
SETTINGS = {
    "BCE": {"name": "bce"}, "BCE⁺, 64 negatives": {"name": "bce+", "n_negatives": 64},
    "BCE⁺, 256": {"name": "bce+", "n_negatives": 256},
    "gBCE, 256, t = 0.75": {"name": "gbce", "t": 0.75},
    "gBCE, 256, t = 0.9": {"name": "gbce", "t": 0.9},
    "CE⁻, 64": {"name": "ce-", "n_negatives": 64}, "CE⁻, 256": {"name": "ce-", "n_negatives": 256},
    "CE": {"name": "ce"}, "SCE, b_y = 64": {"name": "sce", "bucket_size_y": 64},
    "SCE, b_y = 256": {"name": "sce", "bucket_size_y": 256},
    "SCE, b_y = 1,024": {"name": "sce", "bucket_size_y": 1024},
}  # fmt: skip


def _chosen(log: str, loss: dict[str, object], of: str = "") -> list[Row]:
    """Trainings with a loss, the whole batch and, for SCE, the centres of the log."""
    wanted = {f"loss.{name}": value for name, value in loss.items()}
    wanted["training.batch_size"] = 1024 if log == "beauty" else 128
    if loss["name"] == "sce":
        centres = "random" if log == "beauty" else "states"
        wanted |= {"loss.alpha": 2.0, "loss.beta": 1.0, "loss.centres": centres}
    rows = read(f"experiments/results/{of}{log}.jsonl")
    return [
        row for row in rows
        if row["status"] == "finished" and wanted.items() <= {
            key: value for key, value in row["settings"].items() if not isinstance(value, list)
        }.items()
    ]  # fmt: skip


def _cells(log: str) -> dict[str, str]:
    """NDCG@10 of each setting; bold: the best; a star: what validation chooses for its loss."""
    found = {name: _chosen(log, loss) for name, loss in SETTINGS.items()}
    means = {name: round(mean(ndcg(rows)), 4 - (log == "globo")) for name, rows in found.items()}
    cells = {}
    for name, rows in found.items():
        digits = 4 - (log == "globo")
        shown, spread = f"{means[name]:.{digits}f}", f"{stdev(ndcg(rows)):.{digits}f}"
        bold = f"**{shown}**" if means[name] == max(means.values()) else shown
        cells[name] = f"{bold} ± {spread}"
    for loss in {str(one["name"]) for one in SETTINGS.values()}:
        ours = [name for name, one in SETTINGS.items() if one["name"] == loss]
        star = max(ours, key=lambda name: mean(
            row["validation"]["ndcg@10"] for row in found[name] if row["seed"] < 3
        ))  # fmt: skip
        cells[star] += " *"
    return cells


def main_table() -> str:
    """Losses by the paper's settings."""
    cells = {log: _cells(log) for log in LOGS}

    def peak(log: str, name: str) -> str:
        rows = _chosen(log, SETTINGS[name], "" if name == "CE" else "ten-epochs/")
        return f"{median(row['memory_mib']['training'] for row in rows):,.0f}" if rows else ""

    return table(["", *LOGS, "memory, MiB"], (
        [name, *(cells[log][name] for log in LOGS), ", ".join(peak(log, name) for log in LOGS)]
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


def parity() -> str:
    """Quality beside the published code."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in read("benchmarks/results/parity.jsonl"):
        if (kind := _kind(row)) is not None:
            found.setdefault((row["data"], kind, row["model"]), []).append(row)

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


MADE = [main_table, parity]
