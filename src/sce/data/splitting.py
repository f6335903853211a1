"""Splits of a log into training and test sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sce.data.interactions import Interactions, Tally
from sce.data.prepared import MIN_EVALUATED, PreparedDataset, Sequences, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, checked, named
from sce.units import plural

Kind: TypeAlias = Literal["temporal", "leave-one-out"]
TestHistory: TypeAlias = Literal["after-cut", "full"]


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test sequences over one catalogue, with counts of everything left out.

    A test sequence ends with the validation target and then the test target.
    """

    kind: Kind
    options: Mapping[str, Any]  # what was asked for, beside the kind
    train: Sequences
    test: Sequences
    user_ids: Vocabulary  # the users of train and test
    item_ids: Vocabulary  # the catalogue: a sequence's items are codes into it
    train_tally: Tally
    test_tally: Tally
    left_out: tuple[Tally, ...]  # what is not trained on or not evaluated, and why
    cut: int | None = None  # temporal only: the first instant of the test period, microseconds

    def save(
        self,
        path: Path | str,
        *,
        settings: Mapping[str, Any] | None = None,
        steps: Sequence[Tally] = (),
        order: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> PreparedDataset:
        """Write a prepared dataset, with filters, counts after each, and what order was found."""
        return write_prepared(
            path,
            train=self.train,
            test=self.test,
            user_ids=self.user_ids,
            item_ids=self.item_ids,
            settings={**(settings or {}), "split": self.kind, **self.options},
            counts={
                "order": dict(order or {}),
                "steps": [asdict(step) for step in steps],
                "train": asdict(self.train_tally),
                "test": asdict(self.test_tally),
                "left_out": [asdict(tally) for tally in self.left_out],
                "cut": None if self.cut is None else show_time(self.cut),
            },
            force=force,
        )


@checked
def split_temporal(
    interactions: Interactions,
    *,
    quantile: float = 0.95,
    test_history: TestHistory = "after-cut",
) -> Split:
    """Train on users whose every event lies before one instant, and test on the others.

    The cut is the quantile of all timestamps (the nearest event's). Users with an event at or
    after it are test users, and nothing of theirs is trained on. The catalogue is what occurs in
    training: other items leave the test sequences. A test user's last event is the test target,
    the one before it the validation target; both lie at or after the cut.

    Args:
        interactions: The log.
        quantile: The share of events before the cut, between 0 and 1.
        test_history: `after-cut` keeps a test user's events from the cut on, as the paper's code
            does; `full` keeps what the user did before it too, as history.
    """
    if not 0 <= quantile <= 1:
        raise InputError(f"{named('quantile')} must lie between 0 and 1, got {quantile}")
    cut = int(np.quantile(interactions.timestamps, quantile, method="nearest"))
    n_users = len(interactions.user_ids)
    is_test_user = _present(interactions.users[interactions.timestamps >= cut], n_users)
    of_test_users = is_test_user.take(interactions.users)
    train, test = interactions.where(~of_test_users), interactions.where(of_test_users)
    known = _present(train.items, len(interactions.item_ids))
    late = test.timestamps >= cut

    # What the split leaves out, reason by reason; every row has at most one.
    early = ~late if test_history == "after-cut" else np.zeros_like(late)
    unknown = ~early & ~known.take(test.items)
    usable = ~early & ~unknown
    enough = np.bincount(test.users[usable], minlength=n_users) >= MIN_EVALUATED
    enough &= np.bincount(test.users[usable & late], minlength=n_users) >= 2  # both targets
    evaluated = usable & enough.take(test.users)

    moment = f"the cut at quantile {quantile} ({show_time(cut)})"
    after = " from the cut on" if test_history == "after-cut" else ", two of them from the cut on"
    required = f"{MIN_EVALUATED} known events{after}"
    n_test_users = int(np.count_nonzero(is_test_user))
    users = plural(n_test_users, "user")
    one_out = named("split", "leave-one-out")
    if not len(train):
        raise InputError(
            f"no training users: all of the {users} have an event at or after "
            f"{moment}; raise {named('quantile')}, or use {one_out}"
        )
    if not evaluated.any():
        raise InputError(
            f"no test users: of the {users} with an event at or after {moment}, "
            f"none has {required}; lower {named('quantile')}, or use {one_out}"
        )
    too_few = test.where(usable & ~evaluated)
    left_out = [
        test.where(unknown).tally("test events on items not in training: dropped"),
        replace(
            too_few.tally(f"test users without {required}: not evaluated"),
            users=n_test_users - int(np.count_nonzero(enough)),  # some have no usable event
        ),
    ]
    if test_history == "after-cut":
        left_out.insert(0, test.where(early).tally("events of test users before the cut: dropped"))
    options = {"quantile": quantile, "test_history": test_history}
    return _assemble("temporal", options, train, test.where(evaluated), known, left_out, cut)


@checked
def split_leave_one_out(interactions: Interactions) -> Split:
    """Test on every user's last event, validate on the one before it, and train on the rest.

    The catalogue is every item of the log. Users with fewer than three events are trained on
    whole and not evaluated.
    """
    lengths = np.bincount(interactions.users, minlength=len(interactions.user_ids))
    is_evaluated = lengths >= MIN_EVALUATED
    if not is_evaluated.any():
        users = plural(int(np.count_nonzero(lengths)), "user")
        raise InputError(
            f"no test users: leave-one-out needs users with at least {MIN_EVALUATED} events, and "
            f"the most active of {users} has {lengths.max()}"
        )
    trained = np.ones(len(interactions), bool)
    ends = np.cumsum(lengths)[is_evaluated]
    for target in (ends - 1, ends - 2):
        trained[target] = False
    train = interactions.where(trained)
    of_evaluated = is_evaluated.take(interactions.users)
    n_items = len(interactions.item_ids)
    catalogue = _present(interactions.items, n_items)
    unseen = catalogue & ~_present(train.items, n_items)
    left_out = [
        interactions.where(~of_evaluated).tally(
            f"users with fewer than {MIN_EVALUATED} events: trained on whole, not evaluated"
        ),
        interactions.where(unseen.take(interactions.items)).tally(
            "items that occur only as targets: kept in the catalogue, never trained on"
        ),
    ]
    test = interactions.where(of_evaluated)
    return _assemble("leave-one-out", {}, train, test, catalogue, left_out, None)


def show_time(microseconds: int) -> str:
    """An instant as ISO 8601 in UTC; years that no calendar here holds as a plain number."""
    try:
        instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    except OverflowError:
        return f"{microseconds} microseconds"
    return instant.isoformat().replace("+00:00", "Z")


def _assemble(
    kind: Kind,
    options: Mapping[str, Any],
    train: Interactions,
    test: Interactions,
    catalogue: NDArray[np.bool_],
    left_out: Sequence[Tally],
    cut: int | None,
) -> Split:
    """Number the users and items that remain, and lay the chosen rows out as sequences."""
    first_rows = [
        np.flatnonzero(np.diff(rows.users, prepend=np.int32(-1))) for rows in (train, test)
    ]
    remaining = np.zeros(len(train.user_ids), bool)
    for rows, starts in zip((train, test), first_rows, strict=True):
        remaining[rows.users[starts]] = True
    user_codes, item_codes = (
        np.cumsum(kept, dtype=np.int32) - np.int32(1) for kept in (remaining, catalogue)
    )
    sequences = [
        Sequences(
            items=item_codes.take(rows.items),
            offsets=np.append(starts, len(rows)),
            users=user_codes[rows.users[starts]],
        )
        for rows, starts in zip((train, test), first_rows, strict=True)
    ]
    return Split(
        kind=kind,
        options=options,
        train=sequences[0],
        test=sequences[1],
        user_ids=train.user_ids.take(np.flatnonzero(remaining)),
        item_ids=train.item_ids.take(np.flatnonzero(catalogue)),
        train_tally=train.tally("training"),
        test_tally=test.tally("test"),
        left_out=tuple(left_out),
        cut=cut,
    )


def _present(codes: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    """True for those of the codes 0 .. size - 1 that occur."""
    present = np.zeros(size, bool)
    present[codes] = True
    return present
