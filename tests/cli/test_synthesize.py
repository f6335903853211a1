import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from sce.cli import main
from sce.data import synthetic
from sce.data.synthetic import SyntheticSettings, generate
from sce.data.synthetic import titles as make_titles
from tests.complaint import complaint

TINY = ["synthesize", "--items", "200", "--users", "50"]


def test_a_log_is_written_block_by_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "BLOCK_USERS", 7)
    out = tmp_path / "new" / "my log.parquet"
    assert main([*TINY, "--out", str(out)]) == 0
    frame = pl.read_parquet(out)
    blocks = zip(*generate(SyntheticSettings(items=200, users=50)), strict=True)
    assert frame.columns == ["user_id", "item_id", "timestamp"]
    assert all(map(np.array_equal, frame.get_columns(), map(np.concatenate, blocks)))
    assert list(out.parent.iterdir()) == [out]
    captured = capsys.readouterr()
    assert f"{out}: {frame.height:,} interactions of 50 users" in captured.out
    assert f"next: sce prepare '{out}' --out '{out.with_suffix('')}'" in captured.out
    assert captured.err == f"sce: writing {out}\n"


def test_the_seed_decides_and_short_sequences_are_possible(tmp_path: Path) -> None:
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        out = str(tmp_path / f"{name}.parquet")
        assert main([*TINY, "--seed", seed, "--mean-events", "6", "--out", out]) == 0
    one, same, other = (
        pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("one", "same", "other")
    )
    assert one.equals(same)
    assert not one.equals(other)
    assert one.group_by("user_id").len()["len"].min() == 3


def test_a_file_is_replaced_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "log.parquet"
    out.write_text("precious")
    assert "log.parquet exists already; " in complaint([*TINY, "--out", out], capsys)
    assert out.read_text() == "precious"
    both = [*TINY, "--force", "--out", str(out), "--titles", str(out)]
    assert "name two files" in complaint(both, capsys)
    assert out.read_text() == "precious"
    assert main([*TINY, "--out", str(out), "--force"]) == 0
    assert pl.read_parquet(out).height > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "log.csv"], "give --out an ending .parquet, not log.csv"),
        (["--out", "dir.parquet"], "dir.parquet is a directory"),
        (["--out", "dir.parquet/file/log.parquet"], "cannot write"),
        (["--out", "log.parquet", "--mean-events", "1e9"], "of memory, and"),
        (["--out", "log.parquet", "--mean-events", "nan"], "--mean-events must be a number"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dir.parquet").mkdir()
    Path("dir.parquet/file").touch()
    assert main([*TINY, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (pl.exceptions.ComputeError("IO error: No space left on device (os error 28)"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_nothing_remains_of_a_file_that_failed(
    error: BaseException,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(frame: pl.LazyFrame, path: Path) -> Any:
        path.write_text("half of it")
        raise error

    monkeypatch.setattr(pl.LazyFrame, "sink_parquet", half)
    assert main([*TINY, "--out", str(tmp_path / "log.parquet")]) == code
    assert (code == 2) == ("no space left on the disk; free some" in capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_nothing_remains_where_the_disk_takes_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code = main([*TINY, "--out", str(tmp_path / "log.parquet")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 2
    assert error.startswith("sce: error: cannot write")
    assert "File too large" in error
    assert list(tmp_path.iterdir()) == []


def test_every_item_has_a_title_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_AT_ONCE", 70)
    out, titles = tmp_path / "log.parquet", tmp_path / "new" / "titles.csv"
    assert main([*TINY, "--out", str(out), "--titles", str(titles)]) == 0
    assert f"--titles {titles} --out " in capsys.readouterr().out.replace("'", "")
    frame = pl.read_csv(titles)
    assert frame.columns == ["item_id", "title"]
    assert frame["item_id"].sort().to_list() == [*range(200)]
    assert frame["title"].n_unique() == 200
    capsys.readouterr()
    again = [*TINY, "--out", str(tmp_path / "other.parquet"), "--titles", str(titles)]
    assert "titles.csv exists already; " in complaint(again, capsys)
    assert not (tmp_path / "other.parquet").exists()


def test_titles_are_distinct_when_words_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ("_ADJECTIVES", "_PLACES", "_THINGS"):
        monkeypatch.setattr(synthetic, words, ["red", "blue"])
    names = [name for _, some in make_titles(SyntheticSettings(items=1750)) for name in some]
    assert len({*names}) == len(names) == 1750


def test_items_that_follow_each_other_are_things_of_one_kind() -> None:
    settings = SyntheticSettings(items=2000, users=50)
    named = dict(zip(*next(make_titles(settings)), strict=True))
    (block,) = generate(settings)
    kinds = [named[item].split()[1:3] for item in block.items.tolist()]
    same = [a == b for a, b in pairwise(kinds)]
    assert sum(same) > 0.6 * len(same)
