"""`sce datasets`: the datasets of the paper, where to get them, how to prepare them."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from sce.cli.output import output_console, plain_table
from sce.data.formats import FORMATS


@dataclass(frozen=True)
class Dataset:
    """A published log of interactions."""

    name: str
    users: int
    items: int
    interactions: int
    counted: str  # what the three numbers count
    page: str  # where its owners publish it
    file: str
    options: str  # how `sce prepare` reads, filters and splits the file
    note: str = ""

    @property
    def command(self) -> str:
        """The command that prepares it."""
        out = "data/" + self.name.lower().replace(" ", "-")
        return f"sce prepare {self.file} {self.options} --out {out}"


_FILTERED = "after the paper's filter"
DATASETS = (
    Dataset(
        "BeerAdvocate", 7_606, 22_307, 1_409_494, _FILTERED,
        "https://data.world/socialmediadata/beeradvocate",
        "beer_reviews.csv", "--format beeradvocate --preset paper",
        "The collectors withdrew their own copy at BeerAdvocate's request. Reviews without a "
        "profile name are left out and counted.",
    ),
    Dataset(
        "Behance", 8_097, 32_434, 546_284, _FILTERED,
        "https://cseweb.ucsd.edu/~jmcauley/datasets.html#behance",
        "Behance_appreciate_1M.gz", "--format behance --preset paper",
    ),
    Dataset(
        "Kindle Store", 23_684, 96_830, 1_256_065, _FILTERED,
        "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        "ratings_Kindle_Store.csv", "--format amazon-ratings --preset paper",
        "The paper does not say which edition. That of 2018 has the item first: use "
        "--format amazon-ratings-2018 for it.",
    ),
    Dataset(
        "Yelp", 42_429, 137_039, 2_294_804, _FILTERED,
        "https://www.yelp.com/dataset",
        "yelp_academic_dataset_review.json", "--format yelp --preset paper",
        "Yelp replaces the file from time to time, and the counts change with it.",
    ),
    Dataset(
        "Gowalla", 27_516, 173_511, 2_627_663, _FILTERED,
        "https://snap.stanford.edu/data/loc-Gowalla.html",
        "loc-gowalla_totalCheckins.txt.gz", "--format gowalla --preset paper",
    ),
    Dataset(
        "Amazon Beauty", 22_363, 12_101, 198_502, "as published (5-core)",
        "https://cseweb.ucsd.edu/~jmcauley/datasets/amazon/links.html",
        "reviews_Beauty_5.json.gz", "--format amazon-reviews --split leave-one-out",
        "For the paper's comparison with recent models, which is leave-one-out.",
    ),
    Dataset(
        "MovieLens-1M", 6_040, 3_706, 1_000_209, "as published",
        "https://grouplens.org/datasets/movielens/1m/",
        "ratings.dat", "--format movielens-1m --preset paper",
        "In the paper's figure of memory against catalogue size; small and quick to try.",
    ),
)  # fmt: skip


def datasets(*, as_json: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """List the paper's datasets, where their owners publish them, and how to prepare each.

    Args:
        as_json: Write JSON, for programs.
    """
    if as_json:
        rows = [asdict(dataset) | {"command": dataset.command} for dataset in DATASETS]
        print(json.dumps(rows, indent=2))
        return
    console = output_console()
    table = plain_table("dataset")
    for heading in ("users", "items", "interactions"):
        table.add_column(heading, justify="right")
    table.add_column("counted")
    for dataset in DATASETS:
        counts = (dataset.users, dataset.items, dataset.interactions)
        table.add_row(dataset.name, *(f"{count:,}" for count in counts), dataset.counted)
    console.print(table)
    console.print("\nDownload a file from its owners' page, under their terms; then prepare it:")
    for dataset in DATASETS:
        console.print(f"\n[bold]{dataset.name}[/bold]")
        for line in filter(None, (dataset.page, dataset.command, dataset.note)):
            console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print("\nWhat --format knows (the first four also by the file's ending):\n")
    for known in FORMATS.values():
        console.print(f"  {known.name:<20}{known.about}", soft_wrap=True, markup=False)
