"""Ctrl-C and SIGTERM, taken note of instead of obeyed at once: there is a state to be saved."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(KeyboardInterrupt):
    """Training was asked to stop, and its state has been saved.

    It is a `KeyboardInterrupt`, so that what should end with Ctrl-C does.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """What shells expect of a process that ended by this signal."""
        return 128 + self.signal_number


class StopRequested(Exception):  # noqa: N818 - not an error
    """A signal came: leave what is being done at the next good moment."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class Interrupts:
    """Within the block, remembers the first signal; a second one stops at once.

    Outside the main thread Python allows no handlers, and nothing is caught.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise `StopRequested` if a signal came."""
        if self.received is not None:
            raise StopRequested(self.received)

    def __enter__(self) -> "Interrupts":
        if self.wanted and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
