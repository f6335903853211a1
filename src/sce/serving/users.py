"""Users of the log, by their own ids: what they have had, from the dataset of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sce.data.prepared import PreparedDataset
from sce.data.requests import Id, Request
from sce.errors import InputError

NO_USERS = (
    "this server knows no users: give their history instead of a user, or start it with "
    "--data DIR, the dataset of the run"
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
        """Open the dataset that an export's run was trained on, given the hash of its content.

        Raises:
            InputError: When there is none, it is not as it was written, or is another one.
        """
        dataset = PreparedDataset.load(path)
        if dataset.content_hash != content:
            raise InputError(
                f"{path} is not the dataset of what is served: its content is "
                f"{dataset.content_hash[:12]}, and the run was trained on {str(content)[:12]}; "
                "give that one with --data"
            )
        return cls(dataset)

    def histories(self, users: Sequence[Id]) -> list[list[Id]]:
        """Items of each user, the oldest first; none of one who is not in the log."""
        codes = self.dataset.all_users.lookup(users)
        found = self.dataset.histories(codes)
        ids = iter(self.dataset.item_ids.decode(np.concatenate([*found, np.empty(0, np.int32)])))
        return [[next(ids) for _ in events] for events in found]

    def times(self, users: Sequence[Id]) -> list[list[int]]:
        """Seconds of the same events."""
        codes = self.dataset.all_users.lookup(users)
        return [times.tolist() for times in self.dataset.histories(codes, "times")]
