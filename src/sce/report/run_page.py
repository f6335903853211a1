"""The page of a run, finished or not. Any number may be missing: the run may be young."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sce.data.new_items import tell_added
from sce.data.prepared import FEW_USERS, PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.evaluation.evaluate import KS
from sce.evaluation.metrics import METRICS
from sce.models.registry import BACKBONES
from sce.recommend import Recommender
from sce.report.charts import COURSES
from sce.report.frame import Show, name_metric, number
from sce.report.pages import render
from sce.report.record import METRIC, PHASES, RANKERS, SHOWN, Record, Sample, draw_samples
from sce.report.run_charts import draw_run
from sce.training.run import Run, caveat
from sce.training.start import tell_start
from sce.units import (
    plural,
    show_compact,
    show_count,
    show_duration,
    show_factor,
    show_memory,
    show_metric,
    show_share,
)

_STOPPED = {
    "patience": "training stopped because validation no longer improved",
    "epochs": "training ran to its last epoch",
}
_EPOCH_COLUMNS: dict[str, tuple[tuple[str, ...], Show]] = {
    name: (keys, course.show) for course in COURSES.values() for name, keys in course.lines.items()
} | {f"{phase} peak": (("memory_mib", phase), show_memory) for phase in PHASES}


def make_page(
    run: Run, *, data: Path | None = None, device: str = "cpu", titles: Vocabulary | None = None
) -> str:
    """Make the page of a run, which says why anything is missing.

    `data` is where its dataset lies now, if it was moved; sample recommendations are computed on
    the `device`, and show these titles instead of the run's.
    """
    counts: Mapping[str, Any] = {}
    samples: list[Sample] = []
    unread = ""
    try:
        dataset = run.load_dataset(data, verify=False)
    except InputError as error:
        if data is not None:
            raise
        unread = told = f"The dataset could not be read: {error}."
    else:
        counts, (samples, told) = dataset.counts, _samples(run, dataset, device, titles)
    record = Record.read(run)
    return render(
        "run.html",
        f"{run.path.resolve().name}: a training run of sce",
        written=datetime.now(),
        run=run,
        headline=_headline(record),
        figures_of=draw_run(record),
        metrics=[
            _metrics(record, split)
            for split in ("test", "validation")
            if record.metric(split, METRIC) is not None
        ],
        measured=" ".join(_measured(record)),
        samples=samples,
        told=told,
        shown=SHOWN,
        order=_order(counts.get("order")),
        unread=unread,
        steps=list(_steps(counts)),
        settings=list(
            _flatten({**run.config, **({"derived": run.derived} if run.derived else {})})
        ),
        epochs=_epochs(record),
    )


def _samples(
    run: Run, dataset: PreparedDataset, device: str, titles: Vocabulary | None
) -> tuple[list[Sample], str]:
    """Samples and a sentence about them, or why there are none."""
    if not len(dataset.test):
        return [], "The dataset has no test users to recommend for."
    try:
        recommender = Recommender.load(run, device)
    except InputError as error:
        return [], f"There are no recommendations to show: {error}."
    if titles is not None:
        recommender = replace(recommender, titles=titles)
    return draw_samples(recommender, dataset)


def _headline(record: Record) -> dict[str, Any]:
    split, best = record.split, record.result["best_epoch"]
    value, other = (record.metric(split, METRIC, of) for of in RANKERS)
    users = number(record.result, "users", split)
    told = f"popularity ({show_metric(other)})"
    if factor := show_factor(value, other):
        factor = f"{factor} {told}"
        if users is not None and users < FEW_USERS:
            factor = f"too few users to tell from {told}"
    done = max((one["epoch"] for one in record.epochs), default=0)
    start, added = (record.run.config.get(name) for name in ("start", "added"))
    items = show_count(record.run.dataset.n_items)
    model = record.run.model
    backbone = BACKBONES[model].label if model in BACKBONES else model
    clauses = [
        f"{backbone} trained with {record.loss_name} on a catalogue of {items} items",
        f"measured on {show_count(users)} {split} users" if users else "",
        tell_start(start) if start else "",
        f"items added to {added['run']} without training: {tell_added(added)}" if added else "",
        f"the weights kept are those of epoch {best} of {done}" if best is not None else "",
        "longer training may do better" if best == done and record.ended and value else "",
        _STOPPED.get(str(record.result.get("stopped")), ""),
    ]
    notice = ""
    if warning := caveat(record.run):
        notice = f"{warning[:1].upper()}{warning[1:]}. Test metrics are there when it ends."
    elif record.run.dataset.split == "none":
        notice = "All of the log was trained on (split none): there is nothing to measure by."
    seconds = [value for _, value in record.course("seconds", "training")]
    speed = number(record.result, "tokens_per_second")
    tiles = [
        *((f"{split} {name_metric(name)}", show_metric(record.metric(split, name)))
          for name in ("hr@10", "cov@10")),
        (f"training time, {plural(len(seconds), 'epoch')}", show_duration(sum(seconds) or None)),
        *((f"peak memory of {phase}", show_memory(number(record.result, "memory_mib", phase)))
          for phase in PHASES),
        ("tokens per second in training", show_compact(speed)),
    ]  # fmt: skip
    return {
        "value": None if value is None else show_metric(value),
        "missing": "Not measured" if record.run.dataset.split == "none" else "No evaluation yet",
        "split": split,
        "factor": factor,
        "better": value is not None and other is not None and value > other,
        "sentence": f"{'; '.join(filter(None, clauses))}.",
        "notice": notice,
        "tiles": [(name, value) for name, value in tiles if value != "–"],
    }


def _metrics(record: Record, split: str) -> dict[str, Any]:
    """Every metric at every depth, the model beside popularity."""
    rankers = [of for of in RANKERS if record.metric(split, METRIC, of) is not None]
    shown = [key for key in METRICS if record.metric(split, f"{key}@10") is not None]
    rows = []
    for k in KS:
        cells: list[tuple[str, bool]] = []
        for key in shown:
            values = [record.metric(split, f"{key}@{k}", of) for of in rankers]
            best = max((value for value in values if value is not None), default=None)
            cells += [(show_metric(one), one is not None and one == best) for one in values]
        rows.append((k, cells))
    return {
        "name": f"Metrics on {split} events, the model beside popularity",
        "split": split,
        "rankers": rankers,
        "metrics": [METRICS[key].label for key in shown],
        "rows": rows,
    }


def _measured(record: Record) -> Iterator[str]:
    device, measured = (record.result.get(name) for name in ("device", "memory_measured"))
    if device:
        yield f"Measured on {device}."
    if measured:
        yield f"Memory is the {measured}."


def _steps(counts: Mapping[str, Any]) -> Iterator[list[str]]:
    """The dataset's counts after each step of preparing."""
    for tally in [*counts.get("steps", ()), counts.get("train"), counts.get("test")]:
        if isinstance(tally, Mapping):
            found = [number(tally, key) for key in ("users", "items", "interactions")]
            users, items, events = found
            density = events / users / items if users and items and events else None
            yield [str(tally.get("name", "")), *map(show_count, found), show_share(density)]


def _order(found: Any) -> str:
    """A sentence of what preparing found about the order of events."""
    if not isinstance(found, Mapping):
        return ""
    words = [f"{name} {value}" for name, value in found.items() if isinstance(value, str | int)]
    told = [one for one in words if not one.startswith("warning ")]
    warning = found.get("warning")
    return f"Order of events: {', '.join(told)}." + (f" Beware: {warning}." if warning else "")


def _epochs(record: Record) -> dict[str, Any]:
    """Every number of every epoch that any epoch has."""
    known = {
        title: (keys, show)
        for title, (keys, show) in _EPOCH_COLUMNS.items()
        if record.course(*keys)
    }
    rows = [
        [str(one["epoch"]), *(show(number(one, *keys)) for keys, show in known.values())]
        for one in record.epochs
    ]
    best = str(record.result["best_epoch"])
    return {"heads": ["epoch", *known], "rows": rows if known else [], "best": best}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)
