"""A few test users: what they had, what is recommended, and what they really took next."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sce.data.prepared import PreparedDataset
from sce.recommend import Id, Recommended, Recommender
from sce.report.markup import Markup, element
from sce.report.parts import notice, section
from sce.units import plural

SHOWN = 5  # recommendations of each user
DEPTH = 50  # how far down the held-out item is looked for
TAIL = 5  # last events of a history


@dataclass(frozen=True)
class Sample:
    """One test user."""

    user: Id
    tail: Sequence[Id]
    """The last events of the history, oldest first."""
    events: int
    """How many the history has."""
    target: Id
    """The held-out event: what came next."""
    seen_before: bool
    """Whether it is in the history, and so is not recommended."""
    best: Recommended

    @property
    def rank(self) -> int | None:
        """Where the held-out item stands among the recommendations, from 1."""
        items = self.best.items
        return items.index(self.target) + 1 if self.target in items else None


def draw_samples(
    recommender: Recommender, dataset: PreparedDataset, count: int = 6
) -> list[Sample]:
    """Take test users at equal distances, so that nobody chooses the pretty ones."""
    rows = np.unique(np.linspace(0, len(dataset.test) - 1, count).round().astype(int))
    users = dataset.user_ids.decode(dataset.test.users[rows])
    sequences = [dataset.item_ids.decode(dataset.test[int(row)]) for row in rows]
    depth = min(DEPTH, recommender.n_items)
    found = recommender.recommend([events[:-1] for events in sequences], k=depth)
    return [
        Sample(
            user=user,
            tail=history[-TAIL:],
            events=len(history),
            target=target,
            seen_before=target in history,
            best=best,
        )
        for user, (*history, target), best in zip(users, sequences, found, strict=True)
    ]


def show_samples(samples: Sequence[Sample] | str) -> Markup:
    """A few users' recommendations, or a sentence saying why there are none."""
    title = "Sample recommendations"
    if isinstance(samples, str):
        return section(title, notice(samples))
    intro = (
        f"{plural(len(samples), 'test user')} at equal distances, not chosen by hand: the end of "
        f"the history, the first {SHOWN} recommendations with their scores, and what came next."
    )
    cards = [_card(sample) for sample in samples]
    return section(
        title, element("p", intro, class_="quiet"), element("ul", cards, class_="samples")
    )


def _card(sample: Sample) -> Markup:
    hit = sample.rank is not None and sample.rank <= SHOWN
    if sample.rank is not None:
        verdict = f"{'hit' if hit else 'found'} at rank {sample.rank}"
    else:
        first = f"not in the first {len(sample.best)}"
        verdict = "had before, so left out" if sample.seen_before else first
    ranked = zip(sample.best.items[:SHOWN], sample.best.scores, strict=False)
    lines = [
        element(
            "li",
            element("span", str(place), class_="rank"),
            element("span", str(item), class_="id"),
            element("span", f"{score:.2f}", class_="score"),
            class_="hit" if item == sample.target else None,
        )
        for place, (item, score) in enumerate(ranked, 1)
    ]
    last = f"Last {len(sample.tail)} of {sample.events:,}" if sample.events > TAIL else "All"
    return element(
        "li",
        element(
            "h3",
            element("span", "User ", element("span", str(sample.user), class_="id")),
            element("span", verdict, class_="verdict hit" if hit else "verdict"),
        ),
        element("p", f"{last} {'event' if sample.events == 1 else 'events'}", class_="quiet"),
        element("ul", [_chip(item) for item in sample.tail], class_="chips"),
        element("p", "Recommended", class_="quiet"),
        element("ol", lines, class_="ranked"),
        element("p", "Came next (held out)", class_="quiet"),
        element("ul", _chip(sample.target), class_="chips"),
    )


def _chip(item: Id) -> Markup:
    return element("li", str(item), class_="id", title=str(item))
