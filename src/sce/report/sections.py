"""The parts of a run's page that are read at a glance: each a function of what the run recorded."""

from sce.evaluation.evaluate import KS
from sce.report.figures import Bars, Caption, Level, Mark, Series, bar_chart, line_chart
from sce.report.markup import Child, Markup, element, join
from sce.report.parts import any_number, course, figures, folded, notice, section, tiles
from sce.report.record import METRIC, Record, number
from sce.report.scales import Axis
from sce.report.tables import METRICS, RANKERS, metrics_table
from sce.units import (
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

_EPOCHS = Axis("epoch", show_count, whole=True)
_STOPPED = {
    "patience": "training stopped because validation no longer improved",
    "epochs": "training ran to its last epoch",
}
_PHASES = ("training", "evaluation")


def headline(record: Record) -> Markup:
    """The one number, what it is compared with, and the run in a sentence."""
    split = _best_split(record)
    value, other = (record.metric(split, METRIC, of=of) for of in RANKERS)
    parts: list[Child] = [element("span", "No evaluation yet", class_="number")]
    if value is not None:
        parts = [
            element("span", show_metric(value), class_="number"),
            element("span", f"{split} NDCG@10"),
        ]
    factor = show_factor(value, other)
    if factor is not None and value is not None and other is not None:
        text = f"{factor} popularity ({show_metric(other)})"
        parts.append(element("span", text, class_="factor" if value > other else "factor worse"))
    return join(
        element("p", f"Training run {record.name}", class_="eyebrow"),
        element("h1", *parts, class_="headline"),
        element("p", _sentence(record), class_="lead"),
        [notice(text) for text in _notices(record)],
        tiles(_first_tiles(record, split)),
    )


def _best_split(record: Record) -> str:
    return "test" if record.metric("test", METRIC) is not None else "validation"


def _sentence(record: Record) -> str:
    items = show_count(number(record.dataset, "n_items"))
    clauses = [f"{record.model} trained with {record.loss_name} on a catalogue of {items} items"]
    if record.best_epoch is not None:
        done = len(record.epochs)
        clauses.append(f"the weights kept are those of epoch {record.best_epoch} of {done}")
    stopped = _STOPPED.get(str((record.result or {}).get("stopped")))
    if stopped is not None:
        clauses.append(stopped)
    return "; ".join(clauses) + "."


def _notices(record: Record) -> list[str]:
    if record.result is not None:
        return []
    if record.diverged is not None:
        return [f"{record.diverged[:1].upper()}{record.diverged[1:]}."]
    done = plural(len(record.epochs), "epoch") if record.epochs else "no epoch"
    return [
        f"This training has not ended: it is still going, or it was interrupted ({done} complete). "
        "Test metrics are there when it ends. An interrupted run goes on with sce train --resume."
    ]


def _first_tiles(record: Record, split: str) -> list[tuple[str, str]]:
    found = []
    for key in ("hr", "cov"):
        value = record.metric(split, f"{key}@10")
        if value is not None:
            found.append((f"{split} {METRICS[key]}@10", show_metric(value)))
    seconds = [one for one in record.column("seconds", "training") if one is not None]
    if seconds:
        name = f"training time, {plural(len(seconds), 'epoch')}"
        found.append((name, show_duration(sum(seconds))))
    peak, speed = _peak(record, "training"), _speed(record)
    if peak is not None:
        found.append(("peak memory of training", show_memory(peak)))
    if speed is not None:
        found.append(("tokens per second in training", show_compact(speed)))
    return found


def learning(record: Record) -> Markup | None:
    """How the loss fell and the validation metric rose."""
    x = record.numbers_of_epochs
    loss, metric = record.column("loss"), record.column("validation", METRIC)
    drawn = []
    if any_number(loss):
        drawn.append(
            line_chart(
                [Series("loss", x, loss)],
                caption=Caption(
                    "Training loss",
                    f"{record.loss_name}, mean of the epoch",
                    course("Training loss", x, loss, show_digits),
                ),
                x_axis=_EPOCHS,
                y_axis=Axis("loss", show_compact, show_digits),
            )
        )
    if any_number(metric):
        best, value = record.best_epoch, record.metric("validation", METRIC)
        popularity = record.metric("validation", METRIC, of="popularity")
        drawn.append(
            line_chart(
                [Series("NDCG@10", x, metric, bridged=True)],
                caption=Caption(
                    "Validation NDCG@10",
                    "Each test user's last event but one, in a ranking of the whole catalogue",
                    course("Validation NDCG@10", x, metric, show_metric),
                ),
                x_axis=_EPOCHS,
                y_axis=Axis("NDCG@10", show_digits, show_metric, from_zero=True),
                marks=[Mark(best, value, f"best: {show_metric(value)} at epoch {best}")]
                if best is not None and value is not None
                else [],
                levels=[Level(popularity, f"popularity {show_metric(popularity)}")]
                if popularity is not None
                else [],
            )
        )
    return section("Learning", figures(drawn)) if drawn else None


def quality(record: Record) -> Markup | None:
    """The metrics at every depth, the model beside popularity."""
    splits = [split for split in ("test", "validation") if record.metric(split, METRIC) is not None]
    if not splits:
        return None
    split = splits[0]
    drawn = [
        _depths(record, split, key, text)
        for key, text in [
            ("ndcg", "How high each user's held-out item stands; 1 is always first"),
            ("cov", "Share of the catalogue that is recommended to somebody"),
        ]
        if any_number(record.metric(split, f"{key}@{k}") for k in KS)
    ]
    return section(
        "Quality",
        figures(drawn),
        metrics_table(record, split),
        [folded(f"The same on {one} events", metrics_table(record, one)) for one in splits[1:]],
    )


def _depths(record: Record, split: str, key: str, text: str) -> Markup:
    """One metric at every depth, as bars."""
    groups = [
        Bars(of, values)
        for of in RANKERS
        if any_number(values := [record.metric(split, f"{key}@{k}", of=of) for k in KS])
    ]
    words = [
        f"{bars.name}: "
        + ", ".join(f"{show_metric(v)} at {k}" for k, v in zip(KS, bars.values, strict=True))
        for bars in groups
    ]
    return bar_chart(
        [str(k) for k in KS],
        groups,
        caption=Caption(f"{METRICS[key]}@k on {split} events", text, "; ".join(words) + "."),
        x_label="k",
        y_axis=Axis(f"{METRICS[key]}@k", show_digits, lambda value: f"{value:.3f}"),
    )


def cost(record: Record) -> Markup | None:
    """Memory and time, training and evaluation apart."""
    x, result = record.numbers_of_epochs, record.result or {}
    seconds = [
        Series(phase, x, values, bridged=True)
        for phase in _PHASES
        if any_number(values := _seconds(record, phase))
    ]
    speed = record.column("tokens_per_second")
    named = [
        (f"peak memory of {phase}", show_memory(peak))
        for phase in _PHASES
        if (peak := _peak(record, phase)) is not None
    ]
    for phase in _PHASES:
        real = [value for value in _seconds(record, phase) if value is not None]
        if real:
            what = "epoch of training" if phase == "training" else phase
            named.append((f"one {what}, on average", show_duration(sum(real) / len(real))))
    drawn = []
    if seconds:
        drawn.append(
            line_chart(
                seconds,
                caption=Caption(
                    "Time per epoch",
                    "Seconds",
                    " ".join(course(one.name, x, one.y, show_duration) for one in seconds),
                ),
                x_axis=_EPOCHS,
                y_axis=Axis("seconds", show_compact, show_duration, from_zero=True),
            )
        )
    if any_number(speed):
        drawn.append(
            line_chart(
                [Series("tokens per second", x, speed)],
                caption=Caption(
                    "Training speed",
                    f"Tokens per second without padding; {show_count(_speed(record))} on average",
                    course("Tokens per second", x, speed, show_count),
                ),
                x_axis=_EPOCHS,
                y_axis=Axis("tokens per second", show_compact, show_count, from_zero=True),
            )
        )
    if not named and not drawn:
        return None
    facts = [f"Measured on {result['device']}." if result.get("device") else ""]
    if result.get("memory_measured"):
        facts.append(f"Memory is the {result['memory_measured']}.")
    told = element("p", " ".join(facts), class_="quiet") if any(facts) else None
    return section("Memory and time", told, tiles(named), figures(drawn))


def buckets(record: Record) -> Markup | None:
    """The paper's two figures of what the buckets hold, for runs trained with them."""
    x, drawn = record.numbers_of_epochs, []
    lines = [
        Series(name, x, values)
        for name, key in [("in exactly one bucket", "picked_once"), ("in any bucket", "placed")]
        if any_number(values := record.column("buckets", key))
    ]
    correct = record.column("buckets", "correct_in_bucket")
    axis = Axis("share", show_share, from_zero=True)
    if lines:
        drawn.append(
            line_chart(
                lines,
                caption=Caption(
                    "States picked once",
                    "Share of a batch's states; one that is in many buckets takes others' places",
                    " ".join(course(one.name, x, one.y, show_share) for one in lines),
                ),
                x_axis=_EPOCHS,
                y_axis=axis,
            )
        )
    if any_number(correct):
        drawn.append(
            line_chart(
                [Series("correct item in the bucket", x, correct)],
                caption=Caption(
                    "Correct items in their buckets",
                    "Share of bucket rows whose own correct item is among the bucket's items",
                    course("Correct item in the bucket", x, correct, show_share),
                ),
                x_axis=_EPOCHS,
                y_axis=axis,
            )
        )
    return section("Buckets", figures(drawn)) if drawn else None


def _seconds(record: Record, phase: str) -> list[float | None]:
    """How long each epoch took; None where nothing was done, which is recorded as no time."""
    return [value or None for value in record.column("seconds", phase)]


def _peak(record: Record, phase: str) -> float | None:
    found = number(record.result or {}, "memory_mib", phase)
    peaks = [peak for peak in record.column("memory_mib", phase) if peak is not None]
    return found if found is not None else max(peaks, default=None)


def _speed(record: Record) -> float | None:
    found = number(record.result or {}, "tokens_per_second")
    speeds = [speed for speed in record.column("tokens_per_second") if speed is not None]
    return found if found is not None or not speeds else sum(speeds) / len(speeds)
