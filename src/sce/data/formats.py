"""File formats: general layouts, and those of published datasets."""

import glob
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sce.data.columns import BY_NAME, Columns
from sce.errors import InputError, named


@dataclass(frozen=True)
class Format:
    """Layout of a file and the names of its columns."""

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
        Format("gowalla", "csv", "Gowalla check-ins of SNAP: loc-gowalla_totalCheckins.txt",
               separator="\t", quote=None,
               fields=("user", "check-in time", "latitude", "longitude", "location id"),
               columns=Columns("user", "location id", "check-in time")),
        Format("beeradvocate", "csv", "BeerAdvocate reviews: beer_reviews.csv",
               columns=Columns("review_profilename", "beer_beerid", "review_time"),
               drop_incomplete=True),  # some hundred reviews have no profile name
        Format("behance", "csv", "Behance appreciations: Behance_appreciate_1M",
               separator=" ", quote=None, fields=("user_id", "item_id", "timestamp")),
        Format("amazon-ratings", "csv", "Amazon ratings of 2014, user first: ratings_*.csv",
               fields=("user", "item", "rating", "timestamp")),
        Format("amazon-ratings-2018", "csv",
               "Amazon ratings of 2018, item first: Kindle_Store.csv and the like",
               fields=("item", "user", "rating", "timestamp")),
        Format("amazon-reviews", "jsonl", "Amazon reviews of 2014 and 2018: reviews_*.json",
               columns=Columns("reviewerID", "asin", "unixReviewTime")),
        Format("yelp", "jsonl", "Yelp reviews: yelp_academic_dataset_review.json",
               columns=Columns("user_id", "business_id", "date")),
        # Fields are separated by "::"; read as ":", every second field is empty.
        Format("movielens-1m", "csv", "MovieLens-1M ratings: ratings.dat", separator=":",
               quote=None,
               fields=("UserID", "-", "MovieID", "--", "Rating", "---", "Timestamp")),
    ]
}  # fmt: skip

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


def choose_format(path: Path, name: str = "auto") -> Format:
    """The format of this name; with "auto", by the ending of the file's name."""
    compression = path.suffix.lower() if path.name.lower().endswith(COMPRESSIONS) else ""
    if name == "auto":
        ending = Path(path.name[: -len(compression) or None]).suffix.lower()
        if ending in (".xlsx", ".xls", ".ods"):
            raise InputError(f"{path}: a workbook is not read; save its sheet as csv")
        if ending not in ENDINGS:
            raise InputError(
                f"{path}: its name does not tell the format; known endings are "
                f"{', '.join(ENDINGS)}, all but parquet also with {' or '.join(COMPRESSIONS)}; "
                f"or say it with {named('format')}, one of {', '.join(FORMATS)}"
            )
        name = ENDINGS[ending]
    elif name not in FORMATS:
        raise InputError(f"no format {name!r}; there are auto, {', '.join(FORMATS)}")
    if FORMATS[name].layout == "parquet" and compression:
        command = "gunzip" if compression == ".gz" else "unzstd"
        raise InputError(
            f"{path}: a parquet file is compressed inside and cannot be read through "
            f"{path.suffix}; decompress it first: {command} {shlex.quote(str(path))}"
        )
    return FORMATS[name]


def find_files(paths: str | Path | Sequence[Any]) -> list[Path]:
    """Files that paths and patterns name, each only once."""
    files: dict[Path, Path] = {}  # by what links lead to
    for given in [paths] if isinstance(paths, str | Path) else paths:
        if not isinstance(given, str | Path):
            what = f"a list that holds {type(given).__name__}"
            raise InputError(f"expected files or a data frame; got {what}")
        try:
            path = Path(given).expanduser()
            if path.is_dir():
                raise InputError(
                    f"{given} is a directory; name the files in it with a pattern such as "
                    f"'{path / '*.csv'}'"
                )
        except (OSError, RuntimeError) as error:  # too long, not allowed; ~ of nobody
            raise InputError(f"{given}: {getattr(error, 'strerror', error)}") from error
        matched = [path]
        if not path.exists():
            if not any(sign in str(given) for sign in "*?["):
                raise InputError(f"{given}: no such file")
            names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - may be absolute
            matched = sorted(match for match in map(Path, names) if match.is_file())
            if not matched:
                raise InputError(f"no file matches the pattern {str(given)!r}")
        for file in matched:
            if str(file).encode(errors="ignore").decode() != str(file):
                raise InputError(f"{str(file)!a} is no name in UTF-8; rename the file")
            if not file.is_file():
                raise InputError(
                    f"{file} is a pipe or a device, and a log is read more than once; write it to "
                    "a file first"
                )
            if file.resolve() in files:
                raise InputError(f"{file} is named twice; its rows would count twice")
            files[file.resolve()] = file
    if not files:
        raise InputError("no input file was given")
    return [*files.values()]
