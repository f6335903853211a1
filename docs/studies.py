"""More tables for docs/from_rows.py: logs, their noise and cost, and the studies of settings."""

from collections.abc import Callable, Iterable
from statistics import mean, stdev
from typing import Any

from calls import WORDS
from trainings import Row, ndcg, of_sasrec, read, rows_with, table

STUDY = "experiments/results/coverage/study.jsonl"
LOGS = {
    "ml1m": "MovieLens-1M, unfiltered",
    "steam": "Steam reviews, a sample of users, 5-core",
    "yoochoose_buys": "purchases of the RecSys 2015 challenge, 5-core; a session is a user",
    "globo": "Globo.com, clicks on news, the paper's filter",
    "beauty": "Amazon Beauty, 5-core",
    "reddit": "subreddits a user posted in, in order, without times",
    "yelp2019": "Yelp reviews of 2019",
    "food": "Food.com, the paper's filter",
    "beauty2": "Amazon Beauty as BERT4Rec has it, in order, without times",
    "union7": "seven Amazon categories of 2014 side by side, the paper's filter",
}
DEFAULTS = ("sce", "ce")
CENTRES = {"random": "random centres", "states": "near states", "mix": "the paper's Mix"}
TO_THE_END = ("ml1m", "globo", "beauty", "food", "beauty2", "union7")  # by the paper's rule
TWELVE = 12  # epochs of trainings that were to show the share of placed states alone


def trained(log: str, loss: str, negatives: str | None = None) -> list[Row]:
    """Trainings of SASRec on a log, in the order of their seeds."""
    return of_sasrec()[log][loss, negatives]


def _spread(values: list[float]) -> str:
    """Mean and standard deviation, with as many digits as each kind of log needs."""
    digits = 3 if mean(values) > 0.1 else 4
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def percent(ratio: float) -> float:
    """How much more, or less, in percent."""
    return 100 * abs(ratio - 1)


def times() -> list[float]:
    """How many times as long SCE trains as exact CE, log by log."""

    def seconds(log: str, loss: str) -> float:
        return mean(row["seconds"]["training"] for row in trained(log, loss))

    return [seconds(log, "sce") / seconds(log, "ce") for log in LOGS]


def memory(loss: str, items: int, batch: int = 64, *, row_wise: bool = False) -> Row:
    """A training of figure 2 or 5, of memory alone."""
    wanted = {"loss.name": loss, "training.batch_size": batch, "training.row_wise": row_wise}
    rows = read("experiments/results/memory.jsonl")
    return next(row for row in rows if row["dataset"]["n_items"] == items
                and row["settings"].items() >= wanted.items())  # fmt: skip


def mib(*of: Any, **more: Any) -> float:
    """Its peak."""
    return float(memory(*of, **more)["memory_mib"]["training"])


def logs() -> str:
    """The logs, how they are split, and how many of their steps join events of one time."""
    order = {row["log"]: row for row in read("experiments/results/logs/order.jsonl")}

    def ties(row: Row) -> str:
        shown = f"{100 * row['tied']:.0f} %"
        if row["ascending_ties"] and abs(row["ascending_ties"] - 0.5) > 0.3:
            return f"**{shown}**, {100 * row['ascending_ties']:.0f} % of them to a larger item id"
        if row["recurrence_ties"] and row["recurrence_ties"] > 1.05:
            return f"**{shown}**, recurring {row['recurrence_ties']:.2f} times as often"
        return shown

    rows = []
    for log, what in LOGS.items():
        row = trained(log, "ce")[0]
        settings, split = row["settings"], row["dataset"]["split"].split(",")[0]
        sizes = f"{settings['training.batch_size']:,}, {settings['model.max_length']}"
        rows.append([log, what, f"{split}, {sizes}", ties(order[log])])
    return table(["log", "what", "split, batch, longest history", "ties"], rows)


def cost() -> str:
    """Peak memory and time of the trainings with the default, and with exact CE."""
    head = ["log", "training, SCE", "training, CE", "share", "evaluation", "time of training, SCE",
            "CE"]  # fmt: skip
    rows = []
    for log in LOGS:
        both = [trained(log, loss) for loss in DEFAULTS]
        # Of seeds 3 to 5: before, exact CE took more.
        sce, ce = (mean(row["memory_mib"]["training"] for row in some[3:]) for some in both)
        evaluating = mean(row["memory_mib"]["evaluation"] for row in both[0])
        times = (mean(row["seconds"]["training"] for row in some) for some in both)
        memory = (f"{peak:,.0f} MiB" for peak in (sce, ce))
        rows.append([log, *memory, f"{100 * sce / ce:.0f} %", f"{evaluating:,.0f} MiB",
                     *(f"{time:.0f} s" for time in times)])  # fmt: skip
    return table(head, rows)


def seed_spreads() -> dict[str, float]:
    """The standard deviation over seeds in percent of NDCG@10, the mean of SCE's and CE's."""
    spread = {}
    for log in LOGS:
        values = [ndcg(trained(log, loss)) for loss in DEFAULTS]
        spread[log] = mean(100 * stdev(some) / mean(some) for some in values)
    return spread


def noise() -> str:
    """How far seeds of one setting are apart, in a sentence."""
    spread = seed_spreads()
    few = [log for log, share in spread.items() if share < 3]
    rest = [f"{share:.0f} % on {log}" for log, share in spread.items() if share >= 3]
    return (
        f"The standard deviation over six seeds, the mean of SCE's and CE's, is "
        f"{min(spread.values()):.1f} to {max(spread[log] for log in few):.1f} % of NDCG@10 on "
        f"{len(few)} of the {len(spread)} logs.\nIt is {', '.join(rest[:-1])} and {rest[-1]}."
    )


def news() -> str:
    """Sampled softmax on the log of news, against the means over seeds of SCE and of exact CE."""
    rows = trained("globo", "ce-", "popularity")
    found, seeds = mean(ndcg(rows)), WORDS[len(rows)]
    sce, ce = (mean(ndcg(trained("globo", loss))) for loss in DEFAULTS)
    return (
        f"On globo, the one log of news, sampled softmax with popular negatives (CE⁻) has "
        f"{found / ce:.2f} times the NDCG@10 of exact CE, and {found / sce:.2f} times that of SCE."
        f"\nIt was trained with {seeds} seeds, the others with six. The best seed of SCE is "
        f"{100 * (max(ndcg(trained('globo', 'sce'))) / sce - 1):.0f} % above the mean of its six."
    )


def exact_or_not() -> str:
    """One call of SCE as it is by default, and of exact cross-entropy, at a million items."""
    names = {"SCE, 2048": "SCE, the default", "SCE, CUDA graph, 2048": "the same, as a CUDA graph",
             "CE, fused, 256": "exact, `CrossEntropy(chunk_size=…)`",
             "CE, cut-cross-entropy, 256": "cut-cross-entropy, with its filter",
             "CE, torch, 256": "exact, all logits at once"}  # fmt: skip
    usual = {"items": 10**6, "dtype": "bfloat16", "batch": 128, "dim": 64}
    every = rows_with("benchmarks/results/loss_gpu.jsonl", **usual)
    found = {f"{row['loss']}, {row['bucket_size_y']}": row for row in every}
    rows = []
    for loss, shown in names.items():
        row = found[loss]
        cells = ["", row.get("failed", "")]
        if "ms" in row:
            cells = [f"{row['ms']:.3g} ms", f"{row['extra MiB']:,.0f} MiB"]
        rows.append([shown, *cells])
    return table(["1,000,000 items, bfloat16", "time", "memory"], rows)


def study(log: str, rule: str, alpha: float | None, size: int | None) -> list[Row]:
    """Trainings of the study of coverage by one rule."""
    found = rows_with(STUDY, log=log, rule=rule, alpha=alpha, bucket_size_y=size)
    return [row for row in found if not {"nearest", "weight", "centres"} & {*row}]


def study_ratios() -> dict[str, dict[str, tuple[float, float, int]]]:
    """Ratios to six seeds of exact CE, of what was tried: on test, on validation, and how many.

    By log and name of what was tried; the default has three of its six seeds, too.
    """
    tried = {
        "paper's rule, α = 2": ("paper", 2.0, 2048), "paper's rule, α = 4": ("paper", 4.0, 2048),
        "those left over to their nearest bucket": ("left-over to nearest", 2.0, 2048),
        "α = 1": ("coverage", 1.0, 2048), "α = 1.4": ("coverage", 1.4, 2048),
        "α = 2": ("coverage", 2.0, 2048), "α = 4": ("coverage", 4.0, 2048),
        "256 items": ("coverage", 8.0, 256), "512": ("coverage", 8.0, 512),
        "1,024": ("coverage", 8.0, 1024), "4,096": ("coverage", 8.0, 4096),
    }  # fmt: skip
    ratios: dict[str, dict[str, tuple[float, float, int]]] = {}
    for log in LOGS:
        exact, default = (
            [[row[on]["ndcg@10"] for on in ("test", "validation")] for row in trained(log, loss)]
            for loss in ("ce", "sce")
        )
        found = {"default": default, "default, seeds 0 to 2": default[:3]}
        found["paper's rule, 256 items"] = [
            [row[on]["ndcg@10"] for on in ("test", "validation")]
            for row in paper_rule(log, "random", bucket_size_y=256)
            if row["epochs"] > TWELVE
        ]
        for name, one in tried.items():
            found[name] = [[row["test"], row["validation"]] for row in study(log, *one)]
        of_exact = [mean(one) for one in zip(*exact, strict=True)]
        ratios[log] = {}
        for name, some in found.items():
            if some:
                test, validation = (mean(one) for one in zip(*some, strict=True))
                ratios[log][name] = test / of_exact[0], validation / of_exact[1], len(some)
    return ratios


def over_logs(name: str, logs: Iterable[str] = LOGS) -> tuple[float, float, int]:
    """Mean ratios over the logs on which something was tried, and how many these are."""
    ratios = study_ratios()
    some = [ratios[log][name] for log in logs if name in ratios[log]]
    test, validation, _ = (mean(of) for of in zip(*some, strict=True))
    return test, validation, len(some)


def _ratios(names: Iterable[str]) -> str:
    """A table of what was tried on all logs."""

    def cell(found: tuple[float, float, int] | None, digits: int = 2) -> str:
        test, validation, count = found or (0, 0, 0)
        return f"{test:.{digits}f} / {validation:.{digits}f} ({count})" if count else ""

    names, ratios = list(names), study_ratios()
    rows = [[log, *(cell(ratios[log].get(name)) for name in names)] for log in LOGS]
    last = ["mean (logs)", *(cell(over_logs(name), 3) for name in names)]
    return table(["log", *names], [*rows, last])


def coverage() -> str:
    """Quality against exact CE by the paper's rule and by coverage, with more and more buckets."""
    paper = [f"paper's rule, {of}" for of in ("α = 2", "α = 4", "256 items")]
    return _ratios(["default", *(f"α = {n}" for n in (1, 1.4, 2, 4)), *paper])


def sizes() -> str:
    """Quality against exact CE with other numbers of items in a bucket than by default."""
    return _ratios(["256 items", "512", "1,024", "default, seeds 0 to 2", "4,096"])


def placed() -> str:
    """Share of the states in any bucket by the paper's rule: at first, at its lowest, at last."""
    rows = []
    for log in LOGS:
        cells = [log]
        for name in CENTRES:
            shares = [row["history"]["placed"] for row in paper_rule(log, name, bucket_size_y=256)]
            ends = ([a[0] for a in shares], [min(a) for a in shares], [a[-1] for a in shares])
            shown = " → ".join(f"{100 * mean(end):.0f}" for end in ends if end)
            cells.append(f"{shown} % ({len(shares)})" if shares else "")
        rows.append(cells)
    return table(["log", *CENTRES.values()], rows)


def paper_rule(log: str, centres: str = "", **wanted: Any) -> list[Row]:
    """Trainings by the paper's rule, the whole batch; by default with the centres of the sweeps."""
    wanted = {"alpha": 2.0, "beta": 1.0, "coverage": False} | wanted
    wanted["centres"] = centres or ("states" if log in ("ml1m", "globo") else "random")
    return [
        row
        for row in whole_batch(log, "sce")
        if row["status"] == "finished"
        and all(row["settings"].get(f"loss.{name}") == value for name, value in wanted.items())
    ]


def whole_batch(log: str, loss: str) -> list[Row]:
    """Trainings with a loss by the paper's settings, not with half the batch."""
    batch = 128 if log in ("ml1m", "globo", "food", "union7") else 1024
    wanted = {"loss.name": loss, "training.batch_size": batch}
    names = ["coverage/placed.jsonl", *([f"{log}.jsonl"] if log in TO_THE_END else [])]
    return [
        row
        for name in names
        for row in read(f"experiments/results/{name}")
        if row["dataset"]["name"] == log and row["settings"].items() >= wanted.items()
    ]


def bucket_size() -> str:
    """Quality by the paper's rule against the items in a bucket."""
    rows = []
    for log in TO_THE_END:
        every, ce = read(f"experiments/results/{log}.jsonl"), whole_batch(log, "ce")
        items = ce[0]["dataset"]["n_items"]
        trained = {row["settings"].get("loss.bucket_size_y") or 0 for row in every}
        fortieth = min(trained, key=lambda size: abs(size - items / 40))
        sizes = (64, 256, fortieth, 1024, 4096, round(items / 2))
        found = [ndcg(paper_rule(log, bucket_size_y=size)) for size in sizes]
        best = max(mean(some) for some in found if some)
        cells = [
            "" if not some else f"**{_spread(some)}**" if mean(some) == best else _spread(some)
            for some in found
        ]
        cells[2] = f"{sizes[2]:,}: {cells[2]}"
        rows.append([log, *cells, _spread(ndcg(ce))])
    return table(["b_y", "64", "256", "a fortieth", "1,024", "4,096", "half", "CE"], rows)


def alpha_beta() -> str:
    """Quality and peak memory by the paper's rule against α and β."""

    def cell(log: str, alpha: float, beta: float) -> str:
        rows = paper_rule(log, alpha=alpha, beta=beta, bucket_size_y=256)
        peaks = [(row["memory_mib"] or {}).get("training") for row in rows]
        return f"{_spread(ndcg(rows))}, {mean(filter(None, peaks)):,.0f} MiB"

    betas = (1.0, 4.0, 16.0)
    return table(["log", "α", *(f"β = {beta:.0f}" for beta in betas)], (
        [log, f"{alpha:.0f}", *(cell(log, alpha, beta) for beta in betas)]
        for log in ("ml1m", "globo") for alpha in (1.0, 2.0, 4.0)
    ))  # fmt: skip


def train_step() -> str:
    """A step of a straightforward loop, and of `sce train`."""
    found: dict[int, dict[str, Row]] = {}
    for row in read("benchmarks/results/train_step.jsonl"):
        if row["loop"] != "evaluation":
            found.setdefault(row["items"], {})[row["loop"]] = row

    def cell(row: Row) -> str:
        rate = f"{row['tokens/s'] / 1e6:.1f} M"
        return f"{row['ms']:.3g} ms, {rate} tokens/s, {row['peak MiB']:,} MiB"

    rows = []
    for items, loops in found.items():
        theirs, ours = loops["authors' style"], loops["sce train"]
        name = f"{items:,}{', row-wise updates' if ours['update'] != 'Adam' else ''}"
        rows.append([name, cell(theirs), cell(ours), f"{theirs['ms'] / ours['ms']:.1f} ×"])
    return table(["items", "straightforward loop", "`sce train`", "faster"], rows)


def evaluating() -> str:
    """Evaluation of many users at once, in a sentence."""
    (row,) = rows_with("benchmarks/results/train_step.jsonl", loop="evaluation")
    return (
        f"**Evaluating** {row['users']:,} users against {row['items']:,} items takes "
        f"{row['seconds']:.2f} s.\nOne user at a time it would take "
        f"{row['seconds one by one']:.0f} s ({row['timed one by one']} users timed and scaled)."
    )


def language_rows() -> dict[str, dict[int, Row]]:
    """Trainings of the language model: by loss, then by step."""
    found: dict[str, dict[int, Row]] = {}
    for row in read("benchmarks/results/language_model.jsonl"):
        found.setdefault(row["loss"], {})[row["step"]] = row
    return found


def language() -> str:
    """Perplexity of a language model trained with each loss."""
    found = language_rows()
    rows = []
    for loss, steps in sorted(found.items(), key=lambda one: one[1][max(one[1])]["perplexity"]):
        last = max(steps)
        end = f"{steps[last]['perplexity']:,.0f}" + (f" after {last}" if last != 500 else "")
        ratio = steps[last]["perplexity"] / found["ce"][500]["perplexity"]
        memory = f"{steps[last]['loss MiB']:,.0f} MiB"
        shown = f"{ratio:.2f}" if last == 500 else ""
        took = f"{steps[last]['ms a step']:.0f} ms"
        rows.append([f"`{loss}`", f"{steps[100]['perplexity']:,.0f}", end, shown, memory, took])
    head = ["loss", "perplexity after 100 steps", "after 500", "to exact", "memory of the loss"]
    return table([*head, "a step"], rows)


def perplexity() -> str:
    """The same in a sentence."""
    found = language_rows()
    ratio = {loss: steps[500]["perplexity"] / found["ce"][500]["perplexity"]
             for loss, steps in found.items() if 500 in steps}  # fmt: skip
    return (
        f"A language model trained with the default has {ratio['sce']:.1f} times the perplexity of "
        f"one trained with exact cross-entropy, and with 256 words in a bucket "
        f"{ratio['sce:bucket_size_y=256']:.1f} times "
        f"({found['ce'][500]['words']:,} words, 500 steps, one seed)."
    )


MADE: list[Callable[[], str]] = [
    logs, cost, noise, news, exact_or_not, coverage, sizes, placed, bucket_size,
    alpha_beta, train_step, evaluating, language, perplexity,
]  # fmt: skip
