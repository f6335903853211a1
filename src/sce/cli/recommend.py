"""`sce recommend`: from a trained run to items for users of the dataset, or for anybody."""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from cyclopts import Parameter
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sce.cli.output import Format, open_rows
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.recommend import BATCH_SIZE, Id, Recommended, Recommender
from sce.training.run import Run

STDIN = Path("-")
_LOOKED_UP_AT_ONCE = 4096
_EXAMPLES = 3  # of what was skipped
_TOLD_EVERY = 100  # users
_MAY_BE_STDIN = Parameter(allow_leading_hyphen=True)


def recommend(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    users: Annotated[tuple[str, ...] | None, Parameter(consume_multiple=True)] = None,
    users_file: Annotated[Path | None, _MAY_BE_STDIN] = None,
    histories: Annotated[Path | None, _MAY_BE_STDIN] = None,
    data: Path | None = None,
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 10,
    out: Path | None = None,
    format: Format | None = None,  # noqa: A002 - the name of the option
    keep_seen: Annotated[bool, Parameter(show_default=False)] = False,
    device: str = "auto",
    batch_size: int = BATCH_SIZE,
    force: Annotated[bool, Parameter(show_default=False)] = False,
) -> None:
    """Recommend items: columns user_id, item_id, score, rank, the rank from 1.

    Args:
        run: Directory that "sce train" wrote.
        users: Ids of users of the dataset. [default: all users]
        users_file: File with one user id a line; - is standard input.
        histories: Histories of any users instead: a line of JSON each, {"user_id": ..., "history":
            [item ids, oldest first]}; - is standard input. Without user_id, the line's number.
        data: The run's dataset, if it was moved. Histories need none.
        k: How many items for each user.
        out: File to write: .csv, .jsonl or .parquet. [default: csv to standard output]
        format: Format of the output, if the file's name does not tell.
        keep_seen: Recommend items that the user has had before too.
        device: auto, cpu, cuda or cuda:N.
        batch_size: Users at once.
        force: Replace the file that is there already.
    """
    _check_options(users, users_file, histories, data)
    opened = Run.open(run)
    recommender = Recommender.load(opened, device)
    options: dict[str, Any] = {"k": k, "keep_seen": keep_seen, "batch_size": batch_size}
    # Everything that can be refused is refused before the file is opened.
    if histories is not None:
        account = Account("history", "histories", "none of their items is in the catalogue", k)
        source, total = _from_histories(recommender, histories, options), None
    else:
        account = Account("user", "users", "they are not in the dataset", k)
        dataset = opened.load_dataset(data)
        chosen = _chosen_users(users, users_file, dataset.user_ids)
        source = recommender.stream_users(dataset, chosen, **options)
        total = len(users) if users else None if users_file else len(dataset.user_ids)
    with open_rows(out, format, force=force) as rows:
        with _progress(account.many, total, quiet=out is None) as advance:
            for user, found in source:
                account.count(user, found)
                if found.known:
                    rows.add(user, found)
                advance(account.given)
        account.check()
    account.tell()


def _check_options(
    users: Sequence[str] | None,
    users_file: Path | None,
    histories: Path | None,
    data: Path | None,
) -> None:
    given = {"--users": users, "--users-file": users_file, "--histories": histories}
    if users is not None and not users:
        raise InputError("--users names nobody; leave it out for all users of the dataset")
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise InputError(f"{' and '.join(names)} exclude each other; choose one")
    if histories is not None and data is not None:
        raise InputError("--histories needs no dataset; leave out --data")


@dataclass
class Account:
    """What became of what was given."""

    one: str
    many: str
    why_not: str
    k: int
    given: int = 0
    left_out: int = 0
    left_out_examples: list[str] = field(default_factory=list)
    short: int = 0
    fewest: int = 0
    unknown: int = 0
    unknown_examples: list[Id] = field(default_factory=list)

    def count(self, user: Id, found: Recommended) -> None:
        """Take note of one user."""
        self.given += 1
        if not found.known:
            self.left_out += 1
            if len(self.left_out_examples) < _EXAMPLES:
                items = _examples(found.unknown[:_EXAMPLES], len(found.unknown)) or "empty"
                self.left_out_examples.append(
                    f"{user}: {items}" if self.one == "history" else str(user)
                )
            return
        if len(found) < self.k:
            self.fewest = min(self.fewest, len(found)) if self.short else len(found)
            self.short += 1
        if found.unknown:
            self.unknown += len(found.unknown)
            self.unknown_examples += found.unknown[: _EXAMPLES - len(self.unknown_examples)]

    def check(self) -> None:
        """Refuse when there was nothing at all that could be used."""
        if not self.given:
            raise InputError(f"there are no {self.many}: the input is empty")
        if self.left_out == self.given:
            raise InputError(
                f"nothing to recommend for {self._of_given(self.given)}: {self.why_not} "
                f"({self._who()})"
            )

    def tell(self) -> None:
        """Say on standard error what was skipped."""
        if self.left_out:
            print(
                f"sce: skipped {self.left_out:,} of {self._of_given(self.given)}: {self.why_not} "
                f"({self._who()})",
                file=sys.stderr,
            )
        if self.short:
            ranked = self.given - self.left_out
            print(
                f"sce: {self.short:,} of {self._of_given(ranked)} got fewer than {self.k:,} items, "
                f"the fewest {self.fewest:,}: the rest of the catalogue they have had before "
                "(--keep-seen recommends that too)",
                file=sys.stderr,
            )
        if self.unknown:
            others = "other " if self.left_out else ""
            one = self.unknown == 1
            print(
                f"sce: skipped {self.unknown:,} item{'' if one else 's'} in the {others}histories "
                f"that {'is' if one else 'are'} not in the catalogue "
                f"({_examples(self.unknown_examples, self.unknown)})",
                file=sys.stderr,
            )

    def _who(self) -> str:
        separator = "; " if self.one == "history" else ", "
        return _examples(self.left_out_examples, self.left_out, separator)

    def _of_given(self, count: int) -> str:
        return f"{count:,} {self.one if count == 1 else self.many}"


def _examples(some: Sequence[object], all_: int, separator: str = ", ") -> str:
    return separator.join(str(one) for one in some) + (" ..." if all_ > len(some) else "")


def _from_histories(
    recommender: Recommender, path: Path, options: dict[str, Any]
) -> Iterator[tuple[Id, Recommended]]:
    waiting: deque[Id] = deque()  # users whose histories are being ranked

    def each_history() -> Iterator[list[Id]]:
        with _open_lines(path) as lines:
            for user, history in read_histories(lines, _name(path)):
                waiting.append(user)
                yield history

    found = recommender.stream(each_history(), **options)
    return ((waiting.popleft(), one) for one in found)


def read_histories(lines: Iterable[bytes], name: str) -> Iterator[tuple[Id, list[Id]]]:
    """Read lines of JSON, {"user_id": ..., "history": [...]}; blank ones are passed over.

    Args:
        lines: The lines.
        name: Where they come from, for messages.

    Raises:
        InputError: When a line is something else; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _parse(line, number)
            except ValueError as error:
                raise InputError(f"{name}, line {number}: {error}") from error


def _parse(line: bytes, number: int) -> tuple[Id, list[Id]]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except RecursionError as error:
        raise ValueError("not a history: nested too deeply") from error
    expected = 'expected {"user_id": ..., "history": [item ids]}'
    if not isinstance(record, dict):
        raise ValueError(f"{expected}, got {_kind(record)}")
    history = record.get("history")
    if not isinstance(history, list):
        what = f"history is {_kind(history)}" if "history" in record else "there is no history"
        raise ValueError(f"{expected}, but {what}")
    for item in history:
        if type(item) not in (int, str):
            raise ValueError(f"item ids are integers or strings, got {_kind(item)} in history")
    user = record.get("user_id")
    if user is None:
        return number, history
    if type(user) not in (int, str):
        raise ValueError(f"user_id must be an integer or a string, got {_kind(user)}")
    str(user).encode()  # half a surrogate pair could be read, but not written
    return user, history


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"the number {value}")


def _chosen_users(
    users: Sequence[str] | None, users_file: Path | None, user_ids: Vocabulary
) -> Iterator[Id] | None:
    if users_file is None and not users:
        return None

    def each_id() -> Iterator[str]:
        if users_file is None:
            yield from users or ()
            return
        with _open_lines(users_file) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    message = f"{_name(users_file)}, line {number}: not UTF-8"
                    raise InputError(message) from error
                if text.strip():
                    yield text

    return _own_ids(each_id(), user_ids)


def _own_ids(given: Iterator[str], user_ids: Vocabulary) -> Iterator[Id]:
    """Turn text into the dataset's own ids, which may be integers; unknown ones stay text."""
    while texts := list(islice(given, _LOOKED_UP_AT_ONCE)):
        codes = user_ids.lookup(texts)
        known = iter(user_ids.decode(codes[codes >= 0]))
        pairs = zip(codes, texts, strict=True)
        yield from (next(known) if code >= 0 else text for code, text in pairs)


@contextmanager
def _open_lines(path: Path) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    with file:
        yield file


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


@contextmanager
def _progress(noun: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, unless the rows themselves go to it."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or (quiet and sys.stdout.isatty()):
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn(noun), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(noun, total=total)

        def tell(done: int) -> None:
            if done % _TOLD_EVERY == 0:
                bar.update(task, completed=done)

        yield tell
