import io
import re
from pathlib import Path

import pytest

from sce.cli import main
from sce.data.storage import read_json_lines
from sce.experiments.figure_spec import DEFAULT_FIGURES, FigureSpec
from sce.experiments.store import SweepDirectory, row_of
from tests.complaint import complaint
from tests.cycle_data import make_cycle
from tests.experiments.made_rows import main_rows, make_row, write_place
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path) -> SweepDirectory:
    return write_place(tmp_path / "sweep", list(main_rows(1)), *DEFAULT_FIGURES)


def test_the_page_lies_beside_the_rows(place: SweepDirectory, capsys: Capture) -> None:
    assert main(["compare", str(place.path)]) == 0
    target = place.path / "compare.html"
    assert capsys.readouterr().out.endswith(f"\n\nwritten  {target}\n")
    assert "The &lt;main&gt; sweep" in target.read_text(encoding="utf-8")


def test_everything_that_can_be_written(
    place: SweepDirectory, tmp_path: Path, capsys: Capture
) -> None:
    files = {name: tmp_path / name for name in ("page.html", "all.csv", "table.md")}
    arguments = ["--out", str(files["page.html"]), "--csv", str(files["all.csv"])]
    arguments += ["--markdown", str(files["table.md"]), "--svg", str(tmp_path / "figures")]
    assert main(["compare", str(place.path), *arguments]) == 0
    printed = capsys.readouterr().out.partition("\nwritten")[2].split()
    assert printed[:3] == [str(file) for file in files.values()]
    assert len(printed) == 3 + 6
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 6
    assert files["all.csv"].read_text().startswith("dataset,items,seeds,")
    assert "**" in files["table.md"].read_text()


def test_pairs_are_rows_in_a_new_file(tmp_path: Path, capsys: Capture) -> None:
    rows = [
        make_row(f"{data} {loss}", {"model.name": "sasrec", "loss.name": loss}, data=data)
        for data in ("a", "b") for loss in ("ce", "sce")
    ]  # fmt: skip
    place = write_place(tmp_path / "sweep", rows, *DEFAULT_FIGURES)
    files = [str(tmp_path / name) for name in ("pairs.jsonl", "table.md")]
    arguments = ["compare", str(place.path), "--pairs", files[0], "--markdown", files[1]]
    assert main(arguments) == 0
    found = read_json_lines(Path(files[0]))  # whose checksums fit
    assert [one["dataset"]["name"] for one in found] == ["a", "a", "b", "b"]
    assert {one["test"] for one in found} == {1.0}
    over = "## Over all logs\n\n| backbone | loss |"
    assert over in Path(files[1]).read_text(encoding="utf-8")
    assert "Over all logs</h2>" in (place.path / "compare.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert "pairs.jsonl exists, and may be a record of a run" in complaint(arguments, capsys)


def test_several_sweeps_and_some_of_them(place: SweepDirectory, tmp_path: Path) -> None:
    rows = [make_row(one, {"loss.name": "sce", "loss.centres": one}) for one in ("mix", "random")]
    write_place(place.path, rows, FigureSpec("table", by=("loss.centres",)), name="blend")
    other = write_place(tmp_path / "other", [make_row("o", {"loss.name": "ce"})], name="other")
    out = tmp_path / "page.html"
    assert main(["compare", str(place.path), str(other.path), "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    places = [page.index(f"The &lt;{name}&gt; sweep</h2>") for name in ("main", "blend", "other")]
    assert places == sorted(places)  # what compares losses is first
    only = ["--only", "blend", "--out", str(out)]
    assert main(["compare", str(place.path), *only]) == 0
    assert (
        "main" not in out.read_text(encoding="utf-8").partition("</header>")[0].partition("<h1")[2]
    )


def test_datasets_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for n, place in enumerate(("a", "b")):
        data = {"name": "alpha", "content_hash": place, "n_items": 9 + n}
        rows = [make_row(f"{place}{seed}", {"loss.name": "ce"}, seed=seed, dataset=data)
                for seed in (0, 1)]  # fmt: skip
        write_place(tmp_path / place, rows, FigureSpec("table"))
    out = tmp_path / "table.md"
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--markdown", str(out)]
    assert main(["compare", *arguments]) == 0
    text = out.read_text(encoding="utf-8")
    assert "| alpha | NDCG@1, HR@1 |" in text
    assert "| alpha (2) | NDCG@1, HR@1 |" in text
    assert "4 runs on 2 datasets" in text


def test_other_times_stand_apart_for_a_model_that_uses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "alpha", "content_hash": "same", "n_items": 9}
    hstu, sasrec = ({"loss.name": "ce", "model.name": name} for name in ("hstu", "sasrec"))
    for times, test in (("one", 0.1), ("two", 0.2)):
        timed = make_row(times, hstu, dataset=data | {"times": times}, test=test)
        blind = make_row("blind", sasrec, dataset=data | {"times": ""}, test=0.3)
        write_place(tmp_path / times, [timed, blind], FigureSpec("table", by=("model.name",)))
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 runs on 2 datasets, all finished.")
    assert re.findall(r"^(alpha.*?)  +(.*?)  +1 +(\S+)", printed, re.MULTILINE) == [
        ("alpha", "CE, name hstu", "0.1000"),
        ("alpha", "CE, name sasrec", "0.3000"),
        ("alpha (2)", "CE, name hstu", "0.2000"),
    ]


def test_sweeps_of_one_name_and_other_settings_are_not_mixed(tmp_path: Path) -> None:
    for name, test in (("a", 0.1234), ("b", 0.4321)):
        rows = [make_row(name, {"loss.name": "ce"}, test=test)]
        write_place(tmp_path / name, rows, variant=name)
    out = tmp_path / "table.md"
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--markdown", str(out)]
    assert main(["compare", *arguments]) == 0
    parts = out.read_text(encoding="utf-8").split("## ")[1:]
    assert [("0.1234" in part, "0.4321" in part) for part in parts] == [
        (True, False), (False, True),
    ]  # fmt: skip
    assert parts[1].startswith(f"The &lt;main&gt; sweep ({tmp_path / 'b'})")


def test_rows_of_another_sweep_are_not_chosen_from(place: SweepDirectory, tmp_path: Path) -> None:
    """Sweeps share a directory; what one tried is not part of the other's comparison."""
    lucky = make_row("l", {"loss.name": "sce", "loss.alpha": 9.0}, validation=0.99, test=0.9876)
    write_place(place.path, [lucky], name="other")
    out = tmp_path / "table.md"
    assert main(["compare", str(place.path), "--only", "main", "--markdown", str(out)]) == 0
    assert "0.9876" not in out.read_text()


def test_all_is_written_before_anything_is_said(
    place: SweepDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the names may go away after the first: every file is there by then."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    files = [tmp_path / name for name in ("page.html", "all.csv", "table.md")]
    options = zip(("--out", "--csv", "--markdown"), map(str, files), strict=True)
    monkeypatch.setattr("sys.stdout", Gone())
    arguments = [*(word for pair in options for word in pair), "--svg", str(tmp_path / "figures")]
    assert main(["compare", str(place.path), *arguments]) == 141
    assert all(file.stat().st_size for file in files)
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 6


def test_any_runs_side_by_side(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_dataset(tmp_path / "ring", users=12)
    other = make_dataset(tmp_path / "b" / "ring", users=9)
    runs = [
        make_run(tmp_path / name, on, loss=loss)
        for name, on, loss in (("ce", data, "ce"), ("sce", data, "sce"), ("far", other, "ce"))
    ]
    for run in runs:
        write_epochs(run)
        write_result(run)
    young = make_run(tmp_path / "young", data, loss="bce")
    monkeypatch.chdir(tmp_path)
    paths = [str(run.path) for run in (*runs, young)]
    assert main(["compare", *paths, "--markdown", "table.md"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\nwritten  compare.html\n         table.md\n")
    assert printed.startswith("4 runs on 2 datasets; of these, 1 not ended. Best validation")
    assert re.search(r"^ring +SCE +1 +0\.1423 +\S+ +451 MiB +30 s *$", printed, re.MULTILINE)
    assert (
        "\n\none seed\n  ring: test NDCG@10 of SCE (0.1423) against CE (0.1423), "
        "the best other by validation\n  a single seed has no spread\n  over " in printed
    )
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    for told in (printed, text, (tmp_path / "compare.html").read_text(encoding="utf-8")):
        assert "Split: ring leave-one-out; ring (2) leave-one-out." in told
    assert "4 runs on 2 datasets; of these, 1 not ended." in text
    assert "| data |  | CE | SCE | SCE against best other by validation |" in text
    assert "| ring | NDCG@10 | 0.1423 | 0.1423 | +0% (CE, one seed) |" in text
    assert "| ring (2) | NDCG@10 | 0.1423 | – |  |" in text  # other data stands apart
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "ring: test NDCG@10 of SCE (0.1423) against CE (0.1423)" in page
    assert "validation NDCG@10</h3>" in page
    write_place(tmp_path / "swept", [make_row("a", {"loss.name": "bce"}, test=0.2)])
    assert main(["compare", paths[0], str(tmp_path / "swept"), "--markdown", "table.md"]) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text.count("## ") == 2
    assert "| ml1m | NDCG@10 | 0.2000 | – |" in text
    assert "they stand apart" in text
    capsys.readouterr()
    complained = complaint(["compare", paths[0], paths[0]], capsys)
    assert "have the same settings, seed and data; leave one out" in complained
    same = write_place(tmp_path / "same", [row_of(runs[0].path) | {"run": "runs/x"}])
    complained = complaint(["compare", str(same.path), paths[0]], capsys)
    assert f"{same.path / 'runs' / 'x'} and {paths[0]} have the same settings" in complained


def test_a_run_that_went_on_from_another_stands_apart(tmp_path: Path, capsys: Capture) -> None:
    data, old = str(make_cycle(tmp_path / "data").path), tmp_path / "old"
    train = ["train", data, "--epochs", "1", "--device", "cpu", "--model.dim", "8", "--out"]
    assert main([*train, str(old)]) == 0
    assert main([*train, str(tmp_path / "on"), "--from", str(old)]) == 0
    capsys.readouterr()
    table = ["--out", str(tmp_path / "c.html"), "--markdown", str(tmp_path / "c.md")]
    assert main(["compare", str(old), str(tmp_path / "on"), *table]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"^data +CE, from {old} +1 ", told, re.MULTILINE)
    assert re.search(r"^data +CE +1 ", told, re.MULTILINE)
    assert "carried" not in (tmp_path / "c.md").read_text(encoding="utf-8")


def test_rows_that_were_altered_are_one_line(place: SweepDirectory, capsys: Capture) -> None:
    whole = place.rows.read_bytes()
    for wrong in (whole.replace(b"0.0", b"0.9", 1), whole.replace(b"ml1m", b"\xff\xfe", 1)):
        place.rows.write_bytes(wrong)
        message = complaint(["compare", str(place.path)], capsys)
        assert f"{place.rows}, line 1, " in message
        assert "altered" in message


def test_what_cannot_be(place: SweepDirectory, tmp_path: Path, capsys: Capture) -> None:
    assert "does not exist" in complaint(["compare", str(tmp_path / "none")], capsys)
    assert "no sweep called x" in complaint(["compare", str(place.path), "--only", "x"], capsys)
    data = make_dataset(tmp_path / "ring")
    assert "no run, and not of a sweep" in (told := complaint(["compare", str(data.path)], capsys))
    assert "name the runs: sce compare runs/*; " in told
    runs = make_run(tmp_path / "mine" / "ce", data, loss="ce").path.parent
    told = complaint(["compare", str(runs)], capsys)
    assert f"name the runs: sce compare {runs}/*; " in told
    empty = write_place(tmp_path / "empty", [])
    assert "no rows yet" in complaint(["compare", str(empty.path)], capsys)
    there = ["compare", str(place.path), "--out", str(tmp_path)]
    assert "is a directory" in complaint(there, capsys)
    before = place.rows.read_bytes()
    for option in ("--out", "--csv", "--markdown"):
        over = ["compare", str(place.path), option, str(place.rows)]
        assert "has the ending of a record" in complaint(over, capsys)
    assert place.rows.read_bytes() == before
    same = ["compare", str(place.path), "--csv", str(tmp_path / "x"), "--markdown"]
    assert "must be different files" in complaint([*same, f"{tmp_path}/./x"], capsys)
    (tmp_path / "file").touch()
    there = ["compare", str(place.path), "--svg", str(tmp_path / "file")]
    assert "is a file; name a directory" in complaint(there, capsys)
    nowhere = ["compare", str(place.path), "--csv", str(tmp_path / "no" / "x.csv")]
    nowhere += ["--svg", str(tmp_path / "figures")]
    assert "there is no directory" in complaint(nowhere, capsys)
    assert not (tmp_path / "figures").exists()
    assert not (place.path / "compare.html").exists()
