"""What is served: an engine, its search and its users, and where the next version comes from."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np

from sce.data.prepared import MANIFEST as PREPARED
from sce.data.prepared import PreparedDataset
from sce.data.requests import Id, Recommended, Request
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.serving.asking import OfUser
from sce.serving.engine import Engine
from sce.serving.exported import MANIFEST
from sce.serving.ranking import Codes
from sce.serving.search import Search

Work = Request | Callable[["Catalogue"], Any]
NO_USERS = (
    "this server knows no users: give their history instead of a user, or start it with "
    "--data DIR, the dataset of the run"
)
_OTHER = (
    "export a run on what is here now, prepare the log of that one into the same directory "
    "(sce prepare --force), or start the server with another --data"
)
_OF_RUN = ("run.json", "best.safetensors")
_LOOK = 0.2  # seconds between looks whether an export is still wanted
Named = dict[str, Any]  # an item: its id, its title if it has one, its score


@dataclass(frozen=True)
class Catalogue:
    """An engine, its search and its users; it never changes."""

    engine: Engine
    search: Search
    users: PreparedDataset | None = None
    state: tuple[object, object] = (None, ())
    """That of its source before it was loaded: files that are replaced meanwhile have another."""

    @classmethod
    def of(cls, engine: Engine) -> "Catalogue":
        """Hold an engine in memory, whatever becomes of its files, and try it once."""
        item_ids, named = _copy(engine.item_ids), engine.titles and _copy(engine.titles)
        table, counts = np.array(engine.table), engine.popularity
        counts = None if counts is None else np.array(counts)
        engine = replace(engine, table=table, item_ids=item_ids, titles=named, popularity=counts)
        engine.recommend([Request([item_ids[0]], k=1)])
        return cls(engine, Search(item_ids, named))

    def answer(self, works: Sequence[Work]) -> list[Any]:
        """Do works together; what one raises is its own result."""
        found: dict[int, Any] = {}
        asked = {n: work for n, work in enumerate(works) if not callable(work)}
        with suppress(Exception):  # of one of them; which, is found out one by one
            found = dict(zip(asked, self.recommend([*asked.values()]), strict=True))
        return [found[n] if n in found else self._attempt(work) for n, work in enumerate(works)]

    def _attempt(self, work: Work) -> Any:
        try:
            return work(self) if callable(work) else self.recommend([work])[0]
        except Exception as error:
            return error

    def recommend(self, asked: Sequence[Request]) -> list[dict[str, Any]]:
        """Answers to requests; never more items than there are."""
        users = [one.user for one in asked if isinstance(one, OfUser)]
        if users and self.users is None:
            raise InputError(NO_USERS)
        timed, most, version = self.engine.uses_times, self.engine.n_items, self.engine.version
        known = iter(known_of(self.users, users, times=timed) if self.users else ())
        asked = [replace(one, **next(known)) if isinstance(one, OfUser) else one for one in asked]
        found = self.engine.recommend([replace(one, k=min(one.k or 10, most)) for one in asked])
        return [
            {"items": items, "source": one.source, "known": one.known}
            | {"unknown": one.unknown, "ignored": one.unlisted, "version": version}
            for one, items in zip(found, self.named(found), strict=True)
        ]

    def similar(self, item: Id, k: int) -> list[Named]:
        """The items that are most like one."""
        (items,) = self.named([self.engine.similar(item, min(k, self.engine.n_items))])
        return items

    def find(self, query: str, k: int) -> list[Named]:
        """The items whose title or id has the query."""
        return self._titled(self.engine.item_ids.decode(self.search.find(query, k)))

    def named(self, found: Sequence[Recommended]) -> list[list[Named]]:
        """Items with titles and scores; the titles of all are looked up at once."""
        items = iter(self._titled([*chain.from_iterable(one.items for one in found)]))
        return [[next(items) | {"score": one} for one in some.scores.tolist()] for some in found]

    def _titled(self, ids: Sequence[Id]) -> list[Named]:
        engine = self.engine
        titles = engine.titles and engine.titles.decode(engine.item_ids.lookup(ids))
        pairs = zip(ids, titles or [""] * len(ids), strict=True)
        return [{"item": item} | ({"title": str(title)} if title else {}) for item, title in pairs]


def known_of(
    dataset: PreparedDataset, users: Sequence[Id], *, times: bool
) -> Iterator[dict[str, Any]]:
    """The history of each user, of a `Request`, and its times; none of one not in the log."""
    codes = dataset.everyone.lookup(users)
    found, seconds = dataset.histories(codes), [None] * len(users)
    if times:
        seconds = [some.tolist() for some in dataset.histories(codes, "times")]
    ids = iter(dataset.item_ids.decode(np.concatenate([*found, np.empty(0, np.int32)])))
    for events, at in zip(found, seconds, strict=True):
        yield {"history": [next(ids) for _ in events], "times": at}


def _copy(ids: Vocabulary) -> Vocabulary:
    copies = {name: np.array(array) for name, array in ids.arrays().items()}
    return Vocabulary.from_arrays(ids.kind, copies)


@dataclass(frozen=True)
class Source:
    """An export, or a run that is exported whenever it is loaded."""

    path: Path
    files: tuple[Path, ...] = ()
    """That belong to it: of titles, and of what is offered."""
    data: Path | None = None
    """The dataset of its run, whose users may be asked for; of a run, its own if it is there."""
    index: bool | None = None
    """Search approximately: see `Engine.load`."""
    read_titles: Callable[[Vocabulary], Vocabulary | None] = lambda item_ids: None
    """Titles by catalogue index, from the file; None for those of the export."""
    read_offered: Callable[[Vocabulary], Codes | None] = lambda item_ids: None
    """Indices of the items that may be recommended, from files; None for all."""
    ended: Event = field(default_factory=Event)
    """Set when nothing is to be loaded any more: an export that is under way is given up."""

    @property
    def is_run(self) -> bool:
        """True unless it is an export."""
        return not (self.path / MANIFEST.file).exists() and (self.path / "run.json").exists()

    def load(self) -> Catalogue:
        """The version that is there now; refused where it cannot be served."""
        state = self.state()
        if not self.is_run:
            engine = Engine.load(self.path, index=self.index)
            users = None if self.data is None else _users_of(self.data, *engine.dataset)
            return self._catalogue(engine, users, state)
        users = self._users_of_run()  # which may be refused: before what takes long
        with TemporaryDirectory(prefix="sce-export-") as place:
            export = Path(place) / "export"
            self._export(export)
            return self._catalogue(Engine.load(export, index=self.index), users, state)

    def read_again(self, catalogue: Catalogue) -> Catalogue:
        """A version that was loaded, with titles and what is offered as files have them now."""
        state = catalogue.state[0], self.state()[1]
        return self._catalogue(catalogue.engine, catalogue.users, state)

    def _export(self, out: Path) -> None:
        """Export the run in a process of its own: torch takes memory, and the threads of this."""
        command = [sys.executable, "-m", "sce", "export", str(self.path), "--out", str(out)]
        command += ["--index"] if self.index else []
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **streams, text=True) as process:
            said = None
            try:
                while said is None:
                    with suppress(subprocess.TimeoutExpired):
                        said = process.communicate(timeout=_LOOK)[1]
                    if self.ended.is_set():
                        process.kill()
            finally:
                process.kill()
        if process.returncode:
            lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
            raise InputError(lines[-1].removeprefix("sce: error: "))

    def _catalogue(
        self, engine: Engine, users: PreparedDataset | None, state: tuple[object, object]
    ) -> Catalogue:
        titles = self.read_titles(engine.item_ids)
        named = engine if titles is None else replace(engine, titles=titles)
        offered = self.read_offered(engine.item_ids)
        return replace(Catalogue.of(replace(named, offered=offered)), users=users, state=state)

    def _users_of_run(self) -> PreparedDataset | None:
        """Those of its dataset; none if that is not where it was, unless it was given."""
        try:
            trained = json.loads((self.path / "run.json").read_bytes())["dataset"]
            of_run = trained["content_hash"], trained.get("times", "")
            return _users_of(self.data or Path(trained["path"]), *of_run)
        except InputError:
            if self.data is not None:
                raise
        except (OSError, ValueError, KeyError, TypeError):  # which the export refuses
            pass
        return None

    def state(self) -> tuple[object, object]:
        """What changes with the version, and with its `files`; None while they are replaced."""
        return _stats(self._of_version()), _stats(self.files)

    def _of_version(self) -> Iterator[Path]:
        names = _OF_RUN if self.is_run else [file.name for file in self.path.iterdir()]
        yield from (self.path / name for name in sorted(names))
        if self.data:
            yield self.data / PREPARED.file


def _users_of(path: Path, content: str | None, times: str) -> PreparedDataset:
    """Open the dataset that an export's run was trained on, given the hashes of what it is."""
    dataset = PreparedDataset.load(path)
    dataset.check_content(content, times, "what is served", _OTHER)
    return dataset


def _stats(files: Iterable[Path]) -> object:
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)
