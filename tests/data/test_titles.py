import gzip
import json
from pathlib import Path

import polars as pl
import pytest

from sce.cli import main
from sce.data.prepare import prepare
from sce.data.prepared import PreparedDataset
from sce.data.titles import match_titles, read_titles, tell_titles
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
ROWS = [("a", "Apple"), ("b", None), ("c", "Kürbis, <b>"), ("a", "Pear"), ("x", "Plum"), ("d", " ")]
LOG = pl.DataFrame({"user": [1] * 4 + [2] * 4, "item": [*"abcd"] * 2, "time": range(8)})


def write(path: Path, form: str, item: str = "item_id", title: str = "title") -> Path:
    rows = [dict(zip((item, "price", title), (i, 3.5, t), strict=True)) for i, t in ROWS]
    frame, file = pl.DataFrame(rows), path / f"items.{form}"
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        frame.write_parquet(file)
    elif form == "csv.gz":
        file.write_bytes(gzip.compress(frame.write_csv().encode()))
    else:
        file.write_text(frame.write_csv(separator="\t" if form == "tsv" else ","))
    return file


@pytest.mark.parametrize("form", ["csv", "tsv", "csv.gz", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [("item_id", "title"), ("id", "Product Name")])
def test_titles_of_any_format(form: str, names: tuple[str, str], tmp_path: Path) -> None:
    items = Vocabulary.from_strings("abcd")
    titles = match_titles(read_titles(write(tmp_path, form, *names)), items)
    assert titles.texts.decode(range(4)) == ["Apple", "", "Kürbis, <b>", ""]
    assert titles.counts == {"items": 4, "named": 2, "unknown": 1, "several": 1}
    assert tell_titles(titles.counts) == (
        "2 of 4 items have one; 1 id of the file not in the catalogue; 1 id with different titles, "
        "of which the first counts"
    )


def test_integers_and_titles_that_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("movieId,title\n7,1984\n5,300\n7,1984\n")
    titles = match_titles(read_titles(tmp_path / "items.csv"), Vocabulary.from_integers([5, 6, 7]))
    assert titles.texts.decode(range(3)) == ["300", "", "1984"]
    assert titles.counts == {"items": 3, "named": 2, "unknown": 0, "several": 0}


def test_columns_that_cannot_be_found(tmp_path: Path) -> None:
    file = write(tmp_path, "csv", "code", "words")
    with pytest.raises(
        InputError, match=r"no column looks like the item or the title;.*titles_columns=\("
    ):
        read_titles(file)
    assert read_titles(file, ("code", "words")).height == 4
    with pytest.raises(InputError, match="item, title must be different columns"):
        read_titles(file, ("code", "code"))
    with pytest.raises(InputError, match="no such file"):
        read_titles(tmp_path / "none.csv")


def test_titles_are_kept_beside_the_content(tmp_path: Path) -> None:
    plain = prepare(LOG, tmp_path / "plain", quantile=0.5)
    dataset = prepare(LOG, tmp_path / "named", quantile=0.5, titles=write(tmp_path, "csv"))
    assert plain.titles is None
    assert dataset.content_hash == plain.content_hash
    dataset = PreparedDataset.load(dataset.path)
    assert dataset.titles is not None
    assert dataset.titles.decode(range(4)) == ["Apple", "", "Kürbis, <b>", ""]
    with pytest.raises(InputError, match="titles_columns are those of titles, which is not given"):
        prepare(LOG, tmp_path / "other", titles_columns=("a", "b"))


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LOG.write_csv(tmp_path / "log.csv")
    write(tmp_path, "csv", "code", "words")
    command = ["prepare", f"{tmp_path}/log.csv", "--out", f"{tmp_path}/data", "--split", "none"]
    titles = ["--titles", f"{tmp_path}/items.csv"]
    assert main([*command, *titles]) == 2
    assert "name the right ones with --titles-columns ITEM TITLE" in capsys.readouterr().err
    assert main([*command, *titles, "--titles-columns", "code", "words"]) == 0
    shown = capsys.readouterr().out
    assert "titles     2 of 4 items have one; 1 id of" in shown
    assert shown.endswith("/data --like RUN, or --from RUN --epochs N\n")
