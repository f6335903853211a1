from pathlib import Path

import polars as pl
import pytest

from sce.cli.lists import offered, read_items
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

FILES = {
    "items.txt": b"\xef\xbb\xbf60\r\n\n61\n",
    "items": b"60\n61",
    "items.csv": b"price,Item ID\n1,60\n2,61\n",
    "items.tsv": b"sku\tname\n60\ta\n61\tb\n",
    "items.jsonl": b'{"product_id": 60, "x": 1}\n{"product_id": 61}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_items(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    listed = read_items(tmp_path / name, "--allow")
    assert listed is not None
    assert list(map(str, listed)) == ["60", "61"]


def test_items_may_be_called_as_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item_id,ref\n1,60\n2,61\n")
    for column, expected in (("ref", [60, 61]), ("other", [1, 2]), (None, [1, 2])):
        assert read_items(tmp_path / "a.csv", "--allow", column) == expected


def test_a_table_with_a_stock_of_0_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    for text, column, rows in (
        ("sku,qty\n0,3\n8,0\n9,0\n", None, "2 rows with qty 0"),
        ("ref,stock\na,0.0\nb,1.5\n", "ref", "1 row with stock 0"),
        ("sku,qty\n0,3\n8,1\n", "ref", ""),
        ("sku,price\n0,0\n", None, ""),
    ):
        file.write_text(text)
        read_items(file, "--block", column)
        assert capsys.readouterr().err == ""
        read_items(file, "--allow", column)
        said = capsys.readouterr().err
        assert f"every row counts as allowed, also {rows};" in said if rows else said == ""


def test_parquet_and_text(tmp_path: Path) -> None:
    pl.DataFrame({"x": [1.5, 2, 3], "asin": ["B1", None, "B3"]}).write_parquet(
        tmp_path / "a.parquet"
    )
    assert read_items(tmp_path / "a.parquet", "--allow") == ["B1", "B3"]
    assert read_items(None, "--allow") is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items.txt", "\n \n", r"items.txt \(--allow\) names no item"),
        ("items.csv", "60\n61\n", "header line missing.*one id a line into a .txt file"),
        ("items.csv", "", "empty"),
        ("items.csv", "item,sku\n1,2\n", "could all be the item; choose one with the header"),
        ("items.csv", "a,b\n1,2\n", "name the right one with the header item_id, or write one id"),
    ],
)
def test_files_without_items(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_items(tmp_path / name, "--allow")


def test_what_lists_leave_is_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock, recalled = tmp_path / "stock.txt", tmp_path / "recalled.csv"
    stock.write_text("30\n10\n99\n40\n")
    recalled.write_text("item_id\n30\n")
    ids = Vocabulary.from_integers([10, 20, 30, 40])
    for lists, expected in [((stock, recalled), [0, 3]), ((None, recalled), [0, 1, 3])]:
        left = offered(ids, *lists)
        assert left is not None
        assert left.tolist() == expected
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("offers 2 of 4 items; 1 id of the lists not in the catalogue")
    assert lines[1].endswith("offers 3 of 4 items")
    assert offered(ids, None, None) is None
    recalled.write_text("item_id\n30\n10\n40\n")
    with pytest.raises(InputError, match="no item of the catalogue is left by --allow and --block"):
        offered(ids, stock, recalled)
