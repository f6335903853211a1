"""The page itself: its parts in order, with style and script inside, and nothing from elsewhere."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from sce import __version__
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.recommend import Recommender
from sce.report.document import make_document
from sce.report.markup import element, join
from sce.report.record import Record
from sce.report.samples import Sample, draw_samples, show_samples
from sce.report.sections import buckets, cost, headline, learning, quality
from sce.report.tables import dataset as dataset_table
from sce.report.tables import every_epoch, settings
from sce.training.run import Run


def make_page(run: Run, *, data: Path | None = None, device: str = "cpu") -> str:
    """Read a run, finished or not, and make its page.

    What cannot be shown because the dataset is elsewhere, or because there are no weights yet, is
    said on the page.

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
        counts, samples = dataset.counts, _draw(run, dataset, device)
    return render(Record.read(run), counts=counts, samples=samples, written=datetime.now())


def _draw(run: Run, dataset: PreparedDataset, device: str) -> Sequence[Sample] | str:
    if not len(dataset.test):
        return "The dataset has no test users to recommend for."
    try:
        recommender = Recommender.load(run, device)
    except InputError as error:
        return f"There are no recommendations to show: {error}."
    return draw_samples(recommender, dataset)


def render(
    record: Record,
    *,
    counts: Mapping[str, Any] | str,
    samples: Sequence[Sample] | str,
    written: datetime,
) -> str:
    """Make the page of what is given, and of nothing else.

    Args:
        record: What the run wrote down.
        counts: What its dataset counted, or a sentence saying why that is not known.
        samples: A few users' recommendations, or a sentence saying why there are none.
        written: The time that the page bears.
    """
    style, script = (
        files("sce.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    about = element(
        "section",
        element("h2", "Settings and data"),
        dataset_table(record, counts),
        settings(record),
        every_epoch(record),
    )
    body = join(
        element("header", headline(record)),
        element(
            "main",
            learning(record),
            quality(record),
            cost(record),
            buckets(record),
            show_samples(samples),
            about,
        ),
        element(
            "footer",
            f"Trained with sce {record.version}; page written by sce {__version__} on "
            f"{written:%Y-%m-%d at %H:%M}.",
        ),
    )
    title = f"{record.name}: a training run of sce"
    return make_document(title, body, style=style, script=script)
