"""Splits of a log into training and test sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sce.data import prepared
from sce.data.interactions import GrowingArrays, Interactions, Parts, Tally, TallyOfParts
from sce.data.prepared import MIN_EVALUATED, PreparedDataset, Sequences
from sce.data.titles import Titles
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, checked, named
from sce.units import plural

Kind: TypeAlias = Literal["temporal", "leave-one-out", "none"]
TestHistory: TypeAlias = Literal["after-cut", "full"]

_DIGIT_BITS = 20  # of times, counted at once
_SECOND = 10**6  # microseconds


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test sequences over one catalogue, with counts of everything left out.

    A test sequence ends with the validation target and then the test target. Beside them are all
    users of the log, and the whole histories of those of whom the sequences have less.
    """

    kind: Kind
    options: Mapping[str, Any]  # what was asked for, beside the kind
    train: Sequences
    test: Sequences
    user_ids: Vocabulary  # the users of train and test
    item_ids: Vocabulary  # the catalogue: a sequence's items are codes into it
    everyone: Vocabulary  # the users of the log
    whole: Sequences  # its users are codes into `everyone`
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
        titles: Titles | None = None,
        force: bool = False,
        directory: Path | None = None,
    ) -> PreparedDataset:
        """Write a prepared dataset, with filters, counts after each, and what order was found.

        `directory` is the one that is being filled for `path`, where the arrays lie already.
        """
        names = ("train", "test", "user_ids", "item_ids", "everyone", "whole")
        content: dict[str, Any] = {name: getattr(self, name) for name in names} | {
            "titles": None if titles is None else titles.texts,
            "settings": {**(settings or {}), "split": self.kind, **self.options},
            "counts": {
                "order": dict(order or {}),
                "steps": [asdict(step) for step in steps],
                "train": asdict(self.train_tally),
                "test": asdict(self.test_tally),
                "left_out": [asdict(tally) for tally in self.left_out],
                "cut": None if self.cut is None else show_time(self.cut),
                **({} if titles is None else {"titles": titles.counts}),
            },
        }
        if directory is not None:
            return prepared.fill_prepared(directory, **content)
        return prepared.write_prepared(path, **content, force=force)


@checked
def split_temporal(
    interactions: Interactions | Parts[Interactions],
    *,
    quantile: float = 0.95,
    test_history: TestHistory = "after-cut",
    **kept: Any,
) -> Split:
    """Train on users whose every event lies before one instant, and test on the others.

    The cut is the quantile of all timestamps (the nearest event's). Users with an event at or
    after it are test users, and nothing of theirs is trained on. The catalogue is what occurs in
    training: other items leave the test sequences. A test user's last event is the test target,
    the one before it the validation target; both lie at or after the cut.

    Args:
        interactions: The log, or its parts.
        quantile: The share of events before the cut, between 0 and 1.
        test_history: `after-cut` keeps a test user's events from the cut on, as the paper's code
            does; `full` keeps what the user did before it too, as history.
        kept: See `_assemble`.
    """
    if not 0 <= quantile <= 1:
        raise InputError(f"{named('quantile')} must lie between 0 and 1, got {quantile}")
    parts = _parts(interactions)
    cut = _nearest(parts, quantile)
    n_items = _n_items(parts)
    known = np.zeros(n_items, bool)
    n_test_users = n_enough = 0

    def test_users(part: Interactions) -> NDArray[np.bool_]:
        return _present(part.users[part.timestamps >= cut], len(part.user_ids))

    for part in parts:
        of_part = test_users(part)
        n_test_users += int(np.count_nonzero(of_part))
        known[part.items[~of_part.take(part.users)]] = True

    def divide(part: Interactions) -> tuple[Interactions, Interactions, list[Interactions]]:
        nonlocal n_enough
        of_test_users = test_users(part).take(part.users)
        test = part.where(of_test_users)
        late = test.timestamps >= cut
        # What the split leaves out, reason by reason; every row has at most one.
        early = ~late & (test_history == "after-cut")
        unknown = ~early & ~known.take(test.items)
        usable = ~early & ~unknown
        n_users = len(part.user_ids)
        enough = np.bincount(test.users[usable], minlength=n_users) >= MIN_EVALUATED
        enough &= np.bincount(test.users[usable & late], minlength=n_users) >= 2  # both targets
        n_enough += int(np.count_nonzero(enough))
        evaluated = usable & enough.take(test.users)
        left_out = [test.where(rows) for rows in (early, unknown, usable & ~evaluated)]
        return part.where(~of_test_users), test.where(evaluated), left_out

    moment = f"the cut at quantile {quantile} ({show_time(cut)})"
    after = " from the cut on" if test_history == "after-cut" else ", two of them from the cut on"
    required = f"{MIN_EVALUATED} known events{after}"
    users = plural(n_test_users, "user")
    one_out = named("split", "leave-one-out")
    if not known.any():
        raise InputError(
            f"no training users: all of the {users} have an event at or after "
            f"{moment}; raise {named('quantile')}, or use {one_out}"
        )
    reasons = [
        "events of test users before the cut: dropped",
        "test events on items not in training: dropped",
        f"test users without {required}: not evaluated",
    ]
    options = {"quantile": quantile, "test_history": test_history}
    split = _assemble("temporal", options, parts, divide, known, reasons, **kept)
    if not len(split.test):
        raise InputError(
            f"no test users: of the {users} with an event at or after {moment}, "
            f"none has {required}; lower {named('quantile')}, or use {one_out}"
        )
    *left_out, too_few = split.left_out
    too_few = replace(too_few, users=n_test_users - n_enough)  # some have no usable event
    some = left_out if test_history == "after-cut" else left_out[1:]
    return replace(split, left_out=(*some, too_few), cut=cut)


@checked
def split_leave_one_out(interactions: Interactions | Parts[Interactions], **kept: Any) -> Split:
    """Test on every user's last event, validate on the one before it, and train on the rest.

    The catalogue is every item of the log. Users with fewer than three events are trained on
    whole and not evaluated. `kept`: see `_assemble`.
    """
    parts = _parts(interactions)

    def lengths_of(part: Interactions) -> NDArray[np.int64]:
        return np.bincount(part.users, minlength=len(part.user_ids))

    def trained_rows(part: Interactions) -> NDArray[np.bool_]:
        lengths, trained = lengths_of(part), np.ones(len(part), bool)
        ends = np.cumsum(lengths)[lengths >= MIN_EVALUATED]
        trained[ends - 1] = trained[ends - 2] = False
        return trained

    n_items = _n_items(parts)
    catalogue, seen = np.zeros(n_items, bool), np.zeros(n_items, bool)
    n_users = most = 0
    for part in parts:
        lengths = lengths_of(part)
        n_users += int(np.count_nonzero(lengths))
        most = max(most, int(lengths.max(initial=0)))
        catalogue[part.items] = True
        seen[part.items[trained_rows(part)]] = True
    if most < MIN_EVALUATED:
        raise InputError(
            f"no test users: leave-one-out needs users with at least {MIN_EVALUATED} events, and "
            f"the most active of {plural(n_users, 'user')} has {most}"
        )
    unseen = catalogue & ~seen

    def divide(part: Interactions) -> tuple[Interactions, Interactions, list[Interactions]]:
        of_evaluated = (lengths_of(part) >= MIN_EVALUATED).take(part.users)
        left_out = [part.where(~of_evaluated), part.where(unseen.take(part.items))]
        return part.where(trained_rows(part)), part.where(of_evaluated), left_out

    reasons = [
        f"users with fewer than {MIN_EVALUATED} events: trained on whole, not evaluated",
        "items that occur only as targets: kept in the catalogue, never trained on",
    ]
    return _assemble("leave-one-out", {}, parts, divide, catalogue, reasons, **kept)


@checked
def split_none(interactions: Interactions | Parts[Interactions], **kept: Any) -> Split:
    """Train on everything, and test on nothing: for a model to use, once its settings are measured.

    `kept`: see `_assemble`.
    """
    parts = _parts(interactions)
    catalogue = np.zeros(_n_items(parts), bool)
    most = 0
    for part in parts:
        catalogue[part.items] = True
        most = max(most, int(np.bincount(part.users).max(initial=0)))
    if most < 2:
        raise InputError("nothing to train on: no user has two events")

    def divide(part: Interactions) -> tuple[Interactions, Interactions, list[Interactions]]:
        return part, part.where(np.zeros(len(part), bool)), []

    return _assemble("none", {}, parts, divide, catalogue, [], **kept)


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
    parts: Parts[Interactions],
    divide: Callable[[Interactions], tuple[Interactions, Interactions, list[Interactions]]],
    catalogue: NDArray[np.bool_],
    reasons: Sequence[str],
    *,
    everyone: Parts[Interactions] | None = None,
    directory: Path | None = None,
    times: bool = True,
) -> Split:
    """Number the users and items that remain, and lay the chosen rows out as sequences.

    `divide` gives the rows of a part to train on, those to test on, and those left out by reason.
    `everyone` has the same parts before filters, of which are the whole histories: `parts` by
    default. In `directory` the arrays of the result are written, to be mapped; by default they are
    in memory. `times` keeps the times of events.
    """
    arrays = GrowingArrays(directory)
    item_codes = np.cumsum(catalogue, dtype=np.int32) - np.int32(1)
    tallies = {name: TallyOfParts(len(catalogue)) for name in ("training", "test", *reasons)}
    n_users, n_everyone, n_events = 0, 0, {"train": 0, "test": 0, "whole": 0}
    for part, all_of_part in zip(parts, everyone or parts, strict=True):
        item_ids = part.item_ids
        train, test, left_out = divide(part)
        for tally, rows in zip(tallies.values(), (train, test, *left_out), strict=True):
            tally.add(rows)
        del left_out
        remaining = _present(train.users, len(part.user_ids))
        remaining[test.users] = True
        user_codes = np.cumsum(remaining, dtype=np.int32) + np.int32(n_users - 1)
        all_codes = np.arange(n_everyone, n_everyone + len(part.user_ids), dtype=np.int32)
        whole = _lacking(all_of_part, train, test, catalogue)
        for name, rows, codes in (
            ("train", train, user_codes),
            ("test", test, user_codes),
            ("whole", whole, all_codes),
        ):
            starts = np.flatnonzero(np.diff(rows.users, prepend=np.int32(-1)))
            if times:
                arrays.append(f"{name}_times", _since_first(rows.timestamps, starts))
            arrays.append(f"{name}_items", item_codes.take(rows.items))
            offsets = np.append(starts, len(rows)) + n_events[name]
            arrays.append(f"{name}_offsets", offsets, over=1)
            arrays.append(f"{name}_users", codes[rows.users[starts]])
            n_events[name] += len(rows)
        n_users += int(np.count_nonzero(remaining))
        n_everyone += len(part.user_ids)
        arrays.append_ids("user_ids", part.user_ids.take(np.flatnonzero(remaining)))
        arrays.append_ids("everyone", part.user_ids)
    training, test_tally, *others = (tally.tally(name) for name, tally in tallies.items())
    return Split(
        kind=kind,
        options=options,
        train=Sequences(**arrays.take("train")),
        test=Sequences(**arrays.take("test")),
        user_ids=Vocabulary.from_arrays(part.user_ids.kind, arrays.take("user_ids")),
        item_ids=item_ids.take(np.flatnonzero(catalogue)),
        everyone=Vocabulary.from_arrays(part.user_ids.kind, arrays.take("everyone")),
        whole=Sequences(**arrays.take("whole")),
        train_tally=training,
        test_tally=test_tally,
        left_out=tuple(others),
    )


def _since_first(timestamps: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Seconds since the first event of each sequence, of which 32 bits hold 68 years."""
    seconds = timestamps // _SECOND
    lengths = np.diff(starts, append=len(seconds))
    since = seconds - np.repeat(seconds[starts], lengths)
    return since.clip(max=np.iinfo(np.int32).max).astype(np.int32)


def _lacking(
    everyone: Interactions, train: Interactions, test: Interactions, catalogue: NDArray[np.bool_]
) -> Interactions:
    """Events with items of the catalogue, of users of whom the split's sequences have fewer."""
    size = len(everyone.user_ids)
    known = catalogue.take(everyone.items)
    counts = np.bincount(everyone.users[known], minlength=size)
    # A test sequence has what is trained on of its user, too.
    tested = np.bincount(test.users, minlength=size)
    there = np.where(tested > 0, tested, np.bincount(train.users, minlength=size))
    known &= (counts > there).take(everyone.users)
    return everyone.where(known)


def _nearest(parts: Parts[Interactions], quantile: float) -> int:
    """`np.quantile(timestamps, quantile, method="nearest")` over all parts, by counting digits."""
    rank = int(np.around((sum(map(len, parts)) - 1) * quantile))
    ends = [(int(p.timestamps.min()), int(p.timestamps.max())) for p in parts if len(p)]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    while low < high:
        shift = max(0, (high - low).bit_length() - _DIGIT_BITS)
        counts = np.zeros(((high - low) >> shift) + 1, np.int64)
        for part in parts:
            near = part.timestamps[(part.timestamps >= low) & (part.timestamps <= high)]
            # Without a sign: times may be farther apart than 63 bits hold.
            digits = (near.view(np.uint64) - np.uint64(low % 2**64)) >> np.uint64(shift)
            counts += np.bincount(digits.view(np.int64), minlength=len(counts))
        ends_of = np.cumsum(counts)
        digit = int(np.searchsorted(ends_of, rank, side="right"))
        rank -= int(ends_of[digit] - counts[digit])
        low, high = low + (digit << shift), min(high, low + ((digit + 1) << shift) - 1)
    return low


def _parts(interactions: Interactions | Parts[Interactions]) -> Parts[Interactions]:
    return [interactions] if isinstance(interactions, Interactions) else interactions


def _n_items(parts: Parts[Interactions]) -> int:
    return len(next(iter(parts)).item_ids)


def _present(codes: NDArray[np.int32], size: int) -> NDArray[np.bool_]:
    """True for those of the codes 0 .. size - 1 that occur."""
    present = np.zeros(size, bool)
    present[codes] = True
    return present
