"""Users of the log, by their own ids: what they have had, from the dataset of the run."""

from collections.abc import Sequence
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
class OfUser:
    """A request for a user of the log."""

    user: Id
    request: Request
    """What is asked for, without a history."""


@dataclass(frozen=True)
class Users:
    """Whole histories of users, memory-mapped."""

    dataset: PreparedDataset

    @classmethod
    def load(cls, path: Path, content: str | None) -> "Users":
        """Open the dataset that an export's run was trained on, given the hash of its content."""
        dataset = PreparedDataset.load(path)
        dataset.check_content(content, "what is served", _OTHER)
        return cls(dataset)

    def known(self, users: Sequence[Id], *, times: bool) -> list[dict[str, Any]]:
        """The history of each user, of a `Request`, and its times; none of one not in the log."""
        codes = self.dataset.all_users.lookup(users)
        found, seconds = self.dataset.histories(codes), [None] * len(users)
        if times:
            seconds = [some.tolist() for some in self.dataset.histories(codes, "times")]
        ids = iter(self.dataset.item_ids.decode(np.concatenate([*found, np.empty(0, np.int32)])))
        pairs = zip(found, seconds, strict=True)
        return [{"history": [next(ids) for _ in events], "times": at} for events, at in pairs]
