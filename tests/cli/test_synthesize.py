from pathlib import Path

import cyclopts
import polars as pl
import pytest

from sce.cli import main
from sce.cli.synthesize import synthesize
from sce.errors import InputError

TINY = ["--items", "200", "--users", "30"]


def run(*arguments: str) -> None:
    app = cyclopts.App(default_parameter=cyclopts.Parameter(negative=()))
    app.default(synthesize)
    app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")


def test_a_log_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my log.parquet"
    run(*TINY, "--out", str(out))
    frame = pl.read_parquet(out)
    assert frame["user_id"].n_unique() == 30
    captured = capsys.readouterr()
    assert f"{out}: {frame.height:,} interactions of 30 users" in captured.out
    assert f"next: sce prepare '{out}' --out '{tmp_path / 'my log'}'" in captured.out
    assert captured.err == f"sce: writing {out}\n"


def test_the_seed_decides_and_short_sequences_are_possible(tmp_path: Path) -> None:
    for name, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        out = str(tmp_path / f"{name}.parquet")
        run(*TINY, "--seed", seed, "--mean-events", "6", "--out", out)
    one, same, other = (
        pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("one", "same", "other")
    )
    assert one.equals(same)
    assert not one.equals(other)
    assert one.group_by("user_id").len()["len"].min() == 3


def test_a_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "log.parquet"
    run(*TINY, "--out", str(out))
    with pytest.raises(InputError, match="exists already"):
        run(*TINY, "--out", str(out))
    run(*TINY, "--seed", "7", "--out", str(out), "--force")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "log.csv"], "give --out an ending .parquet, not log.csv"),
        (["--out", "log.parquet", "--mean-events", "nan"], "--mean-events must be a number"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["synthesize", *options]) == 2
    assert message in capsys.readouterr().err
