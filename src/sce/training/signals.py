"""Ctrl-C, SIGTERM, SIGHUP and SIGXCPU while training, or writing rows: the state is saved first."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which imports torch
    from sce.distributed.ranks import Ranks

_SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU")]
_AGREE_EVERY = 16  # batches of a step: then all ranks know of a signal that one of them got
BROKEN_PIPE = 13  # the number of SIGPIPE, which Python turns into an error


class Interrupted(KeyboardInterrupt):
    """A signal came. It is a `KeyboardInterrupt`, so that what should end with Ctrl-C does."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after this signal."""
        return 128 + self.signal_number


class TrainingInterrupted(Interrupted):
    """Training was asked to stop, and its state has been saved."""


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Within the block all of them interrupt as Ctrl-C does, where nobody handles them."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGXCPU:
            _hear_no_more(number)
            heard.remove(signal.SIGXCPU)
        raise Interrupted("interrupted", number)

    main = threading.current_thread() is threading.main_thread()
    heard = [n for n in _SIGNALS if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _hear_no_more(number: int) -> None:
    """Ignore SIGXCPU, which comes again each second of CPU time, until all is saved and ended."""
    signal.signal(number, signal.SIG_IGN)


class StopRequested(Exception):  # noqa: N818 - not an error
    """A signal came: leave what is being done at the next good moment."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class Interrupts:
    """Within the block, remembers the first signal; a second one stops at once, but in no write.

    Signals that are ignored stay so, as nohup wants. Nothing is caught outside the main thread,
    where Python allows no handlers, nor where it is not `wanted`.
    """

    def __init__(self, *, wanted: bool, say: bool = True, ranks: "Ranks | None" = None) -> None:
        self.wanted, self.say = wanted, say
        self.ranks = None if ranks is None or ranks.size == 1 else ranks  # the others
        self.received: int | None = None  # on any rank
        self._noted: int | None = None  # here
        self._writing = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise `StopRequested` if a signal came."""
        if self.received is not None:
            raise StopRequested(self.received)

    def check_between(self, done: int) -> None:
        """Likewise between two batches of a step, when all ranks have `done` as many."""
        if (done + 1) % _AGREE_EVERY == 0:
            self.agree()
        self.check()

    def agree(self, *wishes: bool) -> list[bool]:
        """Let all ranks, at the same step, know of a signal; return which wishes any has."""
        if self.ranks is None or not self.wanted:
            return list(wishes)
        every = self.ranks.gather_counts(self._noted or 0, *wishes)
        noted, *found = (max(each) for each in zip(*every, strict=True))
        self.received = noted or None
        return [bool(one) for one in found]

    def lose_reader(self) -> None:
        """Stop as a signal would: whoever read the progress went away, as `head` does."""
        if self.wanted and self._noted is None:
            self._remember(BROKEN_PIPE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no signal interrupt the block."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def __enter__(self) -> "Interrupts":
        if self.wanted and threading.current_thread() is threading.main_thread():
            heard = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGXCPU:
            _hear_no_more(number)
            del self._before[number]
        if self._noted is None:
            self._remember(number)
            self._answer("stopping after this batch, then saving; once more to stop at once")
        elif self._writing or number == signal.SIGXCPU:
            self._answer("still saving; it ends when that is done")
        else:
            raise KeyboardInterrupt

    def _remember(self, number: int) -> None:
        self._noted = number
        if self.ranks is None:
            self.received = number

    def _answer(self, text: str) -> None:
        # A RuntimeError says that stderr was being written when the signal came.
        if self.say and sys.stderr is not None:
            with suppress(OSError, RuntimeError):
                print(f"sce: {text}", file=sys.stderr, flush=True)
