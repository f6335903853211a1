import csv
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from sce import progress
from sce.cli import main
from sce.cli import recommend as command
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.models.sasrec import SASRec
from sce.recommend import Id, Recommender
from sce.training.checkpoint import write_tensors
from sce.training.run import Run
from tests.complaint import complaint
from tests.test_recommend import NAMES
from tests.test_recommend import dataset as dataset  # fixtures
from tests.test_recommend import recommender as recommender
from tests.test_recommend import run as run
from tests.tiny_run import MODEL, make_dataset, make_run

Capture = pytest.CaptureFixture[str]
HEADER = "user_id,item_id,score,rank,source"


def say(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def lines_of(histories: dict[Id, list[Id]]) -> str:
    return "".join(
        json.dumps({"user_id": user, "history": history}) + "\n"
        for user, history in histories.items()
    )


def read_csv(text: str) -> list[tuple[str, str, float, int]]:
    """Rows of users whose items the model chose."""
    header, *rows = csv.reader(io.StringIO(text))
    assert ",".join(header) == HEADER
    return [
        (user, item, float(score), int(rank))
        for user, item, score, rank, source in rows
        if source == "model"
    ]


def rows_for(recommender: Recommender, histories: dict[Id, list[Id]], k: int = 10) -> list[Any]:
    return [
        (user, item, pytest.approx(float(score), rel=1e-5), rank)
        for user, history in histories.items()
        for found in recommender.recommend([history], k)
        for item, score, rank in zip(found.items, found.scores, found.ranks, strict=True)
    ]


HISTORIES: dict[Id, list[Id]] = {"ann": [NAMES[1], NAMES[2]], "żółw, b": [NAMES[3]] * 9}


def test_histories_from_stdin_to_stdout(
    run: Run, recommender: Recommender, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    say(monkeypatch, lines_of(HISTORIES))
    assert main(["recommend", str(run.path), "--histories", "-", "-k", "3"]) == 0
    captured = capsys.readouterr()
    assert read_csv(captured.out) == rows_for(recommender, HISTORIES, k=3)
    assert captured.err == ""


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_histories_from_a_file_to_a_file(
    run: Run, recommender: Recommender, tmp_path: Path, suffix: str, capsys: Capture
) -> None:
    given, out = tmp_path / "given.jsonl", tmp_path / f"found.{suffix}"
    given.write_text("\n" + lines_of(HISTORIES) + "  \n", encoding="utf-8")
    arguments = ["recommend", str(run.path), "--histories", str(given), "--out", str(out)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == ""
    wanted = rows_for(recommender, HISTORIES)
    if suffix == "csv":
        assert read_csv(out.read_text(encoding="utf-8")) == wanted
    elif suffix == "jsonl":
        records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [list(record) for record in records] == [
            ["user_id", "items", "scores", "source"]
        ] * 2
        assert [
            (record["user_id"], item, score, rank)
            for record in records
            for rank, (item, score) in enumerate(
                zip(record["items"], record["scores"], strict=True), 1
            )
        ] == wanted
    else:
        frame = pl.read_parquet(out)
        assert frame.drop("source").rows() == wanted
        assert frame.schema == {
            "user_id": pl.String,
            "item_id": pl.String,
            "score": pl.Float32,
            "rank": pl.Int32,
            "source": pl.String,
        }
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, given.name]


def test_keep_seen(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    found = []
    for option in ([], ["--keep-seen"]):
        say(monkeypatch, lines_of({"ann": [*NAMES[:30]]}))
        arguments = ["recommend", str(run.path), "--histories", "-", "-k", "40", *option]
        assert main(arguments) == 0
        found.append({item for _, item, _, _ in read_csv(capsys.readouterr().out)})
    assert found == [set(NAMES[30:]), set(NAMES)]


def test_without_a_user_id_the_line_has_a_number(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    line = json.dumps({"history": NAMES[:2]})
    null = json.dumps({"user_id": None, "history": NAMES[:2]})
    say(monkeypatch, f"{line}\n\n{null}\n{line}")  # the last line without its end
    assert main(["recommend", str(run.path), "--histories", "-", "-k", "1"]) == 0
    assert [user for user, *_ in read_csv(capsys.readouterr().out)] == ["1", "3", "4"]


# --- what is wrong with histories


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"history": [1], "history": [2]}', "line 3: the key 'history' occurs twice"),
        (b'{"history": [1, }', "line 3: not JSON: .* at column 17"),
        (b'{"history": ["a', "line 3: not JSON: Unterminated string starting at column 14"),
        (b"[1, 2]", r'line 3: expected \{"user_id": .*\}, got \[1, 2\]'),
        (b'{"user_id": 5}', 'line 3: expected .* got {"user_id": 5}'),
        (b'{"history": ["a", 1.5]}', "line 3: history: ids are integers or strings; got 1.5"),
        (b'{"history": [true]}', "line 3: .*got True"),
        (b'{"user_id": {}, "history": ["a"]}', "line 3: user_id: ids .* got {}"),
        (b'{"user_id": "\\ud800", "history": ["a"]}', "line 3: .*surrogates"),
        (b'{"user_id": "\xff", "history": ["a"]}', "line 3: not UTF-8"),
        (b'{"history": ' + b"[" * 100_000, "line 3: .*nested too deeply"),
    ],
)
def test_a_malformed_line_is_named(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    line: bytes,
    message: str,
) -> None:
    say(monkeypatch, lines_of(HISTORIES).encode() + line + b"\n")
    out = tmp_path / "found.csv"
    arguments = ["recommend", str(run.path), "--histories", "-", "--out", str(out)]
    error = complaint(arguments, capsys)
    assert "standard input" in error
    assert re.search(message, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_stdin(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture, text: str
) -> None:
    say(monkeypatch, text)
    arguments = ["recommend", str(run.path), "--histories", "-"]
    assert "there are no histories: the input is empty" in complaint(arguments, capsys)


def test_a_missing_file(run: Run, capsys: Capture) -> None:
    arguments = ["recommend", str(run.path), "--histories", "nowhere.jsonl"]
    assert "cannot read nowhere.jsonl" in complaint(arguments, capsys)


def test_what_is_unknown_is_reported_and_the_rest_goes_on(
    run: Run, recommender: Recommender, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    histories: dict[Id, list[Id]] = {
        "ann": [NAMES[1], "plum", "pear"],
        "bob": ["plum"],
        "cat": [],
        "dan": [NAMES[2], 7, 8],
    }
    say(monkeypatch, lines_of(histories))
    assert main(["recommend", str(run.path), "--histories", "-"]) == 0
    captured = capsys.readouterr()
    usable: dict[Id, list[Id]] = {"ann": [NAMES[1]], "dan": [NAMES[2]]}
    assert read_csv(captured.out) == rows_for(recommender, usable)
    assert captured.err == (
        "sce: the most popular items for 2 of 4 histories, marked so: none of their items is in "
        "the catalogue (bob: plum; cat: empty)\n"
        "sce: skipped 4 items of histories, not in the catalogue (plum, pear, 7 ...)\n"
    )


def test_fewer_items_than_asked_for_are_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    histories: dict[Id, list[Id]] = {
        "ann": [*NAMES[:4]],
        "bob": [NAMES[1], "plum"],
        "cat": [*NAMES],
    }
    say(monkeypatch, lines_of(histories))
    assert main(["recommend", str(run.path), "--histories", "-", "-k", "39"]) == 0
    assert capsys.readouterr().err == (
        "sce: 2 of 3 histories got fewer items than were asked for, the fewest 0: the others they "
        "may not get (allow, block), or have had before and get with --keep-seen alone\n"
        "sce: skipped 1 item of histories, not in the catalogue (plum)\n"
    )
    say(monkeypatch, lines_of({"ann": [*NAMES[:4]]}))
    assert main(["recommend", str(run.path), "--histories", "-", "-k", "39", "--keep-seen"]) == 0
    assert capsys.readouterr().err == ""


def test_nothing_usable_is_an_error_where_what_is_popular_is_not_known(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    unknown = replace(Run.open(run.path), popularity=None)
    monkeypatch.setattr(Run, "open", lambda *_: unknown)
    histories: dict[Id, list[Id]] = {"bob": ["plum"], "cat": ["pear", 5, 6, 7]}
    for options in ([], ["--out", str(tmp_path / "found.csv")]):
        say(monkeypatch, lines_of(histories))
        assert main(["recommend", str(run.path), "--histories", "-", *options]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            "sce: error: nothing to recommend for 2 histories: none of their items is in the "
            "catalogue (bob: plum; cat: pear, 5, 6 ...)\n"
        )
    assert list(tmp_path.iterdir()) == []


# --- users of the dataset


def test_all_users(
    run: Run, recommender: Recommender, dataset: PreparedDataset, capsys: Capture
) -> None:
    assert main(["recommend", str(run.path), "-k", "2"]) == 0
    captured = capsys.readouterr()
    found = dict(recommender.stream_users(dataset, k=2))
    assert [(user, item, rank) for user, item, _, rank in read_csv(captured.out)] == [
        (str(user), item, rank)
        for user, one in found.items()
        for rank, item in enumerate(one.items, 1)
    ]
    assert captured.err == ""


def test_some_users_keep_their_kind_of_id(
    run: Run, dataset: PreparedDataset, tmp_path: Path, capsys: Capture
) -> None:
    out, listed = tmp_path / "found.parquet", tmp_path / "users.txt"
    options = ["--users", "129", "7", "100", "-k", "1", "--out", str(out)]
    assert main(["recommend", str(run.path), *options]) == 0
    assert pl.read_parquet(out)["user_id"].to_list() == [129, 100]
    reported = "sce: skipped 1 of 3 users: they are not in the log (7)\n"
    assert capsys.readouterr().err == reported + "sce: wrote 2 rows for 2 users\n"
    listed.write_bytes("\ufeff129\r\n\n7\n100".encode())
    options = ["--users-file", str(listed), "-k", "1", "--format", "jsonl"]
    assert main(["recommend", str(run.path), *options]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["user_id"] for line in captured.out.splitlines()] == [129, 100]
    assert captured.err == reported


def test_no_known_user(run: Run, tmp_path: Path, capsys: Capture) -> None:
    line = complaint(["recommend", str(run.path), "--users", "1", "2", "3", "4"], capsys)
    assert "nothing to recommend for 4 users: they are not in the log (1, 2, 3 ...)" in line
    (tmp_path / "empty").write_text("\n")
    arguments = ["recommend", str(run.path), "--users-file", str(tmp_path / "empty")]
    assert "there are no users" in complaint(arguments, capsys)
    (tmp_path / "latin").write_bytes(b"100\n\xff\n")
    arguments = ["recommend", str(run.path), "--users-file", str(tmp_path / "latin")]
    assert "latin, line 2: not UTF-8" in complaint(arguments, capsys)


def test_the_dataset_may_have_moved(tmp_path: Path, capsys: Capture) -> None:
    items, users = Vocabulary.from_strings(NAMES), Vocabulary.from_strings(["ann", "bob", "cat"])
    made = make_run(tmp_path / "run", make_dataset(tmp_path / "data", items, users), ended=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert "--data DIR" in complaint(["recommend", str(made.path)], capsys)
    moved = ["recommend", str(made.path), "--data", str(tmp_path / "moved")]
    assert main(moved) == 0
    assert {user for user, *_ in read_csv(capsys.readouterr().out)} == {"ann", "bob", "cat"}
    make_dataset(tmp_path / "other", items, Vocabulary.from_strings(["ann", "bob", "dan"]))
    line = complaint(["recommend", str(made.path), "--data", str(tmp_path / "other")], capsys)
    assert "; give that one" in line


# --- options


def test_k_larger_than_the_catalogue_names_both(run: Run, capsys: Capture) -> None:
    for source in (["--histories", "-"], []):
        line = complaint(["recommend", str(run.path), "-k", "41", *source], capsys)
        assert "k is 41, but the catalogue has only 40 items" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--users", "1", "--histories", "-"], "--users and --histories exclude each other"),
        (["--users", "1", "--users-file", "-"], "--users and --users-file exclude each other"),
        (["--histories", "-", "--data", "data"], "leave out --data"),
        (["--users"], "--users names nobody"),
        (["--users", __file__], f"is a file: --users-file {__file__}"),
        (["--out", "found.txt"], "found.txt ends in none of .csv, .jsonl, .parquet"),
        (["--out", "."], "is not a file"),
        (["--out", "nowhere/found.csv"], "there is no directory nowhere"),
        (["--format", "parquet"], "--out FILE.parquet"),
        (["--format", "xml"], "xml"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["-k", "0"], "k must be at least 1"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_options_that_cannot_be(
    run: Run, capsys: Capture, options: list[str], message: str
) -> None:
    assert message in complaint(["recommend", str(run.path), *options], capsys)


def test_a_missing_run(tmp_path: Path, capsys: Capture) -> None:
    assert "does not exist" in complaint(["recommend", str(tmp_path / "nowhere")], capsys)
    assert "is not a run" in complaint(["recommend", str(tmp_path)], capsys)


def test_a_file_that_is_there_is_kept(run: Run, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "found.csv"
    out.write_text("dear")
    arguments = ["recommend", str(run.path), "--users", "100", "--out", str(out)]
    assert "--force" in complaint(arguments, capsys)
    assert out.read_text() == "dear"
    assert main([*arguments, "--force"]) == 0
    assert out.read_text().startswith(HEADER)


# --- to go on where one was interrupted


def ctrl_c() -> None:
    raise KeyboardInterrupt


@contextmanager
def interrupted_after(
    users: int, saved_every: int = 8, by: Callable[[], Any] = ctrl_c
) -> Iterator[list[Id]]:
    """Raise Ctrl-C in the middle of the work; gives the users that were counted."""
    counted: list[Id] = []
    usual = command.Account.count

    def count(account: Any, user: Id, found: Any) -> None:
        if len(counted) == users:
            by()
        counted.append(user)
        usual(account, user, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_SAVED_EVERY", saved_every)
        patch.setattr(command.Account, "count", count)
        yield counted


def test_rows_of_slow_users_are_kept_by_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments = ["recommend", str(run.path), "--batch-size", "5", "--out", str(tmp_path / "a.csv")]
    monkeypatch.setattr(command, "_SAVED_AFTER", 0)
    with interrupted_after(12, saved_every=1000):
        assert main(arguments) == 130
    assert main(arguments) == 0
    assert "going on after 10 users" in capsys.readouterr().err


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_says_what_is_kept(
    number: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments = ["recommend", str(run.path), "--batch-size", "5", "--out", str(tmp_path / "a.csv")]
    monkeypatch.setattr(command, "_SAVED_AFTER", 0)
    with interrupted_after(12, by=lambda: os.kill(os.getpid(), number)):
        assert main(arguments) == 128 + number
    kept = "what was written is kept: the same command goes on with it"
    assert capsys.readouterr().err.endswith(f"sce: {kept}\nsce: interrupted\n")
    assert signal.getsignal(number) is signal.SIG_DFL
    assert main(arguments) == 0
    assert "going on after 10 users" in capsys.readouterr().err


def source_of(kind: str, tmp_path: Path) -> list[str]:
    if kind == "all":
        return []
    given = tmp_path / "given"
    histories: dict[Id, list[Id]] = {n: [NAMES[n], "plum"] for n in range(20)}
    histories[20] = ["pear"]
    text = "\n".join(["7", *map(str, range(100, 130))])
    given.write_text(lines_of(histories) if kind == "--histories" else text)
    return [kind, str(given)]


@pytest.mark.parametrize("kind", ["all", "--users-file", "--histories"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_the_same_command_goes_on(
    run: Run, tmp_path: Path, suffix: str, kind: str, capsys: Capture
) -> None:
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"found.{suffix}"
    arguments = ["recommend", str(run.path), *source_of(kind, tmp_path), "--batch-size", "1"]
    with interrupted_after(99) as everybody:
        assert main([*arguments, "--out", str(whole)]) == 0
    lines = capsys.readouterr().err
    arguments += ["--out", str(out)]
    for stop, begun in ((5, 0), (19, 0), (3, 16)):
        with interrupted_after(stop) as counted:
            assert main(arguments) == 130
        assert counted == everybody[begun : begun + stop]
        err = capsys.readouterr().err
        assert ("the same command goes on" in err) == (stop != 5)
        assert not out.exists()
    with interrupted_after(99) as counted:
        assert main(arguments) == 0
    assert counted == everybody[16:]
    many = "histories" if kind == "--histories" else "users"
    assert capsys.readouterr().err == f"sce: going on after 16 {many}\n{lines}"
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} <= {whole.name, out.name, "given"}


@pytest.mark.parametrize(
    "change", [["-k", "3"], ["--keep-seen"], ["--force"], ["weights"], ["given"]]
)
def test_another_command_begins_anew(
    dataset: PreparedDataset, tmp_path: Path, change: list[str], capsys: Capture
) -> None:
    run, out = make_run(tmp_path / "run", dataset, ended=True), tmp_path / "found.csv"
    source = source_of("--users-file", tmp_path)
    arguments = ["recommend", str(run.path), *source, "--batch-size", "1", "--out", str(out)]
    with interrupted_after(19):
        assert main(arguments) == 130
    if change == ["weights"]:
        write_tensors(
            run.best_weights,
            SASRec(dataset.n_items, MODEL, seed=2).state_dict(),
            {"run": run.identity},
        )
    elif change == ["given"]:
        Path(source[1]).write_text("\n".join(map(str, range(101, 130))))
    else:
        arguments += change
    with interrupted_after(99) as counted:
        assert main(arguments) == 0
    assert len(counted) == (29 if change == ["given"] else 31)
    assert ("beginning anew" in capsys.readouterr().err) == (change != ["--force"])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_full_disk_is_one_line_and_what_was_written_stays(
    run: Run, tmp_path: Path, suffix: str, capsys: Capture
) -> None:
    whole, out = tmp_path / f"whole.{suffix}", tmp_path / f"found.{suffix}"
    arguments = ["recommend", str(run.path), "--batch-size", "1", "--out"]
    with interrupted_after(99):
        assert main([*arguments, str(whole)]) == 0
        capsys.readouterr()
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        most = 6_000 if suffix == "parquet" else whole.stat().st_size - 9  # its text is longer
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
        try:
            assert main([*arguments, str(out)]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        kept, error = capsys.readouterr().err.splitlines()
        assert "the same command goes on" in kept
        assert error.startswith(f"sce: error: cannot write {out}: ")
        assert main([*arguments, str(out)]) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_a_kept_file_that_was_altered_is_not_gone_on_with(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    arguments = ["recommend", str(run.path), "--batch-size", "1", "--out", str(out)]
    partial = tmp_path / ".found.csv.partial"
    for name, content in (("found.csv", "x"), ("state.json", "{}")):
        with interrupted_after(19):
            assert main(arguments) == 130
        (partial / name).write_text(content)
        (partial / ".state.json.partial").mkdir()  # of a kill while the state was being written
        codes = [main(arguments), main([*arguments, "--force"])]
        assert codes == ([2, 0] if name == "found.csv" else [0, 0])
        assert len(read_csv(out.read_text())) == 300
        out.unlink()


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_one_line(
    stream: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    say(monkeypatch, lines_of(HISTORIES))
    monkeypatch.setattr(sys, stream, None)
    line = complaint(["recommend", str(run.path), "--histories", "-"], capsys)
    assert f"standard {stream.removeprefix('std')}put is closed; name a file" in line


@pytest.mark.parametrize("verb", ["evaluate", "recommend"])
def test_without_a_terminal_there_are_lines_now_and_then(
    verb: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(progress, "_FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    assert main([verb, str(run.path), "--batch-size", "8", "--device", "cpu"]) == 0
    lines = capsys.readouterr().err.splitlines()
    doing, of = ("evaluating sce", 20) if verb == "evaluate" else ("recommending", 30)
    assert re.match(rf"sce: {doing}: 1?\d of {of} users  .*left", lines[1])


def test_rows_are_utf_8_where_the_terminal_is_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, lines_of(HISTORIES | {"ł": ["ż"]}))
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, "ascii", "backslashreplace"))
    assert main(["recommend", str(run.path), "--histories", "-"]) == 0
    assert '"żółw, b",' in out.getvalue().decode()
    assert rb"(\u0142: \u017c)" in err.getvalue()


@pytest.mark.timeout(60)
def test_a_reader_that_goes_away(run: Run) -> None:
    program = "import sys; from sce.cli import main; sys.exit(main())"
    options = ["recommend", str(run.path), "--histories", "-", "--batch-size", "8"]
    command = [sys.executable, "-c", program, *options]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(lines_of({n: [NAMES[n % 40]] for n in range(100)}))
        process.stdin.flush()
        # The input has not ended, and rows come already.
        assert process.stdout.readline() == f"{HEADER}\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
