import io
import re
from typing import Any

import pytest
from rich.console import Console

from sce import progress
from sce.progress import ProgressDisplay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        for second in range(75):
            clock[0] = 1000.0 + second
            display.update("ranking", 100 + 20 * second, 2000, "users", facts="a fact")
        display.step("[b]reading[/b] a file")
        clock[0] += 31
        display.update("counting", 5, unit="rows")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "sce: ranking: 300 of 2,000 users  20/s  a fact  1:25 left",  # done before: not in the rate
        "sce: ranking: 900 of 2,000 users  20/s  a fact  0:55 left",
        "sce: ranking: 1,500 of 2,000 users  20/s  a fact  0:25 left",
        "sce: [b]reading[/b] a file",
        "sce: counting: 5 rows",
    ]


def test_short_work_and_unwanted_displays_say_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display, ProgressDisplay(wanted=False) as unwanted:
        clock[0] += 9
        display.update("ranking", 5, 10)
        clock[0] += 99
        unwanted.update("ranking", 5, 10)
        unwanted.step("reading")
        assert display.due
        assert not unwanted.due
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("animated", [False, True])
def test_a_bar_on_a_terminal(
    animated: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(file=screen, force_terminal=True, width=100, color_system=None)

    monkeypatch.setattr(progress, "PipedConsole", console)
    with ProgressDisplay(animated=animated) as display:
        display.step("[b]reading[/b]")
        display.update("epoch 3/9", 4, 10, "steps", left=65.0)  # a new step is shown at once
        clock[0] += 0.4
        due = [display.due]
        display.update("epoch 3/9", 5, 10, "steps", facts="never shown")
        clock[0] += 0.2
        due.append(display.due)
        display.update("epoch 3/9", 7, 10, "steps", facts="loss 1.5", left=64.0)
        display.print("a line")
    assert due == [False, True]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "[b]reading[/b]" in text
    assert re.search(r"epoch 3/9 .* 4 of 10 steps  1:05 left", text)
    assert re.search(r"epoch 3/9 .* 7 of 10 steps  5/s  loss 1.5  1:04 left", text)
    assert "a line" in text
    assert "never shown" not in text


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (BrokenPipeError(32, "Broken pipe"), 1),  # a reader such as head went away
        (OSError(5, "Input/output error"), 0),  # the terminal was closed
    ],
)
def test_a_stderr_that_cannot_be_written_ends_nothing(
    terminal: bool, error: OSError, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise error

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Broken())
    told: list[None] = []
    with ProgressDisplay(on_lost=lambda: told.append(None)) as display:
        display.print("a line")
        display.step("reading")
        display.update("ranking", 1, 2)
    assert len(told) == lost  # once: after that it is silent
