"""Progress of long work on stderr: a bar on a terminal, elsewhere a line now and then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from sce.units import show_clock, show_digits

_REFRESH_SECONDS = 0.5  # of a bar
_FIRST_LINE_SECONDS, _LINE_SECONDS = 10.0, 30.0  # where there is none


class PipedConsole(Console):
    """A console whose reader may go away: that raises BrokenPipeError, as it does with print."""

    def on_broken_pipe(self) -> None:
        """Let the error under way go on: rich would end the process as if something had failed."""
        raise


class ProgressDisplay:
    """Shows how far work is; silent when not wanted, or once stderr cannot be written."""

    def __init__(
        self,
        *,
        wanted: bool = True,
        animated: bool = False,
        on_lost: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a display, which begins with the `with` block.

        An `animated` bar is redrawn between calls: for long steps that report nothing meanwhile.
        `on_lost` is called when the reader of stderr went away.
        """
        self._console = PipedConsole(stderr=True, highlight=False, emoji=False)
        self._console.quiet = not wanted
        self._on_lost = on_lost
        self._bar: Progress | None = None
        self._doing, self._begun, self._first = "", 0.0, 0
        self._next = monotonic() + _FIRST_LINE_SECONDS
        if wanted and self._console.is_terminal:
            self._next = 0.0
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[facts]}", markup=False),
                console=self._console,
                transient=True,
                auto_refresh=animated,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            with self._surviving():
                self._bar.start()
                self._bar.add_task("starting", total=None, facts="")
            if self._console.quiet:
                self._bar = None  # half-started: it cannot be stopped either
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with self._surviving():
                self._bar.stop()

    @property
    def due(self) -> bool:
        """True if the next update will be shown: for callers to whom its facts cost something."""
        return not self._console.quiet and monotonic() >= self._next

    def update(
        self,
        doing: str,
        done: int = 0,
        total: int | None = None,
        unit: str = "",
        *,
        facts: str = "",
        left: float | None = None,
    ) -> None:
        """Report progress, as often as one likes: it is shown twice a second, or as a line.

        Of the step that is being done, so much of the total is, in units such as "users". The rate,
        of which the seconds left follow by default, is counted from its first update on.
        """
        now, new = monotonic(), doing != self._doing
        if new:
            self._doing, self._begun, self._first = doing, now, done
        if not (self.due or (new and self._bar is not None)):
            return
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        if left is None and total is not None and rate > 0:
            left = (total - done) / rate
        amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        words = [
            f"{amount} {unit}".strip() if done else "",
            f"{show_digits(rate)}/s" if rate > 0 else "",
            facts,
            "" if left is None else f"{show_clock(left)} left",
        ]
        text = "  ".join(word for word in words if word)
        if self._bar is None:
            self.print(f"sce: {doing}: {text}" if text else f"sce: {doing}")
            return
        self._next = now + _REFRESH_SECONDS
        self._bar.update(TaskID(0), description=doing, completed=done, total=total, facts=text)
        with self._surviving():
            self._bar.refresh()

    def step(self, doing: str) -> None:
        """Begin a step of which no more will be heard: without a bar it has a line of its own."""
        if self._bar is None:
            self.print(f"sce: {doing}")
        self.update(doing)

    def print(self, line: str) -> None:
        """Leave a line, above the bar."""
        if self._bar is None:
            self._next = monotonic() + _LINE_SECONDS
        with self._surviving():
            self._console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Fall silent where stderr cannot be written: that is no reason to lose the work."""
        try:
            yield
        except OSError as error:
            self._console.quiet = True
            if isinstance(error, BrokenPipeError):
                self._on_lost()
