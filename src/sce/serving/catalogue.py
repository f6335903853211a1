"""What is served: an engine, its titles and its search, and where the next version comes from."""

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.serving.engine import Engine, Found, Id, Request
from sce.serving.exported import MANIFEST
from sce.serving.search import Search

Work = Request | Callable[["Catalogue"], Any]
_OF_RUN = ("run.json", "best.safetensors")
Named = dict[str, Any]  # an item: its id, its title if it has one, its score


@dataclass(frozen=True)
class Catalogue:
    """An engine and its search; it never changes."""

    engine: Engine
    search: Search

    @classmethod
    def of(cls, engine: Engine, titles: Path | None = None) -> "Catalogue":
        """Hold an engine in memory, whatever becomes of its files, and try it once."""
        item_ids, named = _copy(engine.item_ids), engine.titles and _copy(engine.titles)
        if titles is not None:
            named = read_titles(titles, item_ids)
        table = np.array(engine.table)
        engine = replace(engine, table=table, item_ids=item_ids, titles=named)
        engine.recommend([Request([item_ids[0]], k=1)])
        return cls(engine, Search(item_ids, named))

    def answer(self, works: Sequence[Work]) -> list[Any]:
        """Do works together; what one raises is its own result."""
        results: dict[int, Any] = {}
        asked = {n: work for n, work in enumerate(works) if isinstance(work, Request)}
        try:
            results = dict(zip(asked, self.recommend([*asked.values()]), strict=True))
        except Exception:
            asked.clear()  # one of them; which, is found out one by one
        for number, work in enumerate(works):
            if number not in results:
                results[number] = self._attempt(work)
        return [results[number] for number in range(len(works))]

    def _attempt(self, work: Work) -> Any:
        try:
            return self.recommend([work])[0] if isinstance(work, Request) else work(self)
        except Exception as error:
            return error

    def recommend(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Answers to requests; never more items than there are."""
        most = self.engine.n_items
        found = self.engine.recommend(
            [one if one.k <= most else replace(one, k=most) for one in requests]
        )
        version = self.engine.version
        return [
            {"items": items, "known": one.known, "unknown": one.unknown, "version": version}
            for one, items in zip(found, self.named(found), strict=True)
        ]

    def similar(self, item: Id, k: int) -> list[Named]:
        """The items that are most like one."""
        (items,) = self.named([self.engine.similar(item, min(k, self.engine.n_items))])
        return items

    def find(self, query: str, k: int) -> list[Named]:
        """The items whose title or id has the query."""
        codes = self.search.find(query, k)
        return [_named(*pair) for pair in self._with_titles(self.engine.item_ids.decode(codes))]

    def named(self, found: Sequence[Found]) -> list[list[Named]]:
        """Items with titles and scores; the titles of all are looked up at once."""
        pairs = iter(self._with_titles([*chain.from_iterable(one.items for one in found)]))
        return [[_named(*next(pairs), score) for score in one.scores.tolist()] for one in found]

    def _with_titles(self, ids: Sequence[Id]) -> list[tuple[Id, str]]:
        titles = self.engine.titles
        if titles is None:
            return [(item, "") for item in ids]
        named = titles.decode(self.engine.item_ids.lookup(ids))
        return [(item, str(title)) for item, title in zip(ids, named, strict=True)]


def _named(item: Id, title: str, score: float | None = None) -> Named:
    named: Named = {"item": item}
    if title:
        named["title"] = title
    if score is not None:
        named["score"] = score
    return named


def _copy(ids: Vocabulary) -> Vocabulary:
    copies = {name: np.array(array) for name, array in ids.arrays().items()}
    return Vocabulary.from_arrays(ids.kind, copies)


def read_titles(path: Path, item_ids: Vocabulary) -> Vocabulary:
    """Titles by catalogue index, from a csv file with the columns item_id and title."""
    titles = [b""] * len(item_ids)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if not {"item_id", "title"} <= {*(rows.fieldnames or ())}:
                raise InputError(f"{path} needs a first line with the columns item_id and title")
            pairs = [(row["item_id"], row["title"] or "") for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read titles from {path}: {error}") from error
    for code, (_, title) in zip(item_ids.lookup([item for item, _ in pairs]), pairs, strict=True):
        if code >= 0:
            titles[code] = title.encode()
    if pairs and not any(titles):
        raise InputError(f"no item_id of {path} is in the catalogue")
    lengths = np.fromiter(map(len, titles), np.int64, len(titles))
    return Vocabulary.from_sorted_text(b"".join(titles), lengths)


@dataclass(frozen=True)
class Source:
    """An export, or a run that is exported whenever it is loaded."""

    path: Path
    titles: Path | None = None

    @property
    def is_run(self) -> bool:
        """True unless it is an export."""
        return not (self.path / MANIFEST.file).exists() and (self.path / "run.json").exists()

    def load(self) -> Catalogue:
        """The version that is there now.

        Raises:
            InputError: When it cannot be served.
        """
        if not self.is_run:
            return Catalogue.of(Engine.load(self.path), self.titles)
        with TemporaryDirectory(prefix="sce-export-") as place:
            export = Path(place) / "export"
            # In a process of its own: torch takes memory, and the threads of this one.
            command = [sys.executable, "-m", "sce", "export", str(self.path), "--out", str(export)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise InputError(lines[-1].removeprefix("sce: error: "))
            return Catalogue.of(Engine.load(export), self.titles)

    def state(self) -> object:
        """Something that changes when what is served does; None while it is being replaced."""
        try:
            names = _OF_RUN if self.is_run else [file.name for file in self.path.iterdir()]
            files = [self.path / name for name in sorted(names)]
            stats = [file.stat() for file in (*files, *filter(None, [self.titles]))]
        except OSError:
            return None
        return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in stats]
