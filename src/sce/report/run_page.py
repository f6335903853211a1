"""The page of a run, finished or not. Any number may be missing: the run may be young."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.evaluation.evaluate import KS
from sce.recommend import Recommender
from sce.report.charts import EPOCHS
from sce.report.drawing import (
    HEIGHT,
    INK,
    PALETTE,
    PAPER,
    SOFT,
    WIDTH,
    Axis,
    Curve,
    Figure,
    Point,
    colours,
    draw_curves,
)
from sce.report.frame import METRICS, number
from sce.report.pages import render
from sce.report.record import METRIC, SHOWN, Record, Sample, draw_samples
from sce.training.run import Run
from sce.units import (
    is_number,
    plural,
    show_compact,
    show_count,
    show_digits,
    show_duration,
    show_factor,
    show_memory,
    show_metric,
    show_share,
)

_RANKERS = ("model", "popularity")
_PHASES = ("training", "evaluation")
_STOPPED = {
    "patience": "training stopped because validation no longer improved",
    "epochs": "training ran to its last epoch",
}
_EPOCH_COLUMNS: list[tuple[str, tuple[str, ...], Callable[[float | None], str]]] = [
    ("loss", ("loss",), show_digits),
    ("validation NDCG@10", ("validation", METRIC), show_metric),
    ("validation HR@10", ("validation", "hr@10"), show_metric),
    ("training", ("seconds", "training"), show_duration),
    ("evaluation", ("seconds", "evaluation"), show_duration),
    ("tokens per second", ("tokens_per_second",), show_count),
    ("training peak", ("memory_mib", "training"), show_memory),
    ("evaluation peak", ("memory_mib", "evaluation"), show_memory),
    ("picked once", ("buckets", "picked_once"), show_share),
    ("in any bucket", ("buckets", "placed"), show_share),
    ("correct in bucket", ("buckets", "correct_in_bucket"), show_share),
]


def make_page(run: Run, *, data: Path | None = None, device: str = "cpu") -> str:
    """Read a run and make its page; the page says why anything is missing.

    Args:
        run: The run.
        data: Where its dataset lies now, if it was moved.
        device: Where the sample recommendations are computed.

    Raises:
        InputError: When `data` is not the dataset of the run.
    """
    counts: Mapping[str, Any] | str
    samples: Sequence[Sample] | str
    try:
        dataset = run.load_dataset(data, verify=False)
    except InputError as error:
        if data is not None:
            raise
        counts = samples = f"The dataset could not be read: {error}."
    else:
        counts, samples = dataset.counts, _samples(run, dataset, device)
    return render_run(Record.read(run), counts=counts, samples=samples, written=datetime.now())


def _samples(run: Run, dataset: PreparedDataset, device: str) -> Sequence[Sample] | str:
    if not len(dataset.test):
        return "The dataset has no test users to recommend for."
    try:
        recommender = Recommender.load(run, device)
    except InputError as error:
        return f"There are no recommendations to show: {error}."
    return draw_samples(recommender, dataset)


def render_run(
    record: Record,
    *,
    counts: Mapping[str, Any] | str,
    samples: Sequence[Sample] | str,
    written: datetime,
) -> str:
    """Make the page from notes alone.

    Args:
        record: The notes of the run.
        counts: The counts of its dataset, or why they are not known.
        samples: A few users' recommendations, or why there are none.
        written: The time in the footer.
    """
    settings = list(_flatten(record.config))
    columns = [(title, record.column(*keys), show) for title, keys, show in _EPOCH_COLUMNS]
    columns = [column for column in columns if _any(column[1])]
    numbered = enumerate(record.numbers_of_epochs)
    intro = (
        f"{plural(len(samples), 'test user')} at equal distances, not chosen by hand: the end of "
        f"the history, the first {SHOWN} recommendations with their scores, and what came next."
    )
    return render(
        "run.html",
        f"{record.name}: a training run of sce",
        written=written,
        record=record,
        headline=_headline(record),
        learning=_figures(learning(record)),
        quality=_quality(record),
        cost=_cost(record),
        buckets=_figures(buckets(record)),
        samples=samples,
        samples_intro=intro,
        data=_data(record, counts),
        settings=settings,
        settings_title=f"All {plural(len(settings), 'setting')}",
        epochs={
            "heads": ["epoch", *(title for title, _, _ in columns)],
            "rows": [
                [str(n), *(show(values[row]) for _, values, show in columns)] for row, n in numbered
            ]
            if columns
            else [],
            "best": str(record.best_epoch),
        },
    )


def _headline(record: Record) -> dict[str, Any]:
    split = "test" if record.metric("test", METRIC) is not None else "validation"
    value, other = (record.metric(split, METRIC, of=of) for of in _RANKERS)
    factor = show_factor(value, other)
    done = len(record.epochs)
    items = show_count(number(record.dataset, "n_items"))
    clauses = [f"{record.model} trained with {record.loss_name} on a catalogue of {items} items"]
    if record.best_epoch is not None:
        clauses.append(f"the weights kept are those of epoch {record.best_epoch} of {done}")
    clauses += filter(None, [_STOPPED.get(str((record.result or {}).get("stopped")))])
    notice = ""
    if record.result is None and record.diverged is not None:
        notice = f"{record.diverged[:1].upper()}{record.diverged[1:]}."
    elif record.result is None:
        notice = (
            "This training has not ended: it is still going, or it was interrupted "
            f"({plural(done, 'epoch') if done else 'no epoch'} complete). Test metrics are there "
            "when it ends. An interrupted run goes on with sce train --resume."
        )
    tiles = [
        (f"{split} {METRICS[key]}@10", show_metric(found))
        for key in ("hr", "cov")
        if (found := record.metric(split, f"{key}@10")) is not None
    ]
    seconds = [one for one in record.column("seconds", "training") if one is not None]
    if seconds:
        name = f"training time, {plural(len(seconds), 'epoch')}"
        tiles.append((name, show_duration(sum(seconds))))
    if record.peak("training") is not None:
        tiles.append(("peak memory of training", show_memory(record.peak("training"))))
    if record.speed is not None:
        tiles.append(("tokens per second in training", show_compact(record.speed)))
    return {
        "value": None if value is None else show_metric(value),
        "split": split,
        "factor": f"{factor} popularity ({show_metric(other)})" if factor else None,
        "better": value is not None and other is not None and value > other,
        "sentence": "; ".join(clauses) + ".",
        "notice": notice,
        "tiles": tiles,
    }


def _figures(found: Iterable[Figure | None]) -> list[Figure]:
    return [figure for figure in found if figure is not None]


def _course(
    record: Record,
    title: str,
    text: str,
    series: Sequence[tuple[str, list[float | None]]],
    show: Callable[[float | None], str],
    axis: Axis,
    *,
    bridged: bool = False,
    also: Sequence[alt.Chart] = (),
) -> Figure | None:
    """Numbers of the run over its epochs; `bridged` draws over epochs that have none."""
    curves, words = [], []
    for (name, values), colour in zip(series, PALETTE, strict=False):
        pairs = list(zip(record.numbers_of_epochs, values, strict=True))
        real = [(x, y) for x, y in pairs if y is not None]
        if not real:
            continue
        told = [
            Point(x, y, f"epoch {x}\n{name} {show(y)}") for x, y in (real if bridged else pairs)
        ]
        curves.append(Curve(name, told, colour))
        ends = [f"{show(y)} at epoch {x}" for x, y in (real[0], real[-1])]
        low, high = (show(end(y for _, y in real)) for end in (min, max))
        words.append(f"{name}: {ends[0]}, {ends[1]}; lowest {low}, highest {high}.")
    if not curves:
        return None
    chart = draw_curves(curves, EPOCHS, axis, also=also)
    return Figure(title, text, " ".join(words), chart)


def learning(record: Record) -> Iterator[Figure | None]:
    """Training loss, and validation NDCG@10 beside popularity."""
    text = f"{record.loss_name}, mean of the epoch"
    yield _course(record, "Training loss", text, [("loss", record.column("loss"))], show_digits,
                  Axis("loss"))  # fmt: skip
    value = record.metric("validation", METRIC)
    popularity = record.metric("validation", METRIC, of="popularity")
    yield _course(
        record, "Validation NDCG@10",
        "Each test user's last event but one, in a ranking of the whole catalogue",
        [("NDCG@10", record.column("validation", METRIC))], show_metric, Axis("NDCG@10", zero=True),
        bridged=True, also=list(_marks(record.best_epoch, value, popularity)),
    )  # fmt: skip


def _marks(best: int | None, value: float | None, popularity: float | None) -> Iterator[alt.Chart]:
    """The best epoch as a ring, popularity as a line across."""
    if popularity is not None:
        data = pl.DataFrame({"y": [popularity], "label": [f"popularity {show_metric(popularity)}"]})
        level = alt.Chart(data).encode(y="y:Q")
        yield level.mark_rule(color=SOFT, strokeDash=[5, 4])
        text = level.mark_text(align="right", dy=-7, color=SOFT, fontSize=11.5)
        yield text.encode(x=alt.value(WIDTH), text="label:N")
    if best is not None and value is not None:
        label = f"best: {show_metric(value)} at epoch {best}"
        data = pl.DataFrame({"x": [best], "y": [value], "label": [label]})
        place = alt.Chart(data).encode(x="x:Q", y="y:Q")
        yield place.mark_point(
            filled=True, fill=PAPER, stroke=INK, strokeWidth=2, size=90, opacity=1
        )
        text = alt.Chart(data).mark_text(align="right", dy=-13, color=INK, fontWeight=600)
        yield text.encode(x=alt.value(WIDTH), y="y:Q", text="label:N")


def _quality(record: Record) -> dict[str, Any] | None:
    splits = [split for split in ("test", "validation") if record.metric(split, METRIC) is not None]
    if not splits:
        return None
    about = {
        "ndcg": "How high each user's held-out item stands; 1 is always first",
        "cov": "Share of the catalogue that is recommended to somebody",
    }
    return {
        "figures": _figures(depths(record, splits[0], key, text) for key, text in about.items()),
        "tables": [_metrics(record, split) for split in splits],
    }


def depths(record: Record, split: str, key: str, text: str) -> Figure | None:
    """One metric at every depth, the model beside popularity, as bars."""
    bars = [
        (of, str(k), value)
        for of in _RANKERS for k in KS
        if (value := record.metric(split, f"{key}@{k}", of=of)) is not None
    ]  # fmt: skip
    if not bars:
        return None
    frame = pl.DataFrame(bars, schema=["name", "k", "value"], orient="row").with_columns(
        label=pl.col("value").map_elements("{:.3f}".format, pl.String)
    )
    rankers = [of for of in _RANKERS if of in frame["name"]]
    axis = Axis(f"{METRICS[key]}@k", zero=True).encode(frame["value"].to_list())
    base = alt.Chart(frame).encode(
        x=alt.X("k:N", sort=None, title="k", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("name:N", sort=rankers), y=alt.Y("value:Q", **axis),
    )  # fmt: skip
    coloured = base.mark_bar().encode(
        color=colours(list(zip(rankers, PALETTE, strict=False)), "square")
    )
    values = base.mark_text(dy=-6, fontSize=10, color=SOFT).encode(text="label:N")
    words = [
        f"{of}: " + ", ".join(f"{show_metric(v)} at {k}" for name, k, v in bars if name == of)
        for of in rankers
    ]
    return Figure(
        f"{METRICS[key]}@k on {split} events",
        text,
        "; ".join(words) + ".",
        (coloured + values).properties(width=WIDTH, height=HEIGHT),
    )


def _metrics(record: Record, split: str) -> dict[str, Any]:
    """Every metric at every depth, the model beside popularity."""
    rankers = [of for of in _RANKERS if _any(record.metric(split, f"ndcg@{k}", of=of) for k in KS)]
    shown = [key for key in METRICS if _any(record.metric(split, f"{key}@{k}") for k in KS)]
    rows = []
    for k in KS:
        cells: list[tuple[str, bool]] = []
        for key in shown:
            values = [record.metric(split, f"{key}@{k}", of=of) for of in rankers]
            best = max((value for value in values if value is not None), default=None)
            cells += [(show_metric(one), one is not None and one == best) for one in values]
        rows.append((k, cells))
    return {
        "name": f"Metrics on {split} events, the model beside popularity",
        "split": split,
        "rankers": rankers,
        "metrics": [METRICS[key] for key in shown],
        "rows": rows,
    }


def _cost(record: Record) -> dict[str, Any] | None:
    tiles = [
        (f"peak memory of {phase}", show_memory(peak))
        for phase in _PHASES
        if (peak := record.peak(phase)) is not None
    ]
    for phase in _PHASES:
        real = [value for value in record.seconds(phase) if value is not None]
        if real:
            what = "epoch of training" if phase == "training" else phase
            tiles.append((f"one {what}, on average", show_duration(sum(real) / len(real))))
    speed = f"Tokens per second without padding; {show_count(record.speed)} on average"
    figures = _figures(
        [
            _course(record, "Time per epoch", "Seconds",
                    [(phase, record.seconds(phase)) for phase in _PHASES], show_duration,
                    Axis("seconds", zero=True), bridged=True),
            _course(record, "Training speed", speed,
                    [("tokens per second", record.column("tokens_per_second"))], show_count,
                    Axis("tokens per second", "~s", zero=True)),
        ]
    )  # fmt: skip
    if not tiles and not figures:
        return None
    result = record.result or {}
    facts = [f"Measured on {result['device']}." if result.get("device") else ""]
    if result.get("memory_measured"):
        facts.append(f"Memory is the {result['memory_measured']}.")
    return {"facts": " ".join(filter(None, facts)), "tiles": tiles, "figures": figures}


def buckets(record: Record) -> Iterator[Figure | None]:
    """The paper's two figures of the buckets' content, for runs trained with them."""
    share = Axis("share", ".0%", zero=True)
    lines = [("in exactly one bucket", "picked_once"), ("in any bucket", "placed")]
    yield _course(
        record, "States picked once",
        "Share of a batch's states; one that is in many buckets takes others' places",
        [(name, record.column("buckets", key)) for name, key in lines], show_share, share,
    )  # fmt: skip
    yield _course(
        record, "Correct items in their buckets",
        "Share of bucket rows whose own correct item is among the bucket's items",
        [("correct item in the bucket", record.column("buckets", "correct_in_bucket"))],
        show_share, share,
    )  # fmt: skip


def _data(record: Record, counts: Mapping[str, Any] | str) -> dict[str, Any]:
    """The dataset and its counts after each step of preparing, or why they are not known."""
    why = counts if isinstance(counts, str) else ""
    known = {} if isinstance(counts, str) else counts
    tallies = [*known.get("steps", ()), known.get("train"), known.get("test")]
    steps = []
    for tally in tallies:
        if isinstance(tally, Mapping):
            users, items, events = (
                number(tally, key) for key in ("users", "items", "interactions")
            )
            density = events / users / items if users and items and events else None
            shown = map(show_count, (users, items, events))
            steps.append([str(tally.get("name", "")), *shown, show_share(density)])
    return {
        "path": record.dataset.get("path", "–"),
        "content": str(record.dataset.get("content_hash", "–"))[:12],
        "items": show_count(number(record.dataset, "n_items")),
        "why": why,
        "heads": ["step", "users", "items", "interactions", "density"],
        "steps": steps,
    }


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "–" if value is None else str(value)


def _any(values: Iterable[float | None]) -> bool:
    return any(is_number(value) for value in values)
