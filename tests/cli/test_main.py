import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cyclopts
import numpy as np
import pytest
import torch

from sce import cli
from sce.cli import VERBS, main
from sce.errors import InputError, RankError
from tests.complaint import complaint
from tests.cycle_data import make_cycle
from tests.experiments.pretended import pretend

Capture = pytest.CaptureFixture[str]


def run_sce(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sce", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(command, text=True, check=False, **streams)


def test_the_version_is_the_package_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sce {version('scalable-cross-entropy')}\n"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_every_verb(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "Usage: sce COMMAND" in out
    assert all(verb in out for verb in VERBS)
    assert "--debug" in out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_teaches_by_example(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    summary, *examples = VERBS[verb].splitlines()
    assert summary in " ".join(out.split())
    assert examples
    assert all(one.startswith(f"    sce {verb}") for one in examples)
    assert {*examples} <= {*out.splitlines()}


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_wrapped_to_the_page_alone(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Docstrings are wrapped too: on a page that is wide enough, every option is one line."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert main([verb, "--help"]) == 0
    assert not re.search(r"^│ {9}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["prepair"], ["prepair", "(see: sce --help)"]),
        (["prepare", "x", "--colour", "red"], ["--colour", "(see: sce prepare --help)"]),
        (["prepare", "x", "--out", "y", "--quantile", "high"], ["--quantile", "high"]),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], parts: list[str], capsys: Capture
) -> None:
    line = complaint(arguments, capsys)
    assert all(part in line for part in parts)


def test_wrong_input_is_one_line_and_debug_raises(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "dear").write_text("dear")
    arguments = ["prepare", "log.csv", "--out", str(tmp_path)]
    assert "exists" in complaint(arguments, capsys)
    with pytest.raises(InputError, match="exists"):
        main([*arguments, "--debug"])
    with pytest.raises(cyclopts.CycloptsError):
        main([*arguments, "--colour", "--debug"])


def test_errors_of_the_system_and_of_ours_and_interrupts(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    app = Mock(side_effect=PermissionError(13, "Permission denied", "data/clicks"))
    monkeypatch.setattr(cli, "app", app)
    assert "Permission denied: 'data/clicks'" in complaint(["prepare"], capsys)
    with pytest.raises(PermissionError):
        main(["prepare", "--debug"])
    app.side_effect = FileNotFoundError(2, "No such file or directory")
    assert "the current directory was deleted" in complaint(["train"], capsys)
    app.side_effect = RankError("no answer from rank 1")
    assert "no answer from rank 1" in complaint(["train"], capsys)
    app.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        main(["prepare"])
    app.side_effect = KeyboardInterrupt
    assert main(["prepare"]) == 130
    assert capsys.readouterr().err == "sce: interrupted\n"


class PanicException(BaseException):  # as polars' are
    pass


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((10**9,), np.dtype(np.float64)),  # type: ignore[attr-defined]
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
                     "allocate memory: you tried to allocate 4000 bytes."),
        PanicException("memory allocation of 8000 bytes failed"),
        ImportError("lib.so: failed to map segment from shared object"),
    ],
)  # fmt: skip
def test_running_out_of_memory_is_one_line(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    assert "memory ran out (" in complaint(["prepare"], capsys)
    with pytest.raises(type(error)):
        main(["prepare", "--debug"])


def test_memory_that_runs_out_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    error = ImportError("Cannot import module 'sce.cli.plan'")
    error.__cause__ = ImportError("lib.so: failed to map segment from shared object")
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    assert "memory ran out (lib.so: failed to map segment" in complaint(["plan"], capsys)


def test_what_a_terminal_would_obey_is_shown_and_not_sent(capsys: Capture) -> None:
    name = "\x1b[31m\x07\u202ea\x9b"
    assert r"\x1b[31m\x07\u202ea\x9b" in complaint(["evaluate", name], capsys)
    assert len(complaint(["evaluate", "x" * 70_000], capsys)) < 1000


@pytest.mark.parametrize("verb", ["--help", "datasets", "datasets --json"])
def test_a_full_device_as_standard_output_is_one_line(verb: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_sce(verb.split(), stdout=full)
    assert done.returncode == 2
    assert done.stderr == ("sce: error: cannot write to standard output: No space left on device\n")


def test_what_is_done_is_kept_where_nothing_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    make_cycle(tmp_path / "data")
    sizes = {"model.dim": 4, "model.max_length": 6, "training.epochs": 1, "training.device": "cpu"}
    flags = [
        word
        for name, value in sizes.items()
        for word in (f"--{name}".replace("_", "-"), str(value))
    ]
    settings = [f"{name}={value}" for name, value in sizes.items()]
    pretend(monkeypatch)
    Path("ce.toml").write_text('measure = "steps"\n[[grid]]\nloss.name = "ce"\n')
    places = ["--data", "data", "--out", "sweep"]
    made = {
        "log.parquet": ["synthesize", "--items", "200", "--users", "50", "--out", "log.parquet"],
        "run/result.json": ["train", "data", "--out", "run", *flags],
        "run/report.html": ["report", "run"],
        "sweep/rows.jsonl": ["sweep", "ce.toml", *places, "--set", *settings],
        "compare.html": ["compare", "run"],
    }
    for file, arguments in made.items():
        with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert main(arguments) == 0, arguments
        told = "sce: done, but cannot write to standard output: No space left on device\n"
        assert capsys.readouterr().err.endswith(told)
        assert Path(file).is_file()
    assert main(["recommend", "run", "--out", "rows.csv"]) == 0  # the run is whole


def test_names_that_no_file_can_have_or_that_are_not_utf_8(tmp_path: Path, capsys: Capture) -> None:
    for verb in ("prepare", "train", "evaluate", "recommend", "report", "compare", "sweep"):
        assert "a NUL byte is no part" in complaint([verb, "a\0b"], capsys)
    for verb in ("prepare", "recommend"):
        complaint([verb, os.fsdecode(b"none\xff"), "--out", str(tmp_path / "out")], capsys)


def test_what_cannot_be_encoded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=lambda *_, **__: "a\udcff".encode()))
    assert r"'a\udcff' cannot be written as utf-8; rename it" in complaint(["prepare"], capsys)


def test_a_terminal_of_ascii_alone() -> None:
    program = (
        "import sys, sce.cli; from sce.cli.output import show_lines\n"
        "sce.cli.app = lambda *_, **__: show_lines([('żółw', '10 µs')], 9)\n"
        "sys.exit(sce.cli.main([]))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    assert done.stdout == b"\\u017c\\xf3\\u0142w     10 \\xb5s\n"
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_stderr_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["evaluate", "nowhere"]) == 2
    assert capsys.readouterr().out == ""


# Ways to lose one's reader: while rich prints, while plain text is written, and at the end, when
# what is still in the buffer goes out.
PLAIN = "setattr(sce.cli, 'app', lambda *_, **__: print('x' * 10**6)) or main(['prepare'])"
SHORT = "setattr(sce.cli, 'app', lambda *_, **__: print('x')) or main(['prepare'])"
REAL = [f"main({words.split()})" for words in ("--help", "--version", "prepare --help", "datasets")]


@pytest.mark.parametrize("call", [PLAIN, SHORT, *REAL])
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
    assert (done.returncode, done.stderr) == (141, "")  # as shells say: 128 + SIGPIPE


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "data", "--epochs", "1.5"],
        ["train", "data", "--loss.bucket-size-y", "2.0"],
        ["evaluate", "run", "--k", "5", "7.4"],
        ["recommend", "run", "-k", "0.9"],
        ["synthesize", "--out", "log.parquet", "--items", "1.5e3"],
        ["prepare", "log.csv", "--out", "data", "--min-user-items", "3.7"],
        ["evaluate", "run", "--batch-size", "9" * 400],  # nor of more than 64 bits
        ["plan", "--items", "1000", "--batch", "-" + "9" * 400],
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
        [sys.executable, "-m", "sce", "datasets", "--colour"],
        stdout=subprocess.PIPE,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stdout) == (2, b"")
