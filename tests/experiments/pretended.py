"""Runs of a sweep that only pretend: a line of Python instead of training, which takes seconds."""

import sys
from pathlib import Path

import pytest

from sce.data.storage import json_line
from sce.experiments import runner
from sce.experiments.spec import PlannedRun

RESULT = json_line({"best_epoch": 1, "test": {"ndcg@10": 0.1}, "seconds": {"training": 1.5},
                    "memory_mib": {"training": 5000.0, "evaluation": None}})  # fmt: skip
WELL = f"(run / 'result.json').write_text({RESULT!r})"


def pretend(monkeypatch: pytest.MonkeyPatch, what: str = WELL) -> None:
    """Let runs execute this line; a measure of steps needs no more than `WELL` leaves."""
    program = "import sys, time; from pathlib import Path; run = Path(sys.argv[1]); run.mkdir(); "

    def command(run: PlannedRun, settings: Path, path: Path, *, anew: bool) -> list[str]:
        return [sys.executable, "-c", program + what, str(path)]

    monkeypatch.setattr(runner, "_command", command)
