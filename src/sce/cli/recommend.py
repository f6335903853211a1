"""`sce recommend`: from a trained run to items for users of the dataset, or for anybody."""

import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, TypeVar

import torch
from cyclopts import Parameter

from sce import __version__
from sce.cli import say
from sce.cli.lists import MAY_BE_STDIN, read_items, titles_for
from sce.cli.rows import Format, open_rows
from sce.data.lines import STDIN, name_of, parse_line, read_lines
from sce.data.prepared import MANIFEST
from sce.data.requests import list_ids
from sce.data.storage import new_digest
from sce.data.vocabulary import as_int64
from sce.errors import InputError
from sce.progress import ProgressDisplay
from sce.recommend import (
    BATCH_SIZE,
    BATCHES_TOGETHER,
    Id,
    Recommended,
    Recommender,
    Request,
    each_id,
    weights_file,
)
from sce.training.run import Run
from sce.units import plural

_EXAMPLES = 3  # of what was skipped
_SAVED_EVERY = 2048  # users, or more
_SAVED_AFTER = 10.0  # seconds, if so many users take longer
T = TypeVar("T")
_MEMBERS = {"user_id", "history", "k", "keep_seen", "allow", "block", "times"}


def recommend(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    users: Annotated[tuple[str, ...] | None, Parameter(consume_multiple=True)] = None,
    users_file: Annotated[Path | None, MAY_BE_STDIN] = None,
    histories: Annotated[Path | None, MAY_BE_STDIN] = None,
    data: Path | None = None,
    titles: Path | None = None,
    titles_columns: tuple[str, str] | None = None,
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 10,
    out: Path | None = None,
    format: Format | None = None,  # noqa: A002 - the name of the option
    keep_seen: bool = False,
    allow: Annotated[Path | None, MAY_BE_STDIN] = None,
    block: Annotated[Path | None, MAY_BE_STDIN] = None,
    device: str = "auto",
    batch_size: int = BATCH_SIZE,
    force: bool = False,
) -> None:
    """Recommend items: columns user_id, item_id, score, rank (from 1), source, and title if known.

    What a user of the log has had is not recommended again. Users without an item of the catalogue
    get the most popular ones, with "popular" instead of "model" as the source.

    Args:
        run: Directory that "sce train" wrote.
        users: Ids of users of the log. [default: all users]
        users_file: File with one user id a line; - is standard input.
        histories: Histories of any users instead: a line of JSON each, {"user_id": ..., "history":
            [item ids, oldest first]}; - is standard input. Without user_id, the line's number. A
            line may have wishes of its own: "allow": [item ids] and "block": [item ids], besides
            those for all, "k": 5, "keep_seen": true.
        data: The run's dataset, if it was moved. Histories need none.
        titles: File of item ids and titles, instead of those that "sce prepare" was given. An item
            without one has its id there.
        titles_columns: Its columns of ids and titles, if they have no usual names.
        k: How many items for each user.
        out: File to write: .csv, .jsonl (one line a user) or .parquet; the same command goes on
            where it was interrupted. [default: csv to standard output]
        format: Format of the output, if the file's name does not tell.
        keep_seen: Recommend items that the user has had before too.
        allow: File of the items that may be recommended, such as those in stock: one id a line, or
            a csv, jsonl or parquet file with a column item_id, or of another usual name such as
            sku, or named as "sce prepare" was told that of the log is; every row counts. - is
            standard input.
        block: Likewise, of items not to be recommended.
        device: auto, cpu, cuda or cuda:N.
        batch_size: Users at once.
        force: Replace the file that is there already, and begin anew.
    """
    _check_options(users, users_file, histories, data, [allow, block])
    opened = Run.open(run)
    recommender = Recommender.load(opened, device)
    if named_items := titles_for(opened.item_ids, titles, titles_columns):
        recommender = replace(recommender, titles=named_items)
    options: dict[str, Any] = {"k": k, "keep_seen": keep_seen, "batch_size": batch_size}
    lists: dict[str, Any] = {
        "allow": read_items(allow, "--allow", recommender.columns.item),
        "block": read_items(block, "--block", recommender.columns.item),
    }
    # Everything that can be refused is refused before the file is opened.
    total = None
    if histories is not None:
        account = Account("history", "histories", "none of their items is in the catalogue")
        lines_ = account.rest(read_lines(histories))
        source = _stream_requests(recommender, lines_, histories, options | lists)
    else:
        account = Account("user", "users", "they are not in the log")
        dataset = opened.load_dataset(data)
        chosen: Iterable[Id] = users or each_id(dataset.everyone)
        if users_file is not None:
            chosen = (text for _, text in read_lines(users_file))
        else:
            total = len(users or dataset.everyone)
        if dataset.user_ids.kind == "integer":
            chosen = (one if as_int64(one) is None else int(one) for one in chosen)
        source = recommender.stream_users(dataset, account.rest(chosen), **options, **lists)
    key = None
    given = [users_file, histories, allow, block, titles]
    if out is not None and STDIN not in given:
        content = None if histories is not None else dataset.path / MANIFEST.file
        files = [one for one in (weights_file(opened), content, *given) if one is not None]
        where = str(recommender.model.catalogue.device)
        which = [one is None for one in given]
        key = _key(files, users, which, options, where, format, titles_columns)
    # Rows are kept after so many users or seconds, and a whole number of batches.
    window = batch_size * BATCHES_TOGETHER
    saved_every, saved_at = -(-_SAVED_EVERY // window) * window, monotonic()
    # Not on a terminal that the rows themselves go to.
    on_screen = out is None and sys.stdout is not None and sys.stdout.isatty()
    display = ProgressDisplay(wanted=not on_screen)
    titled = recommender.titles is not None
    with display, open_rows(out, format, force=force, key=key, titles=titled) as rows:
        if rows.state is not None:
            vars(account).update(rows.state)
            display.print(f"sce: going on after {account.given:,} {account.many}")
        for user, found in source:
            account.count(user, found)
            if found.known or found.items:
                rows.add(user, found)
            display.update("recommending", account.given, total, account.many)
            late = monotonic() - saved_at >= _SAVED_AFTER
            if account.given % (batch_size if late else saved_every) == 0:
                rows.save(asdict(account))
                saved_at = monotonic()
        lines = account.conclude()
    if out is not None:
        served = plural(account.given - account.left_out, "user")
        lines.append(f"wrote {plural(account.rows, 'row')} for {served}")
    for line in lines:
        say(line)


def _stream_requests(
    recommender: Recommender, lines: Iterable[tuple[int, str]], path: Path, options: dict[str, Any]
) -> Iterator[tuple[Id, Recommended]]:
    """Recommend for lines of JSON, as they come."""
    waiting: deque[Id] = deque()  # users whose histories are being ranked

    def each_request() -> Iterator[Request]:
        for number, text in lines:
            try:
                user, request = _parse(text, number)
            except ValueError as error:
                raise InputError(f"{name_of(path)}, line {number}: {error}") from error
            waiting.append(user)
            yield replace(request, where=f"{name_of(path)}, line {number}")

    found = recommender.stream(each_request(), **options)
    return ((waiting.popleft(), one) for one in found)


def _parse(line: str, number: int) -> tuple[Id, Request]:
    """User and request of a line of JSON; without a user, the line's number."""
    record = parse_line(line, _MEMBERS)
    if not isinstance(record, dict) or not isinstance(record.get("history"), list):
        raise ValueError(f'expected {{"user_id": ..., "history": [item ids]}}, got {line:.80}')
    given = record.pop("user_id", None)
    [user] = list_ids([number if given is None else given], "user_id")
    str(user).encode()  # half a surrogate pair could be read, but not written
    return user, Request(**record)


def _key(files: Iterable[Path], *others: object) -> str | None:
    """A digest of all that decides about the rows; None where a file can be read but once."""
    digest = new_digest(json.dumps([__version__, torch.__version__, *others], default=str).encode())
    for path in files:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, new_digest).digest())
    return digest.hexdigest()


def _check_options(
    users: Sequence[str] | None,
    users_file: Path | None,
    histories: Path | None,
    data: Path | None,
    lists: Sequence[Path | None],
) -> None:
    given = {"--users": users, "--users-file": users_file, "--histories": histories}
    if users is not None and not users:
        raise InputError("--users names nobody; leave it out for all users of the dataset")
    if users and Path(users[0]).suffix and Path(users[0]).is_file():
        raise InputError(f"--users takes ids, and {users[0]} is a file: --users-file {users[0]}")
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} exclude each other; choose one")
    if histories is not None and data is not None:
        raise InputError("--histories needs no dataset; leave out --data")
    from_stdin = [users_file, histories, *lists].count(STDIN)
    if from_stdin > 1:
        raise InputError("standard input can be read but once; name files instead of the other -")
    if from_stdin and sys.stdin is None:
        raise InputError("standard input is closed; name a file instead of -")


@dataclass
class Account:
    """Counts and examples of what was skipped or came out short."""

    one: str
    many: str
    why_not: str
    given: int = 0
    rows: int = 0
    popular: int = 0
    left_out: int = 0
    examples: list[str] = field(default_factory=list)
    short: int = 0
    fewest: int = 0
    unknown: dict[str, tuple[int, list[Id]]] = field(default_factory=dict)
    """By what they are of: how many items are not in the catalogue, and the first of them."""

    def rest(self, given: Iterable[T]) -> Iterator[T]:
        """Those that are still to be counted, once iterating begins."""
        yield from islice(given, self.given, None)

    def count(self, user: Id, found: Recommended) -> None:
        """Count one user."""
        self.given += 1
        popular, history = found.source == "popular", self.one == "history"
        named = not found.known and (history or not popular)
        if named and len(self.examples) < _EXAMPLES:
            items = _examples(found.unknown, len(found.unknown)) or "empty"
            self.examples.append(f"{user}: {items}" if history else str(user))
        self.popular += popular
        self.left_out += not (found.known or popular)
        self.rows += len(found)
        if len(found) < found.asked and (found.known or popular):
            self.fewest = min(self.fewest, len(found)) if self.short else len(found)
            self.short += 1
        lists = {"histories": found.unknown, "lists of histories": found.unlisted}
        for what, some in lists.items() if found.known else ():
            number, first = self.unknown.get(what, (0, []))
            self.unknown[what] = number + len(some), [*first, *some][:_EXAMPLES]

    def conclude(self) -> list[str]:
        """Return lines on what was skipped; refuse when there was nothing that could be used."""
        if not self.given:
            raise InputError(f"there are no {self.many}: the input is empty")
        history = self.one == "history"
        named = self.left_out + (self.popular if history else 0)
        who = _examples(self.examples, named, "; " if history else ", ")
        left_out = f"{self._plural(self.given)}: {self.why_not} ({who})"
        if self.left_out == self.given:
            raise InputError(f"nothing to recommend for {left_out}")
        lines = [f"skipped {self.left_out:,} of {left_out}"] if self.left_out else []
        if self.popular:
            which = f" ({who})" if history else ""
            lines.append(
                f"the most popular items for {self.popular:,} of {self._plural(self.given)}, "
                f"marked so: none of their items is in the catalogue{which}"
            )
        if self.short:
            lines.append(
                f"{self.short:,} of {self._plural(self.given - self.left_out)} got fewer items "
                f"than were asked for, the fewest {self.fewest:,}: the others they may not get "
                "(allow, block), or have had before and get with --keep-seen alone"
            )
        return lines + [
            f"skipped {plural(number, 'item')} of {what}, not in the catalogue "
            f"({_examples(first, number)})"
            for what, (number, first) in self.unknown.items()
            if number
        ]

    def _plural(self, count: int) -> str:
        return f"{count:,} {self.one if count == 1 else self.many}"


def _examples(some: Sequence[object], all_: int, separator: str = ", ") -> str:
    shown = some[:_EXAMPLES]
    return separator.join(map(str, shown)) + (" ..." if all_ > len(shown) else "")
