"""Names of the columns of users, items, times and titles, and finding them in a table."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from sce.errors import InputError, named

USER, ITEM, TIME = "user_id", "item_id", "timestamp"

# Compared without case, "_", "-", "." and blanks: "userid" stands for userId, User_ID, "user id".
ALIASES = {
    "user": "userid user uid userkey customerid customer visitorid visitor memberid member "
    "accountid clientid personid profileid reviewerid sessionid session buyerid shopperid",
    "item": "itemid item iid itemkey productid product asin parentasin sku articleid article "
    "movieid movie businessid trackid songid artistid bookid gameid videoid newsid "
    "locationid venueid poiid recipeid beerid clickarticleid contentid listingid offerid",
    "time": "timestamp time ts datetime date eventtime eventtimestamp createdat createtime "
    "unixreviewtime unixtime unixtimestamp clicktimestamp visittime ratingtime occurredat",
    "title": "title itemtitle producttitle movietitle booktitle tracktitle songtitle articletitle "
    "name itemname productname prodname artistname trackname gamename displayname headline label",
}


class Columns(NamedTuple):
    """Names of the three columns that matter; None: found by its usual names."""

    user: str | None = None
    item: str | None = None
    time: str | None = None

    def or_else(self, other: "Columns") -> "Columns":
        """These names, and where there is none that of another."""
        pairs = zip(self, other, strict=True)
        return Columns(*(theirs if mine is None else mine for mine, theirs in pairs))


class TitleColumns(NamedTuple):
    """Names of the columns of a file of titles; None: found by its usual names."""

    item: str | None = None
    title: str | None = None


class ItemColumn(NamedTuple):
    """The column of a list of items: with the log's name of them, else found by its usual names."""

    item: str | None = None


UnitName: TypeAlias = Literal["s", "ms", "us", "ns"]  # of times that are numbers
AnyColumns: TypeAlias = Columns | TitleColumns | ItemColumn
BY_NAME = Columns()
CONVERT = "convert it first, for instance with iconv -f WINDOWS-1252 -t UTF-8"
NO_TIME = "\x00none"  # as the time's column: the rows are in order


def find_columns(found: Sequence[str], given: AnyColumns, where: Path) -> tuple[str, ...]:
    """Names of the columns: as given, else by their usual names; or all that is wrong with them."""
    if isinstance(given, ItemColumn) and given.item not in found:
        given = ItemColumn()
    chosen: list[str] = []
    absent, unlike, several = list[str](), list[str](), list[str]()
    for role, name in given._asdict().items():
        if name == NO_TIME:
            continue
        [option] = _options(given, role)
        matches = [name]
        if name is None:
            matches = usual_columns(role, found)
            if not matches and role == "item" and not isinstance(given, Columns):
                matches = [one for one in found if fold(one) == "id"]  # the file is about items
        if name is not None and name not in found:
            absent.append(f"no column {name!r} ({option})")
        elif not matches:
            unlike.append(role)
        elif len(matches) > 1:
            several.append(
                f"the columns {_listed(matches)} could all be the {role}; choose one with {option}"
            )
        chosen += matches
    if absent or unlike:
        several = [*absent, *_unlike(unlike, found, given), *several]
    if several:
        raise InputError(f"{where}: {'; '.join(several)}")
    if len(set(chosen)) < len(chosen):
        raise InputError(
            f"{where}: {', '.join(given._fields)} must be different columns; got "
            f"{_listed(chosen)} ({', '.join(_options(given, *given._fields))})"
        )
    return tuple(chosen)


def _options(given: AnyColumns, *roles: str) -> list[str]:
    """The options, or whatever else, that name columns."""
    if isinstance(given, Columns):
        return [named(f"{role}_column") for role in roles]
    if isinstance(given, TitleColumns):
        return [named("titles_columns", "ITEM TITLE", python='titles_columns=("item", "title")')]
    return ["the header item_id, or write one id a line into a .txt file"]


def _unlike(roles: Sequence[str], found: Sequence[str], given: AnyColumns) -> Iterator[str]:
    """Say for which roles no column was found, which there are, and what to do."""
    if roles:
        yield f"no column looks like the {' or the '.join(roles)}"
    values = roles and any(column[:1].isdigit() for column in found)
    looks = " (these look like values; is the header line missing?)" if values else ""
    yield f"its columns are {_listed(found)}{looks}{_hint(found)}"
    if roles:
        options = " and ".join(_options(given, *roles))
        rows = f", or take the rows as in order with {named('order', 'rows')}"
        ones = "one" if len(roles) == 1 else "ones"
        yield f"name the right {ones} with {options}{rows if 'time' in roles else ''}"


def usual_columns(role: str, found: Sequence[str]) -> list[str]:
    """Columns with a usual name of this role."""
    return [name for name in found if fold(name) in ALIASES[role].split()]


def fold(name: str) -> str:
    """A column's name without case, "_", "-", "." and blanks."""
    return "".join(c for c in name.lower() if c not in "_-. ")


def encoding_hint(text: str) -> str:
    """What to do with text that was read as UTF-8 and is of another encoding."""
    if "\x00" in text:
        return "; is it UTF-16? Convert it first: iconv -f UTF-16 -t UTF-8"
    return f"; it is not UTF-8: {CONVERT}" if "\ufffd" in text else ""


def _hint(found: Sequence[str]) -> str:
    other = next((mark for mark in ";|\t" if len(found) == 1 and mark in found[0]), None)
    separated = f"; separated by {other!r}? Write it with commas, as csv has them" if other else ""
    return separated + encoding_hint("".join(found))


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(repr, names[:20])) + more
