import sys
from pathlib import Path

import pytest

from sce.cli import main
from sce.training.run import Run
from sce.training.run_start import note_divergence
from tests.complaint import complaint
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make_run(tmp_path / "run", make_dataset(tmp_path / "data"))
    write_epochs(made)
    write_result(made)
    return made


def test_the_page_lies_in_the_run(run: Run, capsys: Capture) -> None:
    before = {path.name for path in run.path.iterdir()}
    assert main(["report", str(run.path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{run.path / 'report.html'}\n"
    assert captured.err == ""
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "0.1423" in page
    assert {path.name for path in run.path.iterdir()} == before | {"report.html"}
    assert main(["report", str(run.path)]) == 0  # again: it is replaced


def test_elsewhere(run: Run, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(run.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert not (run.path / "report.html").exists()
    assert "0.1423" in out.read_text(encoding="utf-8")


def test_a_path_that_is_no_unicode_is_shown_as_it_can_be(tmp_path: Path) -> None:
    for number in (1, 2):
        data = make_dataset(tmp_path / f"da\udcffta{number}", users=8 + number)
        write_result(make_run(tmp_path / f"run{number}", data))
    runs, figures = [str(tmp_path / f"run{number}") for number in (1, 2)], tmp_path / "figures"
    assert main(["report", runs[0]]) == 0
    assert r"da\udcffta1" in (tmp_path / "run1/report.html").read_text(encoding="utf-8")
    out = ["--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv")]
    assert main(["compare", *runs, *out, "--svg", str(figures)]) == 0
    for name in ("page.html", "all.csv"):
        assert r"da\udcffta2" in (tmp_path / name).read_text(encoding="utf-8")
    assert [*figures.iterdir()]


def test_a_page_that_cannot_be_made_does_not_replace_one(run: Run, capsys: Capture) -> None:
    (run.path / "report.html").write_text("dear")
    run.result_file.write_text("{")
    assert "result.json is half-written or altered" in complaint(["report", str(run.path)], capsys)
    assert (run.path / "report.html").read_text() == "dear"


@pytest.mark.parametrize("name", ["run.json", "result.json", "metrics.jsonl"])
def test_what_is_not_text_is_one_line(run: Run, name: str, capsys: Capture) -> None:
    whole = (run.path / name).read_bytes()
    for wrong in (b"\xff\xfe" + whole[2:], whole.replace(b"1", b"3", 1)):
        (run.path / name).write_bytes(wrong)
        assert name in complaint(["report", str(run.path)], capsys)
        assert "altered" in complaint(["compare", str(run.path), str(run.path)], capsys)


def test_where_it_cannot_be_written(run: Run, tmp_path: Path, capsys: Capture) -> None:
    line = complaint(["report", str(run.path), "--out", str(tmp_path)], capsys)
    assert "is a directory" in line
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    line = complaint(["report", str(run.path), "--out", str(loop)], capsys)
    assert f"cannot write {loop}" in line
    over = run.path / "run.json"
    line = complaint(["report", str(run.path), "--out", str(over)], capsys)
    assert "has the ending of a record of a run" in line
    out = tmp_path / "nowhere" / "page.html"
    assert f"cannot write {out}" in complaint(["report", str(run.path), "--out", str(out)], capsys)


def test_a_missing_run_and_another_dataset(run: Run, tmp_path: Path, capsys: Capture) -> None:
    assert "does not exist" in complaint(["report", str(tmp_path / "none")], capsys)
    assert "is not a run" in complaint(["report", str(tmp_path)], capsys)
    make_dataset(tmp_path / "other", users=7)
    arguments = ["report", str(run.path), "--data", str(tmp_path / "other")]
    assert "is not the dataset that" in complaint(arguments, capsys)


def test_a_diverged_run_says_so(run: Run, capsys: Capture) -> None:
    run.result_file.unlink()
    note_divergence(run, epoch=3, step=7)
    assert main(["report", str(run.path)]) == 0
    assert "diverged at step 7 of epoch 3" in capsys.readouterr().err


def test_without_the_extra_one_line_says_how_to_install_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    for name in [name for name in sys.modules if name.startswith("sce.report.")]:
        monkeypatch.delitem(sys.modules, name)
    line = complaint(["report", str(run.path)], capsys)
    assert "altair, which is not installed" in line
    assert "pip install 'scalable-cross-entropy[report]'" in line
