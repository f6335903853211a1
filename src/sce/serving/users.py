"""Users of the log, by their own ids: what they have had, from the dataset of the run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sce.data.prepared import PreparedDataset
from sce.data.requests import Id, Request

NO_USERS = (
    "this server knows no users: give their history instead of a user, or start it with "
    "--data DIR, the dataset of the run"
)
_OTHER = (
    "export a run on what is here now, prepare the log of that one into the same directory "
    "(sce prepare --force), or start the server with another --data"
)


@dataclass(frozen=True)
class OfUser(Request):
    """A request for a user of the log, whose history is looked up."""

    history: Iterable[Id] = ()
    user: Id = ""


def load_users(path: Path, content: str | None) -> PreparedDataset:
    """Open the dataset that an export's run was trained on, given the hash of its content."""
    dataset = PreparedDataset.load(path)
    dataset.check_content(content, "what is served", _OTHER)
    return dataset


def known_of(
    dataset: PreparedDataset, users: Sequence[Id], *, times: bool
) -> Iterator[dict[str, Any]]:
    """The history of each user, of a `Request`, and its times; none of one not in the log."""
    codes = dataset.everyone.lookup(users)
    found, seconds = dataset.histories(codes), [None] * len(users)
    if times:
        seconds = [some.tolist() for some in dataset.histories(codes, "times")]
    ids = iter(dataset.item_ids.decode(np.concatenate([*found, np.empty(0, np.int32)])))
    for events, at in zip(found, seconds, strict=True):
        yield {"history": [next(ids) for _ in events], "times": at}
