import json
from pathlib import Path
from typing import Any

import pytest

from sce.cli import main
from sce.cli import recommend as command
from sce.data.vocabulary import Vocabulary
from sce.recommend import Recommender
from sce.training.run import Run
from tests.complaint import complaint
from tests.tiny_run import make_dataset, make_run

Capture = pytest.CaptureFixture[str]
ITEMS = range(50, 90)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("all")
    vocabularies = Vocabulary.from_integers(ITEMS), Vocabulary.from_integers(range(100, 130))
    return make_run(path / "run", make_dataset(path / "data", *vocabularies), ended=True)


@pytest.fixture(scope="module")
def recommender(run: Run) -> Recommender:
    return Recommender.load(run, device="cpu")


def answers(run: Run, capsys: Capture, *options: str) -> tuple[dict[Any, list[Any]], str]:
    assert main(["recommend", str(run.path), *options, "--format", "jsonl"]) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    return {record["user_id"]: record["items"] for record in records}, captured.err


# --- filters for all


@pytest.mark.parametrize("histories", [True, False])
def test_allow_and_block_for_all(
    histories: bool, run: Run, recommender: Recommender, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "allow.csv").write_text("item_id\n" + "".join(f"{n}\n" for n in range(55, 95)))
    (tmp_path / "block.txt").write_text("60\n61\n")
    options = ["--allow", str(tmp_path / "allow.csv"), "--block", str(tmp_path / "block.txt")]
    given = tmp_path / "given.jsonl"
    given.write_text('{"user_id": "ann", "history": [70]}\n')
    source = ["--histories", str(given)] if histories else ["--keep-seen", "--users", "100"]
    found, err = answers(run, capsys, *options, *source, "-k", "40")
    [items] = found.values()
    assert sorted(items) == [
        n for n in range(55, 90) if n not in (60, 61) and not (histories and n == 70)
    ]
    warning, short = err.splitlines()
    assert warning == (
        "sce: warning: skipped 5 of 40 items of --allow, not in the catalogue (90, 91, 92 ...)"
    )
    assert "got fewer items than were asked for, the fewest 3" in short


def test_an_allow_list_of_another_catalogue(run: Run, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "allow").write_text("plum\npear\n")
    for verb, items in (("recommend", []), ("similar", ["60"])):
        line = complaint([verb, run.path, *items, "--allow", tmp_path / "allow"], capsys)
        assert "none of 2 items of --allow is in the catalogue (plum, pear)" in line


def test_one_standard_input(run: Run, capsys: Capture) -> None:
    for options in (["--allow", "-", "--histories", "-"], ["--allow", "-", "--block", "-"]):
        line = complaint(["recommend", run.path, *options], capsys)
        assert "standard input can be read but once" in line


def test_another_list_is_another_command(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("60\n")
    keys, usual = set(), command._key

    def remember(*given: Any) -> str | None:
        keys.add(key := usual(*given))
        return key

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_key", remember)
        for number, options in enumerate((["--allow"], ["--block"], [])):
            names = [str(tmp_path / "a")] * len(options)
            out = ["--out", str(tmp_path / f"{number}.csv"), "-k", "1"]
            assert main(["recommend", str(run.path), *options, *names, *out]) == 0
    assert len(keys) == 3


# --- wishes of a line


def test_a_line_has_wishes_of_its_own(run: Run, tmp_path: Path, capsys: Capture) -> None:
    lines = [
        {"user_id": "all", "history": [70]},
        {"user_id": "few", "history": [70], "k": 2, "allow": None},
        {"user_id": "own", "history": [70], "allow": [60, "61", 70, "plum"], "block": [61]},
        {"user_id": "seen", "history": [70], "allow": [60, 70], "keep_seen": True},
        {"user_id": "none", "history": [70], "allow": []},
    ]
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, err = answers(run, capsys, "--histories", str(given), "-k", "5")
    assert [len(items) for items in found.values()] == [5, 2, 1, 2, 0]
    assert found["few"] == found["all"][:2]
    assert found["own"] == [60]
    assert set(found["seen"]) == {60, 70}
    short, skipped = err.splitlines()
    assert short.startswith(
        "sce: 3 of 5 histories got fewer items than were asked for, the fewest 0"
    )
    assert skipped == "sce: skipped 1 item of lists of histories, not in the catalogue (plum)"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ('"allow": 5', "line 1: allow must be a list of ids; got 5"),
        ('"block": {"a": 1}', "line 1: block must be a list of ids"),
        ('"block": [true]', "line 1: block: ids are integers or strings; got True"),
        ('"k": 1.5', "line 1: k must be a whole number"),
        ('"k": true', "line 1: k must be a whole number"),
        ('"k": 0', "line 1: k must be at least 1"),
        ('"k": 41', "line 1: k is 41, but the catalogue has only 40 items"),
        ('"blok": [61]', "line 1: the key 'blok' is none of allow, block, history, k, "),
        ('"keep_seen": 1', "line 1: keep_seen must be True or False"),
    ],
)
def test_wishes_that_cannot_be(
    wish: str, message: str, run: Run, tmp_path: Path, capsys: Capture
) -> None:
    given = tmp_path / "given.jsonl"
    given.write_text('{"history": [60], ' + wish + "}\n")
    line = complaint(["recommend", run.path, "--histories", given], capsys)
    assert message.partition(".*")[0] in line
    assert message.partition(".*")[2] in line


def test_a_line_without_an_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sce.data.lines._LONGEST_LINE", 100)
    (tmp_path / "lines").write_bytes(b"\0" * 1000)
    arguments = ["recommend", str(run.path), "--histories", str(tmp_path / "lines")]
    assert "line 1: longer than 100 bytes" in complaint(arguments, capsys)
