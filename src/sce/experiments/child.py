"""A run in a process of its own, so that its peak memory is its own too."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sce.experiments.plan import PlannedRun, to_toml

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_PATIENCE = 120.0  # seconds to save in, before a process is ended for good


class Child:
    """The process of a run, writing into `RUNS/NAME` and telling into `RUNS/NAME.log`."""

    def __init__(self, run: PlannedRun, runs: Path, *, anew: bool, lock: int | None) -> None:
        """Start it, or go on with it where it was stopped.

        Args:
            run: What to run.
            runs: The directory of all runs.
            anew: Do not go on, but start again.
            lock: A descriptor to hold for as long as it lives.
        """
        self.run, self.directory = run, runs / run.name
        self.log = runs / f"{run.name}.log"
        self._legs = _legs_file(run, runs)
        before = {} if anew else _read_legs(self._legs)
        self.at_once = 1
        self._at_once_before = int(before.get("at_once", 1))
        self._seconds_before = float(before.get("seconds", 0.0))
        self.begun = time.monotonic()
        self._asked: float | None = None  # when it was asked to stop
        settings = runs / f"{run.name}.toml"
        settings.write_text(to_toml(run.config), encoding="utf-8")
        with self.log.open("ab") as log:
            self._silent_until = log.tell()  # what was said before is of an earlier attempt
            self._process = subprocess.Popen(
                _command(run, settings, self.directory, anew=anew),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the sweep: it tells its runs, once.
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
                preexec_fn=_dies_with(os.getpid()),
            )

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop."""
        return self._asked is not None

    @property
    def seconds(self) -> float:
        """Since it began, and before, if it goes on from where it was stopped."""
        return self._seconds_before + time.monotonic() - self.begun

    @property
    def most_at_once(self) -> int:
        """How many ran beside it, itself included, at most: now, and before."""
        return max(self.at_once, self._at_once_before)

    def remember_leg(self) -> None:
        """Write down how long it took so far, for when it goes on."""
        taken = {"seconds": self.seconds, "at_once": self.most_at_once}
        self._legs.write_text(json.dumps(taken), encoding="utf-8")

    def forget_legs(self) -> None:
        """It has come to its end."""
        self._legs.unlink(missing_ok=True)

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self._asked is not None and time.monotonic() - self._asked > _PATIENCE:
            self._process.kill()
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to save and end; a second time does nothing."""
        if self._asked is None:
            self._asked = time.monotonic()
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def said(self, letters: int = 20_000) -> str:
        """The end of its output."""
        with self.log.open("rb") as file:
            file.seek(max(self._silent_until, self.log.stat().st_size - letters))
            return file.read().decode(errors="replace")


def can_resume(directory: Path) -> bool:
    """Say whether a run left a state to go on from."""
    return (directory / "resume.safetensors").exists()


def seconds_done(run: PlannedRun, runs: Path) -> float:
    """How long a run has been at work before, as far as it can go on from there."""
    if not can_resume(runs / run.name):
        return 0.0
    return float(_read_legs(_legs_file(run, runs)).get("seconds", 0.0))


def _legs_file(run: PlannedRun, runs: Path) -> Path:
    return runs / f"{run.name}.legs.json"


def _read_legs(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _command(run: PlannedRun, settings: Path, directory: Path, *, anew: bool) -> list[str]:
    data = str(run.dataset.prepared.path)
    shared = [data, "--config", str(settings), "--out", str(directory)]
    if run.measure == "steps":
        module = ["-m", "sce.experiments.steps"]
        return [sys.executable, *module, *shared, "--steps", str(run.steps)]
    return [sys.executable, "-m", "sce", "train", *shared, "--force" if anew else "--resume"]


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What a child does first: ask to be told to stop when the sweep is gone, however it went."""
    if sys.platform != "linux":
        return None
    ask = ctypes.CDLL(None).prctl  # found here: between fork and exec little is allowed

    def arrange() -> None:
        ask(_DIE_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)  # it went before we asked

    return arrange
