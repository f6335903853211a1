import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sce.cli import main
from sce.data import prepared
from sce.data.prepare import PrepareWarning, prepare, remarks
from sce.data.prepared import PreparedDataset
from sce.errors import InputError

Row = tuple[str, str, int]


def make_log(users: int = 30, items: int = 12, seed: int = 0) -> list[Row]:
    """Users come one after another, ten events each, every event at a time of its own."""
    chooser = random.Random(seed)
    return [
        (f"u{user:02}", f"item {chooser.randrange(items):02}", 1_600_000_000 + 50 * user + event)
        for user in range(users)
        for event in range(10)
    ]


def write_csv(path: Path, rows: list[Row]) -> Path:
    path.write_text("user_id,item_id,timestamp\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "log.csv", make_log())


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong command gives."""
    assert main(["prepare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("sce: error: ")]
    assert captured.err.splitlines()[-1:] == lines
    assert "Traceback" not in captured.err
    return lines[0]


def test_a_log_becomes_a_dataset(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data" / "first try"
    arguments = ["--quantile", "0.8", "--min-item-users", "2", "--drop-repeats", "--out", str(out)]
    assert main(["prepare", str(log), *arguments]) == 0
    dataset = PreparedDataset.load(out)
    assert dataset.settings == {
        "drop_repeats": True,
        "min_item_users": 2,
        "min_user_items": 1,
        "iterate": False,
        "split": "temporal",
        "quantile": 0.8,
        "test_history": "after-cut",
    }
    first: dict[str, list[str]] = {}
    for user, item, _ in make_log():
        items = first.setdefault(user, [])
        items += [item] * (item not in items)
    train = {
        dataset.user_ids[int(user)]: dataset.item_ids.decode(dataset.train[i])
        for i, user in enumerate(dataset.train.users)
    }
    assert len(train) == 24
    assert all(first[str(user)] == items for user, items in train.items())

    captured = capsys.readouterr()
    table = [line.split() for line in captured.out.splitlines()]
    assert ["read", "30", "12", "300", "83.3333%"] in table
    assert any(line[:5] == ["items", "with", "at", "least", "2"] for line in table)
    assert ["catalogue", f"{dataset.n_items}", "items"] in table
    assert captured.out.endswith(f"next       sce train '{out}'\n")
    assert "\x1b" not in captured.out + captured.err
    assert captured.err.startswith(f"sce: reading {log}")


def test_the_table_is_kept_with_the_data(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["prepare", str(log), "--split", "leave-one-out", "--out", str(tmp_path / "d")]) == 0
    )
    counts = json.loads((tmp_path / "d" / "dataset.json").read_text())["counts"]
    assert counts["steps"] == [{"name": "read", "users": 30, "items": 12, "interactions": 300}]
    assert counts["train"]["interactions"] == 240
    assert counts["test"] == {"name": "test", "users": 30, "items": 12, "interactions": 300}
    assert counts["cut"] is None
    assert "cut" not in capsys.readouterr().out


def test_a_terminal_sees_a_spinner_with_names_as_they_are(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "[red]"
    assert main(["prepare", str(log), "--quantile", "0.8", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "[red]" in captured.err  # what it says last; before that it may be too quick
    assert f"sce train '{out}'" in captured.out


def test_incomplete_rows_are_left_out_on_request(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.open("a") as file:
        file.write("u99,,1600000000\n,item 01,1600000000\n")
    arguments = [str(log), "--quantile", "0.8", "--out", str(tmp_path / "data")]
    fails(arguments, capsys)
    assert main(["prepare", *arguments, "--drop-incomplete"]) == 0
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "rows without user, item or time: left out 2" in table
    assert "read 30 12 300 83.3333%" in table


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 6), st.text("aäł,'", min_size=1, max_size=3)),
        min_size=20,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(["temporal", "leave-one-out"]),
)
def test_any_order_of_the_rows_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[int, str]],
    chooser: random.Random,
    split: str,
) -> None:
    directory = tmp_path_factory.mktemp("orders")
    rows = [  # users come one after another: some are over before any quantile
        (str(user), f'"{item}"', 1000 + 100 * user + at) for at, (user, item) in enumerate(events)
    ]
    arguments = ["--time-unit", "s", "--split", split]
    arguments += ["--quantile", "0.7"] if split == "temporal" else []
    file = str(write_csv(directory / "a.csv", rows))
    code = main(["prepare", file, *arguments, "--out", str(directory / "a")])
    chooser.shuffle(rows)
    # In another order, in two files, one of them compressed, and into another place.
    write_csv(directory / "b.csv", rows[:7])
    lines = write_csv(directory / "c.csv", rows[7:]).read_bytes()
    (directory / "c.csv.gz").write_bytes(gzip.compress(lines))
    files = [str(directory / "b.csv"), str(directory / "c.csv.gz")]
    assert main(["prepare", *files, *arguments, "--out", str(directory / "b")]) == code
    event(f"exit code {code}")
    if code == 0:
        first, second = (
            {file.name: file.read_bytes() for file in (directory / name).iterdir()} for name in "ab"
        )
        assert first == second
    else:
        assert not (directory / "a").exists()


def test_an_order_that_is_no_accident_is_said_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chooser = random.Random(0)
    rows = [  # twenty events a user, two at each time, the smaller item first
        (f"u{user:03}", f"item {item:02}", 1000 * user + moment)
        for user in range(100)
        for moment in range(10)
        for item in sorted(chooser.sample(range(60), 2))
    ]
    arguments = ["prepare", str(write_csv(tmp_path / "log.csv", rows))]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert "order      53% of steps join events of one time, as in baskets" in captured.out
    assert "Warning" not in captured.err
    order = PreparedDataset.load(tmp_path / "a").order
    assert (order["by"], order["ties"], order["seed"]) == ("time", "keep", None)
    assert order["found"]["ascending_ties"] == 1
    assert order["warning"] in captured.out
    assert "add --ties shuffle; without" in captured.out
    with pytest.warns(PrepareWarning, match="add ties='shuffle'; without"):
        prepare(tmp_path / "log.csv", tmp_path / "b")

    for name, seed in (("c", "1"), ("d", "1"), ("e", "2")):
        shuffled = [*arguments, "--ties", "shuffle", "--seed", seed, "--out", str(tmp_path / name)]
        assert main(shuffled) == 0
    assert "order  " not in capsys.readouterr().out
    first, same, other = (PreparedDataset.load(tmp_path / name) for name in "cde")
    assert first.order | {"warning": None} == order | {
        "ties": "shuffle",
        "seed": 1,
        "warning": None,
    }
    assert np.array_equal(first.train.items, same.train.items)
    assert not np.array_equal(first.train.items, other.train.items)


def test_duplicates_and_few_test_users_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        (f"u{user}", f"i{(user + n) % 7}", user + 2 * n) for user in range(40) for n in range(6)
    ]
    file = write_csv(tmp_path / "log.csv", [*rows, *rows[:3], rows[0]])
    arguments = ["prepare", str(file), "--quantile", "0.7", "--out"]
    assert main([*arguments, str(tmp_path / "a")]) == 0
    printed = capsys.readouterr()
    assert "duplicates 4 rows with user, item and time of an earlier one: kept; " in printed.out
    tested = PreparedDataset.load(tmp_path / "a")
    assert tested.order["duplicates"] == 4
    assert tested.counts["steps"][0]["interactions"] == len(rows) + 4
    assert f"test users {len(tested.test)} of 40 users are left to test on" in printed.out
    assert "--split leave-one-out tests on every user" in printed.out
    assert (
        main(["prepare", str(file), "--split", "leave-one-out", "--out", str(tmp_path / "b")]) == 0
    )
    (told,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("test users")]
    assert told == "test users 40 of 40 users are left to test on, so that metrics are noisy"
    with pytest.warns(PrepareWarning, match="split='leave-one-out' tests on every user"):
        prepare(file, tmp_path / "c", quantile=0.7)


def test_ids_that_look_like_missing_values_are_said(tmp_path: Path) -> None:
    rows = [("NULL" if user == 3 else f"u{user}", "nan" if n == 1 else f"i{user + n}", n)
            for user in range(20) for n in range(5)]  # fmt: skip
    file = write_csv(tmp_path / "log.csv", rows)
    told = r"the user 'NULL' \(3 training events\), the item 'nan' \(20 training events\); if"
    with pytest.warns(PrepareWarning, match=told):
        prepare(file, tmp_path / "a", split="leave-one-out")
    numbers = write_csv(tmp_path / "b.csv", [("1", "2", n) for n in range(9)])
    assert "missing ids" not in remarks(prepare(numbers, tmp_path / "b", split="leave-one-out"))


def test_targets_that_were_had_before_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(f"u{user}", f"i{user + (n % (2 if user < 4 else 9))}", n)
            for user in range(20) for n in range(5)]  # fmt: skip
    file = write_csv(tmp_path / "log.csv", rows)
    assert (
        main(["prepare", str(file), "--split", "leave-one-out", "--out", str(tmp_path / "a")]) == 0
    )
    told = "repeated targets 4 of 20 test targets are in the user's history, and count as"
    assert told in capsys.readouterr().out


def test_a_log_without_times_is_in_the_order_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("a", "ann,x\nbob,y\nann,b\n"), ("b", "ann,a\nbob,z\nbob,y\n")):
        (tmp_path / f"{name}.csv").write_text("user,item\n" + rows)
    files, out = [str(tmp_path / f"{name}.csv") for name in "ab"], tmp_path / "data"
    message = fails([*files, "--out", str(out)], capsys)
    assert message.endswith("--time-column, or take the rows as in order with --order rows")
    for option in ("--split temporal", "--quantile 0.5", "--time-unit s", "--time-column item"):
        fails([*files, "--order", "rows", *option.split(), "--out", str(out)], capsys)
    dataset = prepare(files, out, order="rows")
    assert [dataset.item_ids.decode(dataset.test[i]) for i in range(2)] == [
        ["x", "b", "a"],
        ["y", "z", "y"],
    ]
    assert (dataset.order["by"], dataset.settings["split"]) == ("rows", "leave-one-out")


# --- which values the options get


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 1, False, 0.95, "after-cut")),
        ({"preset": "paper"}, (5, 20, False, 0.95, "after-cut")),
        (
            {"preset": "paper", "min_user_items": 3, "quantile": 0.9, "iterate": True},
            (5, 3, True, 0.9, "after-cut"),
        ),
    ],
)
def test_presets_and_the_options_that_override_them(
    options: dict[str, Any], expected: tuple[object, ...], tmp_path: Path
) -> None:
    random.seed(0)
    events = [(n % 60, random.randrange(40), n + n % 60 * 1800) for n in range(3600)]
    frame = pl.DataFrame(events, schema=["user", "item", "time"], orient="row")
    settings = prepare(frame, tmp_path / "data", **options).settings
    names = ("min_item_users", "min_user_items", "iterate", "quantile", "test_history")
    assert tuple(settings[name] for name in names) == expected
    assert (settings["drop_repeats"], settings["split"]) == (False, "temporal")


@pytest.mark.parametrize("name", ["split", "order", "ties", "preset", "test_history", "time_unit"])
def test_a_word_that_is_no_choice_is_refused(name: str, tmp_path: Path) -> None:
    options: Any = {name: "leave_one_out"}
    with pytest.raises(InputError, match=f"{name} must be one of .*; got 'leave_one_out'"):
        prepare(pl.DataFrame(), tmp_path / "data", **options)
    with pytest.raises(TypeError, match="tyes"):
        prepare(pl.DataFrame(), tmp_path / "data", tyes="shuffle")  # type: ignore[call-arg]


def test_iterating_without_a_filter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^iterate repeats the filters, and none is set"):
        prepare("log.csv", tmp_path / "data", iterate=True)


# --- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out OUT", "INPUT"),
        ("LOG", "--out"),
        ("nowhere.csv --out OUT", "nowhere.csv: no such file"),
        (
            "LOG --out OUT --split leave-one-out --quantile 0.9",
            "--quantile belongs to the temporal",
        ),
        (
            "LOG --out OUT --split leave-one-out --test-history full",
            "--test-history belongs to the",
        ),
        ("LOG --out OUT --min-item-users 99", "item filter: no item has 99 distinct users"),
        ("LOG --out OUT --preset paper", "user filter: no user has 20 distinct items"),
        ("LOG --out OUT --quantile 0", "no training users"),
        ("LOG --out OUT --quantile 1", "no test users"),
        ("LOG --out OUT --quantile 1.5", "between 0 and 1"),
        ("LOG --out OUT --seed 1", "--seed is that of --ties shuffle"),
        ("LOG --out OUT --ties shuffle --seed -1", "0 or more; got -1"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: str, message: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    given = arguments.replace("LOG", str(log)).replace("OUT", str(out)).split()
    assert message in fails(given, capsys)
    assert not out.exists()


def test_what_is_there_is_refused_before_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("dear")
    message = fails([str(tmp_path / "nowhere.csv"), "--out", str(tmp_path / "data")], capsys)
    assert "exists and holds file; choose another directory" in message


def test_force_prepares_again(log: Path, tmp_path: Path) -> None:
    arguments = ["prepare", str(log), "--quantile", "0.8", "--out", str(tmp_path / "data")]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert main([*arguments, "--force", "--split", "temporal"]) == 0


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_full_disk_or_an_interrupt_leaves_nothing(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def write_half(path: Path, array: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(prepared, "write_array", write_half)
    assert main(["prepare", str(log), "--quantile", "0.8", "--out", str(tmp_path / "d")]) == code
    if code == 2:
        assert f"cannot write {tmp_path / 'd'}: no space left" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


def test_without_polars_one_line_says_what_to_install(log: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['polars'] = None; from sce.cli import main; sys.exit(main())"
    for arguments, code in [(["--help"], 0), ([str(log), "--out", str(tmp_path / "d")], 2)]:
        command = [sys.executable, "-c", program, "prepare", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    assert done.stderr == (
        "sce: error: reading logs needs polars, which is not installed; "
        "install it with: pip install 'scalable-cross-entropy[prepare]'\n"
    )
