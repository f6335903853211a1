"""Progress on stderr: a bar on a terminal, else a line per epoch."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from sce.progress import PipedConsole
from sce.training.device import PeakMemory
from sce.units import show_clock

_REFRESH_SECONDS = 0.5


class ProgressBar:
    """Shows progress on stderr; silent when not wanted, or once stderr cannot be written.

    `on_lost` is called when the reader of stderr went away.
    """

    def __init__(
        self,
        *,
        wanted: bool,
        epochs: int,
        memory: PeakMemory,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        self._console = PipedConsole(stderr=True, highlight=False, quiet=not wanted)
        self._epochs, self._memory, self._on_lost = epochs, memory, on_lost
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._score = ""
        self._shown = 0.0
        if wanted and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[facts]}"),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )

    def __enter__(self) -> "ProgressBar":
        if self._bar is not None:
            with self._surviving():
                self._bar.start()
                self._task = self._bar.add_task("starting", total=None, facts="")
            if self._console.quiet:
                self._bar = None  # half-started: it cannot be stopped either
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with self._surviving():
                self._bar.stop()

    @property
    def due(self) -> bool:
        """True if what is shown has become old."""
        return time.monotonic() - self._shown > _REFRESH_SECONDS

    def step(self, epoch: int, step: int, of: int, loss: float, seconds_left: float) -> None:
        """Show the progress of the epoch."""
        facts = f"loss {loss:.4f}  {self._score}{self._memory.peak():,.0f} MiB"
        facts += f"  {show_clock(seconds_left)} left"
        self._show(f"epoch {epoch}/{self._epochs}", step, of, facts)

    def evaluating(self, what: str, users: int, of: int) -> None:
        """Show the progress of an evaluation."""
        self._show(f"evaluating {what}", users, of, f"{users:,} of {of:,} users")

    def epoch(self, record: Mapping[str, Any], seconds_left: float) -> None:
        """Leave a line about a finished epoch."""
        words = [f"epoch {record['epoch']}/{self._epochs}", f"loss {record['loss']:.4f}"]
        if record["validation"] is not None:
            score = f"ndcg@10 {record['validation']['ndcg@10']:.4f}"
            self._score = score + "  "
            words.append(score + (" *" if record["best"] else "  "))
        words.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        words.append(f"{record['memory_mib']['training']:,.0f} MiB")
        seconds = record["seconds"]
        words.append(f"{seconds['training']:.1f} s")
        if record["validation"] is not None:
            words[-1] += f" + {seconds['evaluation']:.1f} s evaluation"
        if record["epoch"] < self._epochs:
            words.append(f"at most {show_clock(seconds_left)} left")
        self._print("  ".join(words))

    def note(self, text: str) -> None:
        """Leave a line."""
        self._print(f"sce: {text}")

    def _show(self, description: str, done: int, total: int, facts: str) -> None:
        self._shown = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=description, completed=done, total=total, facts=facts
            )
            with self._surviving():
                self._bar.refresh()

    def _print(self, line: str) -> None:
        with self._surviving():
            self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Fall silent where stderr cannot be written: that is no reason to lose a training."""
        try:
            yield
        except OSError as error:
            self._console.quiet = True
            if isinstance(error, BrokenPipeError):
                self._on_lost()
