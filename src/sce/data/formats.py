"""What the files look like: general layouts, the published datasets' own, and columns' names."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from sce.errors import InputError


class Columns(NamedTuple):
    """The names of the three columns that matter; None where none is known."""

    user: str | None = None
    item: str | None = None
    time: str | None = None


BY_NAME = Columns()  # all three are found by their usual names


@dataclass(frozen=True)
class Format:
    """How to read a file, and where in it the user, the item and the time stand."""

    name: str
    layout: Literal["csv", "jsonl", "parquet"]
    about: str
    separator: str = ","
    quote: str | None = '"'
    fields: tuple[str, ...] | None = None  # csv without a header line: the names of its fields
    columns: Columns = BY_NAME
    drop_incomplete: bool = False  # the owners' file has rows without user, item or time


FORMATS = {
    known.name: known
    for known in [
        Format("csv", "csv", "comma-separated values with a header line"),
        Format("tsv", "csv", "tab-separated values with a header line", separator="\t"),
        Format("jsonl", "jsonl", "one JSON object per line"),
        Format("parquet", "parquet", "Apache Parquet"),
        Format(
            "gowalla",
            "csv",
            "Gowalla check-ins of SNAP: loc-gowalla_totalCheckins.txt",
            separator="\t",
            quote=None,
            fields=("user", "check-in time", "latitude", "longitude", "location id"),
            columns=Columns("user", "location id", "check-in time"),
        ),
        Format(
            "beeradvocate",
            "csv",
            "BeerAdvocate reviews: beer_reviews.csv",
            columns=Columns("review_profilename", "beer_beerid", "review_time"),
            drop_incomplete=True,  # some hundred reviews have no profile name
        ),
        Format(
            "behance",
            "csv",
            "Behance appreciations: Behance_appreciate_1M",
            separator=" ",
            quote=None,
            fields=("user_id", "item_id", "timestamp"),
        ),
        Format(
            "amazon-ratings",
            "csv",
            "Amazon ratings of 2014, user first: ratings_*.csv",
            fields=("user", "item", "rating", "timestamp"),
        ),
        Format(
            "amazon-ratings-2018",
            "csv",
            "Amazon ratings of 2018, item first: Kindle_Store.csv and the like",
            fields=("item", "user", "rating", "timestamp"),
        ),
        Format(
            "amazon-reviews",
            "jsonl",
            "Amazon reviews of 2014 and 2018: reviews_*.json",
            columns=Columns("reviewerID", "asin", "unixReviewTime"),
        ),
        Format(
            "yelp",
            "jsonl",
            "Yelp reviews: yelp_academic_dataset_review.json",
            columns=Columns("user_id", "business_id", "date"),
        ),
        Format(
            "movielens-1m",
            "csv",
            "MovieLens-1M ratings: ratings.dat",
            # Fields are separated by "::"; read as ":", every second field is empty.
            separator=":",
            quote=None,
            fields=("UserID", "-", "MovieID", "--", "Rating", "---", "Timestamp"),
        ),
    ]
}

ENDINGS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
COMPRESSIONS = (".gz", ".zst")

# Compared without case, "_", "-", "." and blanks: "userid" stands for userId, User_ID, "user id".
ALIASES = {
    "user": "userid user uid userkey customerid customer visitorid visitor memberid member "
    "accountid clientid personid profileid reviewerid sessionid session buyerid shopperid",
    "item": "itemid item iid itemkey productid product asin parentasin sku articleid article "
    "movieid movie businessid trackid songid artistid bookid gameid videoid newsid "
    "locationid venueid poiid recipeid beerid clickarticleid contentid listingid offerid",
    "time": "timestamp time ts datetime date eventtime eventtimestamp createdat createtime "
    "unixreviewtime unixtime unixtimestamp clicktimestamp visittime ratingtime occurredat",
}


def choose_format(path: Path, name: str = "auto") -> Format:
    """The format of this name, or with "auto" the one that the file's name tells.

    Raises:
        InputError: When there is no such format, or the file's name tells none.
    """
    if name != "auto":
        if name not in FORMATS:
            raise InputError(f"no format {name!r}; there are auto, {', '.join(FORMATS)}")
        chosen = FORMATS[name]
    else:
        ending = Path(_without_compression(path.name)).suffix.lower()
        if ending not in ENDINGS:
            raise InputError(
                f"{path}: its name does not tell the format; known endings are "
                f"{', '.join(ENDINGS)}, all but parquet also with {' or '.join(COMPRESSIONS)}; "
                f"or say it with --format, one of {', '.join(FORMATS)}"
            )
        chosen = FORMATS[ENDINGS[ending]]
    if chosen.layout == "parquet" and path.name != _without_compression(path.name):
        command = "gunzip" if path.suffix.lower() == ".gz" else "unzstd"
        raise InputError(
            f"{path}: a parquet file is compressed inside and cannot be read through "
            f"{path.suffix}; decompress it first: {command} {shlex.quote(str(path))}"
        )
    return chosen


def find_columns(found: Sequence[str], given: Columns, where: Path) -> tuple[str, str, str]:
    """The user, item and time columns among those found: as given, else by their usual names.

    Raises:
        InputError: When one is missing, or several could be meant.
    """
    user, item, time = (
        _find(role, found, name, where) for role, name in zip(Columns._fields, given, strict=True)
    )
    if len({user, item, time}) < 3:
        raise InputError(
            f"{where}: user, item and time must be three columns; got {user!r}, {item!r} and "
            f"{time!r} (--user-column, --item-column, --time-column)"
        )
    return user, item, time


def fold(name: str) -> str:
    """A column's name without what people write differently."""
    return "".join(c for c in name.lower() if c not in "_-. ")


def _find(role: str, found: Sequence[str], given: str | None, where: Path) -> str:
    option = f"--{role}-column"
    if given is not None:
        if given not in found:
            raise InputError(
                f"{where}: no column {given!r} ({option}); its columns are {_listed(found)}"
            )
        return given
    matches = [name for name in found if fold(name) in ALIASES[role].split()]
    if not matches:
        values = any(name[:1].isdigit() for name in found)
        raise InputError(
            f"{where}: no column looks like the {role}; its columns are {_listed(found)}"
            + (" (these look like values; is the header line missing?)" if values else "")
            + f"; name the right one with {option}"
        )
    if len(matches) > 1:
        raise InputError(
            f"{where}: the columns {_listed(matches)} could all be the {role}; "
            f"choose one with {option}"
        )
    return matches[0]


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:20]]
    more = [f"and {len(names) - 20} more"] if len(names) > 20 else []
    return ", ".join(shown + more)


def _without_compression(name: str) -> str:
    for ending in COMPRESSIONS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name
