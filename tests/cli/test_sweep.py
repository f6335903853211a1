import os
import signal
import threading
import time
from pathlib import Path

import pytest

from sce.cli import main
from sce.data.storage import json_line
from sce.experiments.store import SweepDirectory, read_rows
from tests.complaint import complaint
from tests.cycle_data import TINY_SWEEP, make_cycle
from tests.experiments.made_rows import make_row, write_place
from tests.experiments.pretended import pretend

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.timeout(240)

SETTINGS = 'title = "Ring"' + TINY_SWEEP.replace('"ce"', '"ce", "bce"')
STEPS = 'measure = "steps"\n' + SETTINGS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle").path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "ring.toml"
    made.write_text(SETTINGS)
    return made


def test_rows_that_are_not_utf_8_are_one_line(
    data: Path, file: Path, tmp_path: Path, capsys: Capture
) -> None:
    place = write_place(tmp_path / "sweep", [make_row("a", {"loss.name": "ce"})])
    place.rows.write_bytes(place.rows.read_bytes().replace(b"ml1m", b"\xff\xfe", 1))
    arguments = ["sweep", str(file), "--data", str(data), "--out", str(place.path)]
    for more in ([], ["--dry-run"]):
        message = complaint([*arguments, *more], capsys)
        assert f"{place.rows}, line 1, " in message
        assert "altered" in message


def test_a_sweep(data: Path, file: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "sweep"
    steps = tmp_path / "steps.toml"
    file.write_text(SETTINGS.replace(', "bce"', ""))
    steps.write_text("steps = 2\n" + STEPS.replace('"ce", ', ""))
    command = ["sweep", str(file), str(steps), "--data", str(data), "--out", str(out)]
    command += ["--jobs", "2"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("2 of 2 runs finished, in ")
    assert f"next: sce compare {out}" in captured.out
    assert captured.err.count("sce: [") == 2
    rows = {row["settings"]["loss.name"]: row for row in read_rows(out / "rows.jsonl")}
    assert {loss: row["measure"] for loss, row in rows.items()} == {
        "ce": "training",
        "bce": "steps",
    }
    trained, measured = rows["ce"], rows["bce"]
    assert trained["test"]["ndcg@10"] >= 0
    assert trained["popularity"]["test"]["ndcg@10"] >= 0
    assert trained["memory_mib"]["training"] > 0
    assert trained["at_once"] == 2
    left = {path.name for path in (out / trained["run"]).iterdir() if not path.is_dir()}
    assert {"run.json", "metrics.jsonl", "result.json"} <= left
    assert not {"best.safetensors", "resume.safetensors"} & left
    assert measured["components_mib"]["peak"] > 0
    assert measured["test"] is None
    found = {(sweep.name, sweep.title) for sweep in SweepDirectory(out).read_sweeps()}
    assert found == {("ring", "Ring"), ("steps", "Ring")}
    before = (out / "rows.jsonl").read_bytes()
    assert main(command) == 0  # nothing is left to do
    assert (out / "rows.jsonl").read_bytes() == before
    assert "weights" not in capsys.readouterr().out
    assert main([*command, "--keep-weights"]) == 0
    assert "finished before without weights: 1 run" in capsys.readouterr().out


def test_a_dry_run_says_what_is_done_and_runs_nothing(
    data: Path, file: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "sweep"
    command = ["sweep", str(file), "--data", f"ring={data}", "--out", str(out), "--dry-run"]
    command += ["--set", "training.epochs=2", "--seeds", "3", "4"]
    assert main(command) == 0
    *listed, last = capsys.readouterr().out.splitlines()
    assert last == "4 runs"
    assert not out.exists()
    keys = [line.split()[0] for line in listed]
    (out / "runs" / f"ring-ce-{keys[2]}").mkdir(parents=True)
    (out / "runs" / f"ring-ce-{keys[2]}" / "resume.safetensors").touch()
    states = zip(keys, ("finished", "failed"), strict=False)
    rows = [make_row(key, {"loss.name": "ce"}, status=status) for key, status in states]
    (out / "rows.jsonl").write_text("".join(map(json_line, rows)))
    assert main(command) == 0
    ends = ["ce seed=3: finished", "bce seed=3: failed", "ce seed=4: half-finished", "bce seed=4"]
    assert capsys.readouterr().out.splitlines() == [
        *(f"{key}  ring {end}" for key, end in zip(keys, ends, strict=True)),
        "4 runs, 1 finished, 1 half-finished, 1 failed",
    ]


def test_a_dry_run_makes_no_data(file: Path, tmp_path: Path, capsys: Capture) -> None:
    made = "[datasets.{}]\nsynthetic = {{ items = 300, users = 9 }}\n"
    file.write_text(SETTINGS + made.format("made") + made.format("more"))
    out = tmp_path / "sweep"
    assert main(["sweep", str(file), "--out", str(out), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("no key yet  made ce", "4 runs")
    assert not out.exists()


def test_when_every_run_failed_the_exit_code_says_so(
    data: Path, file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "sys.exit('sce: error: no')")
    out = tmp_path / "sweep"
    command = ["sweep", str(file), "--data", str(data), "--out", str(out)]
    assert main([*command, "--set", "loss.name=ce"]) == 1
    assert capsys.readouterr().out.startswith("0 of 1 run finished, 1 failed, in ")


def test_interrupted_it_saves_and_goes_on(
    data: Path, file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "(run / 'resume.safetensors').touch(); time.sleep(60)")
    out = tmp_path / "sweep"

    def interrupt() -> None:
        until = time.monotonic() + 30
        while not any(out.glob("runs/*/resume.safetensors")) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    command = ["sweep", str(file), "--data", str(data), "--out", str(out)]
    threading.Thread(target=interrupt).start()
    assert main([*command, "--set", "loss.name=ce"]) == 130
    said, told = capsys.readouterr()
    assert said.startswith("0 of 1 run finished, 1 left for next time")
    assert "stopped for now" in told
    assert "next:" not in said
    assert "rows:" not in said
    assert read_rows(out / "rows.jsonl") == []


def test_the_help_says_how_it_goes_on_and_what_exit_codes_mean(capsys: Capture) -> None:
    assert main(["sweep", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "the same command goes on" in words
    assert "Exit code 3" in words
    assert "Exit code 1" in words


def test_settings_that_the_file_has_already_are_no_others(
    data: Path, file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds are added to those before, and leave the comparison for nothing but other settings."""
    pretend(monkeypatch)
    file.write_text(STEPS)
    out = tmp_path / "sweep"
    command = ["sweep", str(file), "--data", str(data), "--out", str(out)]
    command += ["--set", "training.device=cpu"]
    assert main([*command, "--seeds", "0"]) == 0
    assert main([*command, "training.epochs=1", "--seeds", "1"]) == 0
    assert "compared any more" not in capsys.readouterr().err
    assert len(SweepDirectory(out).read_sweeps()[0].keys) == 4
    assert main([*command, "training.epochs=2", "--seeds", "1"]) == 0
    assert "4 runs of other settings are not compared any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--time-budget", "soon"], "like 90s, 10m or 1h30m"),
        (["--set", "training.epoch=2"], "the nearest valid key is epochs"),
        (["--set", "training.seed=2"], "leave out training.seed"),
        (["--time-budget", "5"], "like 90s, 10m or 1h30m"),
        (["--data", "nowhere"], "does not exist"),
        ([], "names no dataset"),
        (["{file}"], "two of the settings files are called ring"),
    ],
)
def test_what_cannot_be(
    file: Path, tmp_path: Path, capsys: Capture, options: list[str], message: str
) -> None:
    given = [option.format(file=file) for option in options]
    line = complaint(["sweep", str(file), *given, "--out", str(tmp_path / "sweep")], capsys)
    assert message in line
    assert not (tmp_path / "sweep").exists()


def test_several_files_in_one_go(
    data: Path, file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    file.write_text(STEPS)
    other = tmp_path / "more.toml"
    other.write_text(STEPS.replace("Ring", "More").replace('"bce"', '"ce-"'))
    out = tmp_path / "sweep"
    command = ["sweep", str(file), str(other), "--data", str(data), "--out", str(out)]
    assert main([*command, "--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in listed[:-1]] == ["cycle ce", "cycle bce", "cycle ce-"]
    assert listed[-1] == "3 runs"
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("3 of 3 runs finished, in ")
    rows = {row["key"]: row["settings"]["loss.name"] for row in read_rows(out / "rows.jsonl")}
    compared = {
        sweep.name: [rows[key] for key in sweep.keys] for sweep in SweepDirectory(out).read_sweeps()
    }
    assert compared == {"ring": ["ce", "bce"], "more": ["ce", "ce-"]}
