"""The tables of a run's page: metrics, settings, dataset, and the numbers of every epoch."""

from collections.abc import Iterator, Mapping
from typing import Any

from sce.evaluation.evaluate import KS
from sce.report.markup import Markup, element, join
from sce.report.parts import any_number, folded, notice, table
from sce.report.record import METRIC, Record, number
from sce.units import (
    plural,
    show_count,
    show_digits,
    show_duration,
    show_memory,
    show_metric,
    show_share,
)

METRICS = {"ndcg": "NDCG", "hr": "HR", "mrr": "MRR", "cov": "COV"}
RANKERS = ("model", "popularity")


def metrics_table(record: Record, split: str) -> Markup:
    """Every metric at every depth, the model beside popularity."""
    rankers = [
        of for of in RANKERS if any_number(record.metric(split, f"ndcg@{k}", of=of) for k in KS)
    ]
    shown = [key for key in METRICS if any_number(record.metric(split, f"{key}@{k}") for k in KS)]
    names = [element("th", "k", scope="col", rowspan=2)]
    below = []
    for key in shown:
        names.append(element("th", METRICS[key], scope="colgroup", colspan=len(rankers)))
        below += [element("th", of, scope="col") for of in rankers]
    body = []
    for k in KS:
        cells = [element("th", str(k), scope="row")]
        for key in shown:
            values = [record.metric(split, f"{key}@{k}", of=of) for of in rankers]
            best = max((value for value in values if value is not None), default=None)
            for value in values:
                better = value is not None and value == best
                cells.append(element("td", show_metric(value), class_="best" if better else None))
        body.append(element("tr", cells))
    name = f"Metrics on {split} events, the model beside popularity"
    return table(name, [element("tr", names), element("tr", below)], body, wide=True)


def settings(record: Record) -> Markup:
    """Every setting, as it was when training began."""
    rows = [
        element(
            "tr",
            element("th", element("code", name), scope="row"),
            element("td", element("code", value), class_="text"),
        )
        for name, value in _flatten(record.config)
    ]
    head = element(
        "tr",
        element("th", "setting", scope="col"),
        element("th", "value", scope="col", class_="text"),
    )
    return folded(f"All {plural(len(rows), 'setting')}", table("Settings", [head], rows))


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


def dataset(record: Record, counts: Mapping[str, Any] | str) -> Markup:
    """What the model was trained and tested on, or why that is not known."""
    known = element(
        "p",
        "Trained on ",
        element("code", str(record.dataset.get("path", "–"))),
        ", content ",
        element("code", str(record.dataset.get("content_hash", "–"))[:12]),
        f", a catalogue of {show_count(number(record.dataset, 'n_items'))} items.",
        class_="quiet",
    )
    if isinstance(counts, str):
        return join(known, notice(counts))
    tallies = [*counts.get("steps", ()), counts.get("train"), counts.get("test")]
    body = [
        element(
            "tr",
            element("th", str(tally.get("name", "")), scope="row"),
            [
                element("td", show_count(number(tally, key)))
                for key in ("users", "items", "interactions")
            ],
            element("td", _density(tally)),
        )
        for tally in tallies
        if isinstance(tally, Mapping)
    ]
    heads = ("step", "users", "items", "interactions", "density")
    head = element("tr", [element("th", name, scope="col") for name in heads])
    name = "Users, items and interactions after each step of preparing"
    return join(known, table(name, [head], body)) if body else known


def _density(tally: Mapping[str, Any]) -> str:
    users, items, events = (number(tally, key) for key in ("users", "items", "interactions"))
    return show_share(events / users / items) if users and items and events else "–"


def every_epoch(record: Record) -> Markup | None:
    """The numbers behind the figures."""
    columns = [
        (title, record.column(*keys), show)
        for title, keys, show in [
            ("loss", ("loss",), show_digits),
            ("validation NDCG@10", ("validation", METRIC), show_metric),
            ("validation HR@10", ("validation", "hr@10"), show_metric),
            ("training", ("seconds", "training"), show_duration),
            ("evaluation", ("seconds", "evaluation"), show_duration),
            ("tokens per second", ("tokens_per_second",), show_count),
            ("training peak", ("memory_mib", "training"), show_memory),
            ("evaluation peak", ("memory_mib", "evaluation"), show_memory),
            ("picked once", ("buckets", "picked_once"), show_share),
            ("correct in bucket", ("buckets", "correct_in_bucket"), show_share),
        ]
    ]
    columns = [column for column in columns if any_number(column[1])]
    if not columns:
        return None
    heads = [element("th", name, scope="col") for name in ("epoch", *(c[0] for c in columns))]
    body = [
        element(
            "tr",
            element("th", str(n), scope="row"),
            [element("td", show(values[row])) for _, values, show in columns],
            class_="chosen" if n == record.best_epoch else None,
        )
        for row, n in enumerate(record.numbers_of_epochs)
    ]
    name = "Every epoch in numbers"
    return folded(name, table(name, [element("tr", heads)], body))
