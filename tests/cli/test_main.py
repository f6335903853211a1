import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import cyclopts
import pytest

from sce import cli
from sce.cli import VERBS, Verb, main
from sce.errors import InputError

Capture = pytest.CaptureFixture[str]


def test_the_version_is_the_package_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sce {version('scalable-cross-entropy')}\n"


def test_help_lists_every_verb(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb.name in out for verb in VERBS)
    assert "--debug" in out


def test_no_command_shows_the_help(capsys: Capture) -> None:
    assert main([]) == 0
    assert "Usage: sce COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_help_of_a_verb_teaches_by_example(verb: Verb, capsys: Capture) -> None:
    assert main([verb.name, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())  # an example may be wrapped
    assert verb.examples.strip()
    for example in verb.examples.strip().splitlines():
        assert example.strip().startswith(f"sce {verb.name}")
        assert example.strip() in out


def complaint(arguments: list[str], capsys: Capture) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sce: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_unknown_option_is_one_line(capsys: Capture) -> None:
    line = complaint(["prepare", "log.csv", "--out", "data", "--colour", "red"], capsys)
    assert "--colour" in line
    assert "(see: sce prepare --help)" in line


def test_an_unknown_verb_is_one_line(capsys: Capture) -> None:
    line = complaint(["prepair"], capsys)
    assert "prepair" in line
    assert "(see: sce --help)" in line


def test_a_value_of_the_wrong_kind_is_one_line(capsys: Capture) -> None:
    line = complaint(["prepare", "log.csv", "--out", "data", "--quantile", "high"], capsys)
    assert "high" in line
    assert "--quantile" in line


def test_wrong_input_is_one_line_and_debug_raises(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "dear").write_text("dear")
    arguments = ["prepare", "log.csv", "--out", str(tmp_path)]
    assert "exists" in complaint(arguments, capsys)
    with pytest.raises(InputError, match="exists"):
        main([*arguments, "--debug"])
    with pytest.raises(cyclopts.CycloptsError):
        main([*arguments, "--colour", "--debug"])


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "data/clicks")

    monkeypatch.setattr(cli, "app", refuse)
    assert "Permission denied: 'data/clicks'" in complaint(["prepare"], capsys)
    with pytest.raises(PermissionError):
        main(["prepare", "--debug"])


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main(["prepare"])


def test_an_interrupt_is_said_and_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    assert main(["prepare"]) == 130
    assert capsys.readouterr().err == "sce: interrupted\n"


# Three ways to lose one's reader: while rich prints, while plain text is written, and at the end,
# when what is still in the buffer goes out.
LONG = "main(['prepare', '--help'])"
PLAIN = "setattr(sce.cli, 'app', lambda *_, **__: print('x' * 10**6)) or main(['prepare'])"
SHORT = "setattr(sce.cli, 'app', lambda *_, **__: print('x')) or main(['prepare'])"


@pytest.mark.parametrize("call", [LONG, PLAIN, SHORT], ids=["rich", "plain", "short"])
def test_a_reader_that_goes_away_is_no_error(call: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = f"import sys, sce.cli; from sce.cli import main; sys.exit({call})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 141)  # rich says 1, shells say 128 + SIGPIPE


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "data", "--epochs", "1.5"],
        ["train", "data", "--loss.bucket-size-y", "2.0"],
        ["evaluate", "run", "--k", "5", "7.4"],
        ["recommend", "run", "-k", "0.9"],
        ["synthesize", "--out", "log.parquet", "--items", "1e3"],
        ["prepare", "log.csv", "--out", "data", "--min-user-items", "3.7"],
    ],
)
def test_whole_numbers_are_not_rounded(arguments: list[str], capsys: Capture) -> None:
    line = complaint(arguments, capsys)
    assert f'unable to convert "{arguments[-1]}" into int' in line
    assert arguments[-2] in line or "--k" in line


def test_a_stderr_without_a_reader_is_no_error_either() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "sce", "evaluate", "nowhere"],
        stdout=subprocess.PIPE,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stdout) == (2, b"")
