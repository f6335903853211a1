import gzip
from pathlib import Path

import pytest

from sce.data.columns import Columns, find_columns
from sce.data.formats import FORMATS, choose_format, find_files
from sce.data.interactions import Interactions
from sce.data.reading import read_interactions
from sce.errors import InputError

# A few lines of each published file, written here in its format: the events that are in them, and
# the name under which the owners publish the file.
SAMPLES = {
    "gowalla": (
        "loc-gowalla_totalCheckins.txt",
        "0\t2010-03-02T07:00:09Z\t48.1371079183\t11.5753822302\t70012\n"
        "0\t2010-03-01T18:30:00Z\t47.3768866432\t8.5416943210\t615\n"
        "7\t2010-02-28T23:59:59Z\t59.9138688125\t10.7522454101\t70012\n",
        [(0, 615, 1267468200), (0, 70012, 1267513209), (7, 70012, 1267401599)],
    ),
    "beeradvocate": (
        "beer_reviews.csv",
        "brewery_id,brewery_name,review_time,review_overall,review_aroma,review_appearance,"
        "review_profilename,beer_style,review_palate,review_taste,beer_name,beer_abv,beer_beerid\n"
        '10,"Two Towers, Brewing",1230000001,1.5,2,2.5,anna,Altbier,1.5,1.5,"Say ""Ale""",5,479\n'
        "10,Two Towers,1230000002,3,2.5,3,,Altbier,3,3,Red Moon,6.2,482\n"
        "11,Kölsch Haus,1230000003,3,2.5,3,Günther,Kölsch,3,3,Black Horse,,479\n",
        [("Günther", 479, 1230000003), ("anna", 479, 1230000001)],
    ),
    "behance": (
        "Behance_appreciate_1M",
        "4001 00000123 1300000002\n4002 00000045 1300000003\n4001 00000045 1300000001\n",
        [
            (4001, "00000045", 1300000001),
            (4001, "00000123", 1300000002),
            (4002, "00000045", 1300000003),
        ],
    ),
    "amazon-ratings": (
        "ratings_Kindle_Store.csv",
        "AZZZUSER000002,1000000001,5.0,1400000000\nAZZZUSER000001,B00FAKE001,4.0,1390000000\n",
        [
            ("AZZZUSER000001", "B00FAKE001", 1390000000),
            ("AZZZUSER000002", "1000000001", 1400000000),
        ],
    ),
    "amazon-ratings-2018": (
        "Kindle_Store.csv",
        "1000000002,AZZZUSER000003,5.0,1410000000\nB00FAKE001,AZZZUSER000003,4.0,1409999900\n",
        [
            ("AZZZUSER000003", "B00FAKE001", 1409999900),
            ("AZZZUSER000003", "1000000002", 1410000000),
        ],
    ),
    "amazon-reviews": (
        "reviews_Beauty_5.json",
        '{"reviewerID": "AZZZUSER000004", "asin": "7000000003", "reviewerName": "Ann \\"A\\"", '
        '"helpful": [3, 4], "reviewText": "Too\\nsmall.", "overall": 1.0, "summary": "no", '
        '"unixReviewTime": 1391126400, "reviewTime": "01 31, 2014"}\n'
        '{"reviewerID": "AZZZUSER000004", "asin": "B00FAKE002", "helpful": [0, 0], '
        '"reviewText": "", "overall": 3.0, "unixReviewTime": 1391040000, '
        '"reviewTime": "01 30, 2014"}\n',
        [
            ("AZZZUSER000004", "B00FAKE002", 1391040000),
            ("AZZZUSER000004", "7000000003", 1391126400),
        ],
    ),
    "yelp": (
        "yelp_academic_dataset_review.json",
        '{"review_id":"review-one-xxx","user_id":"user-_one_-xxx","business_id":"a-business-xx",'
        '"stars":3.0,"useful":0,"funny":0,"cool":0,"text":"Fine.","date":"2017-05-06 07:08:09"}\n'
        '{"review_id":"review-two-xxx","user_id":"_user-two-xxxx","business_id":"a-business-xx",'
        '"stars":5.0,"useful":1,"funny":0,"cool":1,"text":"Nice","date":"2011-10-09 08:07:06"}\n',
        [
            ("_user-two-xxxx", "a-business-xx", 1318147626),
            ("user-_one_-xxx", "a-business-xx", 1494054489),
        ],
    ),
    "movielens-1m": (
        "ratings.dat",
        "1::301::5::970000001\n1::77::3::970000002\n2::301::4::970000003\n",
        [(1, 301, 970000001), (1, 77, 970000002), (2, 301, 970000003)],
    ),
}


def events(log: Interactions) -> list[tuple[int | str, int | str, int]]:
    users, items = log.user_ids.decode(log.users), log.item_ids.decode(log.items)
    seconds = (log.timestamps // 1_000_000).tolist()
    return list(zip(users, items, seconds, strict=True))


def test_every_published_format_has_a_sample() -> None:
    assert set(FORMATS) - set(SAMPLES) == {"csv", "tsv", "jsonl", "parquet"}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_published_formats(name: str, compressed: bool, tmp_path: Path) -> None:
    file, text, expected = SAMPLES[name]
    path = tmp_path / (file + ".gz" * compressed)
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    assert events(read_interactions(path, format=name)) == expected


def test_reviews_without_profile_name_are_left_out_and_counted(tmp_path: Path) -> None:
    file, text, _ = SAMPLES["beeradvocate"]
    path = tmp_path / file
    path.write_text(text)
    told: list[str] = []
    log = read_interactions(path, format="beeradvocate", report=told.append)
    assert log.dropped == 1
    assert any("left out 1 rows" in line for line in told)


def test_another_file_than_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "checkins.txt"
    path.write_text("1\t2\t3\n")
    with pytest.raises(InputError, match=r"not the format gowalla: .* 3 fields where 5 are"):
        read_interactions(path, format="gowalla")
    path.write_text('{"user_id": "a", "item": 3}\n')
    with pytest.raises(InputError, match=r"no column 'business_id' \(item_column\)"):
        read_interactions(path, format="yelp")


def test_a_line_with_too_many_fields_for_its_format(tmp_path: Path) -> None:
    path = tmp_path / "likes.txt"
    path.write_text("1 2 3\n1 2 3\n1 2 3 4\n")
    with pytest.raises(InputError, match=r"line 3: 4 fields where there are 3 columns"):
        read_interactions(path, format="behance")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.csv", "csv"),
        ("a.CSV.GZ", "csv"),
        ("a.b.tsv.zst", "tsv"),
        ("a.jsonl", "jsonl"),
        ("a.ndjson.gz", "jsonl"),
        ("a.json.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.pq", "parquet"),
    ],
)
def test_the_name_tells_the_format(name: str, expected: str) -> None:
    assert choose_format(Path(name)).name == expected


@pytest.mark.parametrize("name", ["a.txt", "a", "a.gz", "a.docx"])
def test_a_name_that_tells_no_format(name: str) -> None:
    with pytest.raises(
        InputError, match=rf"^{name}: .*\.csv.*\.parquet.*\.gz.*with format.*gowalla"
    ):
        choose_format(Path(name))


def test_a_format_that_is_said_wins_over_the_name() -> None:
    assert choose_format(Path("a.csv"), "tsv").name == "tsv"


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r"no format 'excel'; there are auto, csv, .*yelp"):
        choose_format(Path("a.csv"), "excel")


@pytest.mark.parametrize(("ending", "command"), [(".gz", "gunzip"), (".zst", "unzstd")])
def test_a_compressed_parquet_file_is_refused(ending: str, command: str) -> None:
    with pytest.raises(InputError, match=f"decompress it first: {command} a.parquet{ending}"):
        choose_format(Path("a.parquet" + ending))


@pytest.mark.parametrize(
    "names",
    [
        ("user_id", "item_id", "timestamp"),
        ("userid", "itemid", "timestamp"),
        ("userId", "movieId", "timestamp"),
        ("User ID", "Item-Id", "Event Time"),
        ("uid", "sku", "ts"),
        ("customer_id", "product_id", "date"),
        ("visitorid", "itemid", "timestamp"),
        ("session_id", "article_id", "created_at"),
        ("reviewerID", "asin", "unixReviewTime"),
        ("user_id", "parent_asin", "timestamp"),
        ("user", "business_id", "datetime"),
        ("user", "track-id", "time"),
    ],
)
def test_usual_names_are_found(names: tuple[str, str, str]) -> None:
    found = ["rating", names[2], "title", names[1], "price", names[0]]
    assert find_columns(found, Columns(), Path("a.csv")) == names


def test_a_column_that_is_said_wins() -> None:
    found = ["user_id", "item_id", "timestamp", "sku"]
    columns = find_columns(found, Columns(item="sku"), Path("a.csv"))
    assert columns == ("user_id", "sku", "timestamp")


@pytest.mark.parametrize(
    ("found", "role"),
    [
        (["who", "item_id", "ts"], "user"),
        (["uid", "what", "ts"], "item"),
        (["uid", "item_id", "when"], "time"),
    ],
)
def test_a_missing_column_names_those_found_and_the_option(found: list[str], role: str) -> None:
    with pytest.raises(InputError) as caught:
        find_columns(found, Columns(), Path("a.csv"))
    message = str(caught.value)
    assert message.startswith("a.csv: ")
    assert all(repr(name) in message for name in found)
    assert f"with {role}_column" in message
    assert "header" not in message


def test_a_column_that_is_said_but_missing() -> None:
    with pytest.raises(InputError, match=r"no column 'who' \(user_column\); .*'user_id', 'ts'"):
        find_columns(["user_id", "ts"], Columns(user="who"), Path("a.csv"))


def test_two_columns_that_could_be_meant() -> None:
    with pytest.raises(InputError, match=r"'user_id', 'Session ID' could .* with user_column"):
        find_columns(["user_id", "Session ID", "item", "ts"], Columns(), Path("a.csv"))


def test_very_many_columns_are_not_all_listed() -> None:
    with pytest.raises(InputError, match="'c19', and 480 more"):
        find_columns([f"c{number}" for number in range(500)], Columns(), Path("a.csv"))


@pytest.mark.parametrize(
    ("path", "message"),
    [("a" * 5000, "a: File name too long"), ("~nobody-at-all/log.csv", "home directory")],
)
def test_a_path_that_no_system_takes(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_files(path)
