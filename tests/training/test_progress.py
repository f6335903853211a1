import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from sce import progress
from sce.training.device import PeakMemory
from sce.training.progress import TrainingProgress

RECORD: dict[str, Any] = {
    "epoch": 2,
    "loss": 1.23456,
    "tokens_per_second": 12345.6,
    "seconds": {"training": 10.0, "evaluation": 2.5},
    "memory_mib": {"training": 451.2, "evaluation": 300.0},
    "validation": {"ndcg@10": 0.5},
    "best": True,
}


def make_progress(wanted: bool = True) -> TrainingProgress:
    made = TrainingProgress(wanted=wanted, memory=PeakMemory(torch.device("cpu")))
    made.epochs = 9
    return made


def test_a_line_for_each_epoch_when_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress() as shown:
        shown.training(1, 5, 10, 2.0, 100.0)  # too early for a line
        shown.epoch(RECORD, seconds_left=3725)
        shown.epoch(RECORD | {"epoch": 9, "validation": None}, seconds_left=0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "epoch 2/9  loss 1.2346  ndcg@10 0.5000 *  12,346 tokens/s  451 MiB  "
        "10.0 s + 2.5 s evaluation  at most 1:02:05 left\n"
        "epoch 9/9  loss 1.2346  12,346 tokens/s  451 MiB  10.0 s\n"
    )
    with make_progress(wanted=False) as shown:
        shown.epoch(RECORD, seconds_left=10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(
            file=screen, force_terminal=True, width=100, highlight=False, color_system=None
        )

    monkeypatch.setattr(progress, "PipedConsole", console)
    with make_progress() as shown:
        shown.epoch(RECORD, seconds_left=10)
        shown.training(3, 5, 10, 1.9999, 65.0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"epoch 3/9 .*5 of 10 steps .*loss 1\.9999  ndcg@10 0\.5000 .*1:05 left", text)
    assert "epoch 2/9  loss 1.2346" in text
