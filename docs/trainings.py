"""Tables of docs/from_rows.py from the rows of trainings."""

import json
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from sce.report.field import make_field, name_setting
from sce.report.frame import SeedGroup
from sce.report.pairs import setting_of

ROOT = Path(__file__).parent.parent
ROWS = "experiments/results/default"
Row = dict[str, Any]
Setting = tuple[Any, ...]  # backbone, loss, source of negatives, whether they are cut
RIVALS = {
    ("sce", None): "SCE", ("ce-", "uniform"): "CE⁻, uniform",
    ("ce-", "popularity"): "CE⁻, popularity", ("ce-", "in-batch"): "CE⁻, in-batch",
    ("ce-", "mixed"): "CE⁻, mixed", ("ce-", "scaled"): "CE⁻, scaled",
    ("cce-", "popularity"): "CCE⁻", ("bce+", "uniform"): "BCE⁺",
    ("gbce", "uniform"): "gBCE", ("rece", None): "RECE",
}  # fmt: skip


@cache
def read(name: str) -> list[Row]:
    """All rows of a file, or of a directory of files."""
    found = ROOT / name
    files = sorted(found.glob("*.jsonl")) if found.is_dir() else [found]
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def rows_with(name: str, **wanted: Any) -> list[Row]:
    """Those rows of a file that have these values."""
    return [row for row in read(name) if row.items() >= wanted.items()]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


@cache
def by_setting() -> dict[str, dict[Setting, list[Row]]]:
    """Finished trainings of each log by setting, each seed once; small catalogues first.

    Of two rows about one run the later counts, of two settings that have one name and one seed,
    such as another patience, validation chooses.
    """
    found: dict[str, dict[Setting, dict[int, Row]]] = {}
    runs = {row["key"]: row for row in read(ROWS) if row["status"] == "finished"}.values()
    for row in sorted(runs, key=lambda row: (row["dataset"]["n_items"], row["seed"])):
        settings = found.setdefault(row["dataset"]["name"], {})
        seeds, seed = settings.setdefault(setting_of(SeedGroup((row,))), {}), row["seed"]
        seeds[seed] = max(seeds.get(seed, row), row, key=lambda one: one["validation"]["ndcg@10"])
    return {
        log: {setting: list(seeds.values()) for setting, seeds in settings.items()}
        for log, settings in found.items()
    }


def of_sasrec() -> dict[str, dict[tuple[str, str | None], list[Row]]]:
    """Trainings of SASRec on each log, by loss and source of negatives; cut, it is CCE⁻."""
    return {
        log: {
            (f"c{loss}" if cut else loss, negatives): rows
            for (model, loss, negatives, cut), rows in settings.items()
            if model == "sasrec"
        }
        for log, settings in by_setting().items()
    }


def ndcg(rows: Iterable[Row], on: str = "test") -> list[float]:
    """NDCG@10 of each training."""
    return [row[on]["ndcg@10"] for row in rows]


def against_ce() -> Iterator[dict[str, Any]]:
    """The default and exact CE on each log."""
    for log, losses in of_sasrec().items():
        ce, sce = losses["ce", None], losses["sce", None]
        # Of seeds 3 to 5: before, exact CE took more.
        peaks = [mean(row["memory_mib"]["training"] for row in rows[3:]) for rows in (sce, ce)]
        yield {
            "log": log, "items": ce[0]["dataset"]["n_items"], "users": ce[0]["users"]["test"],
            "seeds": len(sce), "ce": ndcg(ce), "sce": ndcg(sce), "peaks": peaks,
            **{on: mean(ndcg(sce, on)) / mean(ndcg(ce, on)) for on in ("test", "validation")},
        }  # fmt: skip


def default_pairs(seeds: list[int]) -> dict[str, Row]:
    """SCE against exact CE on each log, by `sce compare --pairs`: ranks are too large to keep."""
    return {
        row["dataset"]["name"]: row
        for row in read(f"{ROWS}/pairs")
        if (row["setting"]["loss.name"], row["against"]["loss.name"], row["seeds"])
        == ("sce", "ce", seeds)
        and row["setting"]["model.name"] == "sasrec"
    }


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f} ± {stdev(values):.4f}"


def default() -> str:
    """SCE by default against exact CE, log by log."""
    head = ["log", "items", "test users", "CE, test NDCG@10", "SCE", "ratio, test", "seeds 0–2",
            "seeds 3–5", "ratio, validation", "seeds 3–5"]  # fmt: skip
    found, first, second = list(against_ce()), default_pairs([0, 1, 2]), default_pairs([3, 4, 5])

    def shown(pair: Row, ratio: str, interval: str) -> str:
        return f"{pair[ratio]:.3f} ({pair[interval][0]:.3f}–{pair[interval][1]:.3f})"

    rows = [
        [one["log"], f"{one['items']:,}", f"{one['users']:,}", _spread(one["ce"]),
         _spread(one["sce"]), f"{one['test']:.3f}", shown(first[one["log"]], "test", "interval"),
         shown(second[one["log"]], "test", "interval"), f"{one['validation']:.3f}",
         shown(second[one["log"]], "validation", "validation_interval")]
        for one in found
    ]  # fmt: skip
    for name, of in (("mean", mean), ("median", median)):
        both = [f"**{of(one[on] for one in found):.3f}**" for on in ("test", "validation")]
        rows.append([name, "", "", "", "", both[0], "", "", both[1], ""])
    return table(head, rows)


def short() -> str:
    """The same for README: what a reader decides by."""
    head = ["log", "items", "CE, NDCG@10", "SCE, NDCG@10", "CE, memory", "SCE, memory"]
    return table(head, (
        [one["log"], f"{one['items']:,}", f"{mean(one['ce']):.4f}", f"{mean(one['sce']):.4f}",
         *(f"{peak:,.0f} MiB" for peak in reversed(one["peaks"]))]
        for one in against_ce()
    ))  # fmt: skip


def summary() -> str:
    """The same in three sentences."""
    found = list(against_ce())
    ratios = [one["test"] for one in found]
    shares = [100 * one["peaks"][0] / one["peaks"][1] for one in found]
    items = [one["items"] for one in found]
    return (
        f"On {len(found)} logs of {min(items):,} to {max(items):,} items, the test NDCG@10 of SCE "
        f"is {min(ratios):.2f} to {max(ratios):.2f} times that of exact CE.\n"
        f"The median is {median(ratios):.2f}, the mean {mean(ratios):.3f}.\n"
        f"SCE takes {min(shares):.0f} to {max(shares):.0f} % of the peak "
        "training memory of exact CE that keeps all logits."
    )


def rivals() -> str:
    """Ratios to exact CE, means over the seeds of each, test / validation; bold: best on test."""
    logs = of_sasrec()
    kinds = [kind for kind in RIVALS if any(kind in losses for losses in logs.values())]
    ratios: dict[str, dict[Any, tuple[float, float]]] = {}
    for log, losses in logs.items():
        for kind in kinds:
            if rows := losses.get(kind):
                ce, of = losses["ce", None], ("test", "validation")
                test, other = (mean(ndcg(rows, on)) / mean(ndcg(ce, on)) for on in of)
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


def field() -> str:
    """Every backbone and loss over all logs, against SASRec with exact CE."""
    heads, rows = make_field({
        log: {setting: SeedGroup(tuple(rows)) for setting, rows in settings.items()}
        for log, settings in by_setting().items()
    })  # fmt: skip
    told = [place for place, column in enumerate(zip(*rows, strict=True)) if any(column)]
    head, *rest = ([row[place] for place in told] for row in (heads, *rows))
    return table(head, rest)


def apart() -> str:
    """Losses against exact CE on the same users, and for popular and rare targets."""
    names = {kind: name for kind, name in RIVALS.items() if kind[0] in ("sce", "ce-")}
    found: dict[str, dict[Any, str]] = {}
    for row in read(f"{ROWS}/pairs"):
        ours, theirs = row["setting"], row["against"]
        kind = ours["loss.name"], ours["loss.negatives"]
        if kind in names and theirs["loss.name"] == "ce" and row["popular"] is not None:
            low, high = row["interval"]
            found.setdefault(row["dataset"]["name"], {})[kind] = (
                f"{row['test']:.2f} ({low:.2f}–{high:.2f}); "
                f"{row['popular']:.2f} / {row['rare']:.2f}"
            )
    kinds = [kind for kind in names if any(kind in of for of in found.values())]
    return table(["log", *(names[kind] for kind in kinds)], (
        [log, *(of.get(kind, "") for kind in kinds)] for log, of in found.items()
    ))  # fmt: skip


def _published(file: str, ours: Iterable[tuple[str, list[Row]]]) -> str:
    """Ours beside what others publish, the best first."""
    figures = tomllib.loads((ROOT / "experiments" / file).read_text("utf-8"))["figures"]
    found = [(one["name"], one["ndcg@10"], one["hr@10"], "published")
             for one in figures[0]["published"]]  # fmt: skip
    for name, rows in ours:
        ndcg, hits = (mean(row["test"][metric] for row in rows) for metric in ("ndcg@10", "hr@10"))
        seeds = f"run, {len(rows)} seeds" if len(rows) > 1 else "run, one seed"
        found.append((name, ndcg, hits, seeds))
    return table(["system", "NDCG@10", "HR@10", ""], (
        [name, f"{ndcg:.4f}", f"{hits:.4f}", source]
        for name, ndcg, hits, source in sorted(found, key=lambda one: -one[1])
    ))  # fmt: skip


def beauty() -> str:
    """Amazon Beauty: backbones and losses."""
    found = by_setting()["beauty"].items()
    ours = [(" + ".join(name_setting(setting)), rows) for setting, rows in found]
    for row in read("experiments/results/published/beauty.jsonl"):
        name = f"LiGR of 256 dimensions + CE⁻, {row['settings']['loss.negatives']}"
        ours.append((name, [row]))
    for row in read("experiments/results/published/s3_beauty.jsonl"):
        name = "LiGR" if row["settings"]["model.name"] == "ligr" else "SASRec"
        name = f"{name} of {row['settings']['model.dim']} dimensions"
        ours.append((f"{name} + CE⁻, uniform, in the order of S³-Rec's file", [row]))
    return _published("beauty-table.toml", ours)


def movies() -> str:
    """MovieLens-1M, leave-one-out: HSTU that knows past times or the next, and BERT4Rec."""
    rows = read("experiments/results/published/ml1m-loo.jsonl")
    names = {"past": "HSTU, `--model.times past`", "next": "HSTU, `--model.times next`"}
    return _published("hstu.toml", (
        (names.get(row["settings"].get("model.times"), "BERT4Rec"), [row]) for row in rows
    ))  # fmt: skip


def backbones() -> str:
    """Test NDCG@10 of each backbone with SCE and with exact CE, means over seeds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for log, settings in by_setting().items():
        for (model, loss, *_), rows in settings.items():
            if loss in ("sce", "ce"):
                found.setdefault(log, {}).setdefault(model, {})[loss] = mean(ndcg(rows))
    names = {"sasrec": "SASRec", "ligr": "LiGR", "hstu": "HSTU", "gru4rec": "GRU4Rec",
             "bert4rec": "BERT4Rec"}  # fmt: skip

    def cell(of: dict[str, float]) -> str:
        return " / ".join(f"{of[loss]:.4f}" for loss in ("sce", "ce"))

    return table(["log", *names.values()], (
        [log, *(cell(models[name]) for name in names)]
        for log, models in found.items() if len(models) > 1
    ))  # fmt: skip


MADE = [default, short, summary, rivals, field, apart, beauty, movies, backbones]
