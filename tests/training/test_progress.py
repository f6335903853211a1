import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from sce.progress import PipedConsole
from sce.training import progress
from sce.training.device import PeakMemory
from sce.training.progress import ProgressBar

RECORD: dict[str, Any] = {
    "epoch": 2,
    "loss": 1.23456,
    "tokens_per_second": 12345.6,
    "seconds": {"training": 10.0, "evaluation": 2.5},
    "memory_mib": {"training": 451.2, "evaluation": 300.0},
    "validation": {"ndcg@10": 0.5},
    "best": True,
}


def make_bar(wanted: bool = True) -> ProgressBar:
    return ProgressBar(wanted=wanted, epochs=9, memory=PeakMemory(torch.device("cpu")))


def test_a_line_for_each_epoch_when_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with make_bar() as shown:
        shown.step(1, 5, 10, 2.0, 100.0)
        shown.evaluating("validation", 1, 2)
        shown.epoch(RECORD, seconds_left=3725)
        shown.epoch(RECORD | {"epoch": 9, "validation": None}, seconds_left=0)
        shown.note("a note")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "epoch 2/9  loss 1.2346  ndcg@10 0.5000 *  12,346 tokens/s  451 MiB  "
        "10.0 s + 2.5 s evaluation  at most 1:02:05 left\n"
        "epoch 9/9  loss 1.2346  12,346 tokens/s  451 MiB  10.0 s\n"
        "sce: a note\n"
    )


def test_nothing_when_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with make_bar(wanted=False) as shown:
        shown.step(1, 5, 10, 2.0, 100.0)
        shown.epoch(RECORD, seconds_left=10)
        shown.note("a note")
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(
            file=screen, force_terminal=True, width=100, highlight=False, color_system=None
        )

    monkeypatch.setattr(progress, "PipedConsole", console)
    with make_bar() as shown:
        shown.epoch(RECORD, seconds_left=10)
        shown.step(3, 5, 10, 1.9999, 65.0)
        assert not shown.due
        shown.evaluating("validation", 512, 1024)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"epoch 3/9 .* loss 1\.9999  ndcg@10 0\.5000  [\d,]+ MiB  1:05 left", text)
    assert re.search(r"evaluating validation .* 512 of 1,024 users", text)
    assert "epoch 2/9  loss 1.2346" in text


def use_stderr(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    monkeypatch.setattr("sys.stderr", Broken())


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (BrokenPipeError(32, "Broken pipe"), 1),  # a reader such as head went away
        (OSError(5, "Input/output error"), 0),  # the terminal was closed
        (OSError(28, "No space left on device"), 0),
    ],
)
def test_a_stderr_that_cannot_be_written_ends_nothing(
    error: OSError, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stderr(monkeypatch, error)
    told: list[None] = []
    memory = PeakMemory(torch.device("cpu"))
    with ProgressBar(
        wanted=True, epochs=9, memory=memory, on_lost=lambda: told.append(None)
    ) as shown:
        shown.epoch(RECORD, seconds_left=10)
        shown.note("a note")
        shown.step(3, 5, 10, 1.9999, 65.0)
    assert len(told) == lost  # once: after that it is silent


def test_a_bar_on_a_terminal_that_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    def console(**options: Any) -> Console:
        return PipedConsole(file=Closed(), force_terminal=True)

    monkeypatch.setattr(progress, "PipedConsole", console)
    with make_bar() as shown:
        shown.step(3, 5, 10, 1.9999, 65.0)
        shown.epoch(RECORD, seconds_left=10)
