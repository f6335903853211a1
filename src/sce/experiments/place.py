"""The directory of one or more sweeps.

    DIR/rows.jsonl         a row for each run that came to an end
    DIR/sweeps/NAME.json   which runs and figures belong to a settings file
    DIR/runs/NAME/         what `sce train` wrote; NAME.toml its settings, NAME.log what it said,
                           NAME.legs.json how long it took before it was stopped
    DIR/data/NAME/         synthetic datasets
    DIR/items/             the item ids of the runs, each kept once
    DIR/.lock              held while a sweep, or a run that it left behind, is at work

Sweeps that share a directory share the runs they have in common.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sce.data.storage import check_writable, write_text
from sce.errors import InputError
from sce.experiments.rows import ROWS
from sce.experiments.views import View
from sce.training.run import NO_WEIGHTS

FORMAT, VERSION = "sce sweep", 1
# What a run says from then on when somebody asks for its weights.
_REMOVED = (
    "sce sweep removed them when the run ended, as it does without --keep-weights; to have them, "
    "sweep with it into another --out"
)


@dataclass(frozen=True)
class Sweep:
    """What a settings file asked for, as the comparison needs it."""

    name: str
    title: str
    keys: tuple[str, ...]
    """Of its runs."""
    views: tuple[View, ...]
    measure: str = "training"
    file: str = ""
    """The settings file; empty: not known."""
    variant: str = ""
    """Changes with whatever makes runs other ones, but for data and seeds; empty: not known."""


@dataclass(frozen=True)
class Place:
    """The directory, whether it is there or not."""

    path: Path

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.path / ROWS

    @property
    def runs(self) -> Path:
        """The directory of runs."""
        return self.path / "runs"

    @property
    def data(self) -> Path:
        """The directory of synthetic datasets."""
        return self.path / "data"

    def check(self) -> None:
        """Refuse a place where no sweep can be.

        Raises:
            InputError: When something else is there.
        """
        check_writable(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; name a directory for the sweep")
        strange = self.path.is_dir() and any(self.path.iterdir()) and not self._of_sweep()
        if strange:
            raise InputError(
                f"{self.path} holds other things than a sweep; choose another directory"
            )

    def make(self) -> None:
        """Make it, unless it is there.

        Raises:
            InputError: When something else is there.
        """
        self.check()
        for folder in (self.runs, self.path / "sweeps", self.path / "items"):
            folder.mkdir(parents=True, exist_ok=True)

    def _of_sweep(self) -> bool:
        return self.rows.exists() or any(
            (self.path / name).is_dir() for name in ("sweeps", "runs", "data")
        )

    def write_sweep(self, sweep: Sweep) -> int:
        """Remember what a settings file asks for; return how many runs are no part of it any more.

        The same settings on other data or with other seeds are added to those before.

        Raises:
            InputError: When another file of the same name has been here.
        """
        file = self.path / "sweeps" / f"{sweep.name}.json"
        before = _read_sweep(file, views=False) if file.exists() else replace(sweep, keys=())
        keys, gone = list(sweep.keys), 0
        if before.variant in ("", sweep.variant):
            keys = list(dict.fromkeys([*before.keys, *keys]))
        elif before.file not in ("", sweep.file):
            raise InputError(
                f"{self.path} has runs of {before.file}, with other settings under the same name; "
                "give the file another name, or choose another --out"
            )
        else:
            gone = len(set(before.keys) - set(keys))
        content = {
            "format": FORMAT,
            "version": VERSION,
            "name": sweep.name,
            "title": sweep.title,
            "measure": sweep.measure,
            "figures": [view.as_dict() for view in sweep.views],
            "file": sweep.file,
            "variant": sweep.variant,
            "keys": keys,
        }
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
        partial.replace(file)
        return gone

    def read_sweeps(self) -> list[Sweep]:
        """What was asked for here, by name.

        Raises:
            InputError: When this is not the directory of a sweep.
        """
        if not self.path.is_dir():
            raise InputError(f"{self.path} does not exist; make it with: sce sweep FILE --out ...")
        files = sorted((self.path / "sweeps").glob("*.json"))
        if not files:
            raise InputError(
                f"{self.path} is not of a sweep: it has no sweeps/*.json, which say what was asked "
                "for; sce sweep FILE --out ... writes them, also beside rows that are there"
            )
        return [_read_sweep(file) for file in files]

    def lock(self, patience: float = 0.0) -> int | None:
        """Hold the directory; return a descriptor that every run holds too.

        Args:
            patience: Seconds to wait while a run that an earlier sweep left is saving.

        Raises:
            InputError: When another sweep, or what it left running, holds it.
        """
        try:
            import fcntl
        except ImportError:
            return None  # Windows
        until = time.monotonic() + patience
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.2)
                    continue
                os.close(descriptor)
                raise InputError(
                    f"another sweep is at work in {self.path}, or a run that it left is still "
                    "saving; wait for it, or choose another directory"
                ) from error

    def trim(self, directory: Path, *, weights: bool) -> None:
        """Make a run that ended small: no weights, no state, and item ids that it shares.

        Args:
            directory: Of the run.
            weights: Keep the weights of the best epoch.
        """
        (directory / "resume.safetensors").unlink(missing_ok=True)
        if weights:
            return
        manifest, best = directory / "run.json", directory / "best.safetensors"
        try:
            content = json.loads(manifest.read_bytes())
            files = dict(content["files"])
        except (OSError, ValueError, KeyError, TypeError):
            best.unlink(missing_ok=True)  # perhaps it failed because its directory is damaged
            return
        if best.exists():
            content[NO_WEIGHTS] = _REMOVED  # first: a mark too early does no harm
            write_text(manifest, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
            best.unlink()
        for name, written in files.items():
            # Runs on one dataset have the same ids: megabytes each, for a large catalogue.
            file, shared = directory / name, self.path / "items" / f"{written['blake2b']}.npy"
            with suppress(OSError):  # not every file system has links
                if shared.exists() and not shared.samefile(file):
                    twin = file.with_name(f".{name}.link")
                    twin.unlink(missing_ok=True)
                    os.link(shared, twin)
                    twin.replace(file)
                elif not shared.exists():
                    os.link(file, shared)


def _read_sweep(file: Path, *, views: bool = True) -> Sweep:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{file} is not of a sweep")
    if content.get("version") != VERSION:
        raise InputError(f"{file} has version {content.get('version')}; this sce reads {VERSION}")
    try:
        figures = tuple(View.read(view) for view in content["figures"] if views)
    except InputError as error:
        raise InputError(f"{file}: {error}; mend the settings file and sweep again") from error
    return Sweep(
        name=content["name"],
        title=content["title"],
        keys=tuple(content["keys"]),
        views=figures,
        measure=content["measure"],
        file=content.get("file", ""),
        variant=content.get("variant", ""),
    )
