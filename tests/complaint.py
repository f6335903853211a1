"""A command that is refused, as a user sees it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sce.cli import main


def complaint(arguments: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused with one line on stderr; return the line."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sce: error: ")
    assert captured.err.count("\n") == 1
    return captured.err
