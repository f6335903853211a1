"""What the workers of benchmarks/train_workers.py share: the log, and the clock."""

import importlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]


class Log:
    """Training sequences and test histories, without the target, in catalogue indices."""

    def __init__(self, data: str) -> None:
        stored = {part: self._ragged(Path(data), part) for part in ("train", "test")}
        self.train_users, self.train = stored["train"]
        self.users, self.whole = stored["test"]
        self.histories = [items[:-1] for items in self.whole]
        counts = [len(items) for items in self.train]
        self.targets = sum(counts) - len(counts)

    @staticmethod
    def _ragged(data: Path, part: str) -> tuple[Codes, list[Codes]]:
        load = {
            name: np.load(data / f"{part}_{name}.npy") for name in ("items", "offsets", "users")
        }
        items = np.split(load["items"].astype(np.int64), load["offsets"][1:-1])
        return load["users"].astype(np.int64), items

    def rows(self, codes: Codes) -> Codes:
        """Where users of these codes stand among the test users."""
        return np.searchsorted(self.users, codes)


class Clock:
    """Times at which steps or epochs begin, and the peak of memory until then.

    Steps are those of a run with a number of steps: the calls of a module of the model to train.
    Whole epochs have a mark before the first and after each.
    """

    def __init__(self, job: Any) -> None:
        self.limit: int | None = job.steps and job.warm_up + job.steps + 1
        self.seconds, self.cuda = job.seconds, job.device == "cuda"
        self.begun: list[float] = []
        self.marks: list[float] = []
        self.peak_mib = 0.0

    def watch(self, module: Any, *, stop: bool = False) -> None:
        """Note when this module is called; with `stop`, end the loop that takes no limit."""

        def tick(module: Any, _: Any) -> None:
            if module.training:
                self.begun.append(time.perf_counter())
                self.peak_mib = self.peak()
                if stop and len(self.begun) == self.limit:
                    raise Enough

        if self.limit:
            module.register_forward_pre_hook(tick)

    def mark(self, *, less: float = 0.0) -> None:
        """Note that an epoch begins or has ended, and what was no training in it."""
        if self.cuda:
            import_("torch").cuda.synchronize()
        self.marks.append(time.perf_counter() - less)
        self.peak_mib = max(self.peak_mib, self.peak())

    @property
    def over(self) -> bool:
        """True if two epochs or more have been trained, and the seconds for them are over."""
        return bool(len(self.marks) > 2 and self.marks[-1] - self.marks[0] > self.seconds)

    def peak(self) -> float:
        """Peak so far: of what torch allocated on the GPU, or of this process."""
        if self.cuda:
            return float(import_("torch").cuda.max_memory_allocated() / 2**20)
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Enough(Exception):  # noqa: N818
    """Training has made the steps that were asked for."""


def import_(name: str) -> Any:
    """Import a module that only some interpreters have."""
    return importlib.import_module(name)
