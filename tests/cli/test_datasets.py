import json
import shlex
from pathlib import Path

import pytest

from sce.cli import main
from sce.cli.datasets import DATASETS, Dataset
from sce.data.formats import FORMATS


def test_every_dataset_is_listed_with_its_numbers_page_and_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(DATASETS) == 7
    for dataset in DATASETS:
        row = next(line for line in lines if line.startswith(dataset.name))
        assert row.split(dataset.name)[1].split()[:3] == [
            f"{count:,}" for count in (dataset.users, dataset.items, dataset.interactions)
        ]
        # Whole lines, however long: they are there to be copied.
        assert f"  {dataset.page}" in lines
        assert f"  {dataset.command}" in lines


def test_every_format_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["datasets"]) == 0
    shown = capsys.readouterr().out.split("What --format knows")[1]
    for known in FORMATS.values():
        assert f"  {known.name} " in shown
        assert known.about in shown


def test_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["datasets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [dataset.name for dataset in DATASETS]
    assert rows[4]["items"] == 173_511
    assert rows[4]["command"] == (
        "sce prepare loc-gowalla_totalCheckins.txt.gz --format gowalla --preset paper "
        "--out data/gowalla"
    )


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset.name)
def test_every_command_is_understood_up_to_the_file_that_is_not_there(
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(dataset.command)
    assert program == "sce"
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (f"sce: error: {dataset.file}: no such file")
    # The format is known too: the next thing amiss is that the file is empty.
    (tmp_path / dataset.file).write_bytes(b"")
    assert main(arguments) == 2
    assert "the file is empty" in capsys.readouterr().err
