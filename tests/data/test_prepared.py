import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sce.data import manifest, prepared, storage
from sce.data.prepared import PreparedDataset, Sequences, check_target, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError

USERS = Vocabulary.from_strings(["ann", "bob", "żółw"])
ITEMS = Vocabulary.from_integers([-7, 3, 10**12])


def sequences_of(lists: Sequence[Sequence[int]], users: Sequence[int]) -> Sequences:
    return Sequences(
        np.array([item for items in lists for item in items], np.int32),
        np.cumsum([0, *map(len, lists)], dtype=np.int64),
        np.array(users, np.int32),
    )


TRAIN = sequences_of([[0, 1, 2, 0], [2]], [0, 2])
TEST = sequences_of([[1, 1, 0]], [1])


def write(path: Path, force: bool = False, **changes: Any) -> PreparedDataset:
    content: dict[str, Any] = {
        "train": TRAIN,
        "test": TEST,
        "user_ids": USERS,
        "item_ids": ITEMS,
        "settings": {"split": "temporal", "quantile": 0.95},
        "counts": {"train": {"users": 2}},
    }
    return write_prepared(path, force=force, **(content | changes))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_what_was_written_is_loaded(tmp_path: Path) -> None:
    written = write(tmp_path / "data")
    for loaded in (written, PreparedDataset.load(tmp_path / "data")):
        for name, expected in [("train", TRAIN), ("test", TEST)]:
            sequences = getattr(loaded, name)
            for part in ("items", "offsets", "users"):
                array = getattr(sequences, part)
                np.testing.assert_array_equal(array, getattr(expected, part), strict=True)
        assert loaded.user_ids == USERS
        assert loaded.item_ids == ITEMS
        assert loaded.n_items == 3
        assert loaded.settings == {"split": "temporal", "quantile": 0.95}
        assert loaded.split == "temporal, quantile 0.95"
        assert loaded.counts == {"train": {"users": 2}}
        assert loaded.content_hash == written.content_hash
        assert repr(loaded) == (
            f"PreparedDataset('{tmp_path / 'data'}': 3 users, 3 items, split temporal\n"
            "  train: Sequences(2 users, 5 interactions)\n"
            "  test: Sequences(1 user, 3 interactions))"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_arrays_are_mapped_not_read(tmp_path: Path) -> None:
    loaded = write(tmp_path / "data")
    assert isinstance(loaded.train.items.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        loaded.train.items[0] = 5


def test_loading_needs_no_polars(tmp_path: Path) -> None:
    write(tmp_path / "data")
    program = (
        "import sys; sys.modules['polars'] = sys.modules['torch'] = None\n"
        "from sce.data.prepared import PreparedDataset\n"
        "print(PreparedDataset.load(sys.argv[1]).train[0].tolist())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == (
        "[0, 1, 2, 0]\n"
    )


def test_the_same_content_gives_the_same_bytes_anywhere(tmp_path: Path) -> None:
    first, second = write(tmp_path / "one"), write(tmp_path / "deeper" / "two")
    assert contents(first.path) == contents(second.path)
    other = write(tmp_path / "three", test=sequences_of([[1, 1, 1]], [1]))
    assert other.content_hash != first.content_hash


# --- what is there already


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    before = contents(write(tmp_path / "data").path)
    with pytest.raises(InputError, match=r"data exists; .*force=True"):
        write(tmp_path / "data", settings={})
    assert contents(tmp_path / "data") == before


def test_force_replaces_a_prepared_dataset(tmp_path: Path) -> None:
    write(tmp_path / "data")
    replaced = write(tmp_path / "data", force=True, settings={"split": "leave-one-out"})
    assert PreparedDataset.load(tmp_path / "data").settings == {"split": "leave-one-out"}
    assert replaced.settings == {"split": "leave-one-out"}
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_empty_directory_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    PreparedDataset.load(tmp_path / "data")


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_of_a_dataset_is_never_deleted(tmp_path: Path, force: bool) -> None:
    write(tmp_path / "data")
    for directory in (tmp_path / "data", tmp_path / "other"):
        directory.mkdir(exist_ok=True)
        (directory / "thesis.tex").write_text("dear")
        with pytest.raises(InputError, match=r"exists and holds thesis\.tex; choose another dir"):
            write(directory, force=force)
        assert (directory / "thesis.tex").read_text() == "dear"


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("dear")
    with pytest.raises(InputError, match=r"log.csv is a file"):
        write(tmp_path / "log.csv", force=True)
    with pytest.raises(InputError, match=r"cannot write .*: .*log.csv is a file"):
        write(tmp_path / "log.csv" / "data")
    assert (tmp_path / "log.csv").read_text() == "dear"


def test_a_link_to_a_dataset_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", force=True, settings={})
    assert (tmp_path / "link").is_symlink()
    assert PreparedDataset.load(tmp_path / "real").settings == {}


# --- what can go wrong while writing


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let the writing of array number `count` fail with half of it written."""
    really_write, seen = manifest.write_array, 0

    def failing(path: Path, array: NDArray[Any]) -> None:
        nonlocal seen
        seen += 1
        really_write(path, array)
        if seen == count:
            os.truncate(path, path.stat().st_size // 2)
            raise error

    monkeypatch.setattr(prepared, "write_array", failing)


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    fail_at(monkeypatch, count, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(InputError, match=r"cannot write .*deep/data: no space left"):
        write(tmp_path / "deep" / "data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), MemoryError()]
)
def test_a_replacement_that_fails_keeps_the_old_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = contents(write(tmp_path / "data").path)
    fail_at(monkeypatch, 4, error)
    with pytest.raises((InputError, KeyboardInterrupt, MemoryError)):
        write(tmp_path / "data", force=True, settings={})
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert contents(tmp_path / "data") == before


def test_a_file_system_that_takes_no_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=r"cannot write .*data: not allowed to write"):
        write(tmp_path / "data")


def test_a_directory_not_writable_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.access  # root may write anywhere: what the system would say to others is played
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and really(path, 0))
    with pytest.raises(InputError, match=rf"cannot write .*: not allowed to write in {tmp_path}"):
        check_target(tmp_path / "some" / "data")


def test_sequences_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    for wrong in [sequences_of([[0, 1, 3]], [0]), sequences_of([[0, 1, -1]], [0])]:
        with pytest.raises(ValueError, match="items must lie between 0 and 2"):
            write(tmp_path / "data", train=wrong)
    with pytest.raises(ValueError, match="users must lie between 0 and 2"):
        write(tmp_path / "data", train=sequences_of([[0]], [3]))
    with pytest.raises(ValueError, match="at least 3 items"):
        write(tmp_path / "data", test=sequences_of([[0, 1]], [0]))
    assert list(tmp_path.iterdir()) == []


# --- what can have happened since


def alter_byte(path: Path) -> None:
    data = bytearray((path / "train_items.npy").read_bytes())
    data[-1] ^= 1
    (path / "train_items.npy").write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path / "test_users.npy", 20)


def alter_settings(path: Path) -> None:
    text = (path / "dataset.json").read_text().replace("0.95", "0.9")
    (path / "dataset.json").write_text(text)


def cut_manifest(path: Path) -> None:
    os.truncate(path / "dataset.json", 50)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (alter_byte, "the content of train_items.npy was altered"),
        (truncate, "test_users.npy has 20 bytes and was written with 132"),
        (alter_settings, "dataset.json was altered"),
        (cut_manifest, "dataset.json cannot be read"),
        (lambda path: (path / "item_ids_values.npy").unlink(), "item_ids_values.npy is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(InputError, match=f"{tmp_path}/data is half-written or altered: {message};"):
        PreparedDataset.load(tmp_path / "data")


def test_without_verifying_the_content_is_taken_on_trust(tmp_path: Path) -> None:
    write(tmp_path / "data")
    alter_byte(tmp_path / "data")
    assert PreparedDataset.load(tmp_path / "data", verify=False).train.items[-1] != 2


def rewrite_manifest(path: Path, **changes: Any) -> None:
    content = json.loads((path / "dataset.json").read_text()) | changes
    storage.write_json(path / "dataset.json", content)


def test_another_version_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data")
    rewrite_manifest(tmp_path / "data", version=1)
    with pytest.raises(InputError, match="format version 1, and this sce reads version 2"):
        PreparedDataset.load(tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train_items", [0, 1, 2, 9, 0], "items must lie between"),
        ("train_items", [0, 1, 2, -1, 0], "items must lie between"),
        ("test_users", [-1], "users must lie between"),
        ("train_offsets", [0, 7, 5], "a test sequence needs"),
        ("train_offsets", [0, 4, 6], "offsets run from 0 to 5 items, not .0 4 6."),
        ("train_users", [2, 0], "users must ascend"),
        ("train_users", [1, 1], "users must ascend"),
        ("item_ids_values", [3, -7, 10**12], "ids must ascend"),
        ("user_ids_offsets", [0, 6, 3, 13], "offsets of ids must ascend"),
    ],
)
def test_codes_that_mean_nothing_are_named(
    tmp_path: Path, name: str, values: list[int], message: str
) -> None:
    write(tmp_path / "data")
    file = tmp_path / "data" / f"{name}.npy"
    np.save(file, np.array(values, np.load(file).dtype))
    files = json.loads((tmp_path / "data" / "dataset.json").read_text())["files"]
    rewrite_manifest(tmp_path / "data", files=files | {file.name: manifest.describe_file(file)})
    with pytest.raises(InputError, match=message):
        PreparedDataset.load(tmp_path / "data")


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '<i4', 'fortran_order': False, 'shape': (" + "9" * 30 + ",), }",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (True,), }",
        "(" * 3000,
        "-" * 1500 + "1",
    ],
)
def test_a_head_of_no_array_is_named(tmp_path: Path, head: str) -> None:
    write(tmp_path / "data")
    file = tmp_path / "data" / "train_items.npy"
    length = len(head).to_bytes(2, "little")
    file.write_bytes(b"\x93NUMPY\x01\x00" + length + head.encode() + bytes(64))
    files = json.loads((tmp_path / "data" / "dataset.json").read_text())["files"]
    rewrite_manifest(tmp_path / "data", files=files | {file.name: manifest.describe_file(file)})
    with pytest.raises(InputError, match=r"altered: train_items.npy: "):
        PreparedDataset.load(tmp_path / "data")


def test_a_split_of_another_kind_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data")
    rewrite_manifest(tmp_path / "data", settings={"split": 5})
    with pytest.raises(InputError, match=r"settings.split of dataset.json is missing, or of"):
        PreparedDataset.load(tmp_path / "data")


def test_what_is_no_prepared_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        PreparedDataset.load("no\0where")
    with pytest.raises(InputError, match=r"nowhere does not exist; make it with: sce prepare"):
        PreparedDataset.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"not a prepared dataset: it has no dataset.json"):
        PreparedDataset.load(tmp_path)
    (tmp_path / "dataset.json").write_text('{"format": "another"}')
    with pytest.raises(InputError, match=r"not a prepared dataset: its dataset.json is of somet"):
        PreparedDataset.load(tmp_path)
    with pytest.raises(InputError, match=r"is a file, not a prepared dataset"):
        PreparedDataset.load(tmp_path / "dataset.json")


# --- sequences


def test_sequences_know_their_lengths() -> None:
    assert len(TRAIN) == 2
    assert TRAIN.lengths.tolist() == [4, 1]
    assert [TRAIN[i].tolist() for i in range(2)] == [[0, 1, 2, 0], [2]]
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        TRAIN[2]


@pytest.mark.parametrize(
    ("items", "offsets", "users", "message"),
    [
        (np.zeros(3, np.int64), [0, 3], 1, "items .* int64"),
        (np.zeros((3, 1), np.int32), [0, 3], 1, "items .*shape"),
        (np.zeros(3, np.int32), [0, 3], 2, "3 offsets run from 0"),
        (np.zeros(3, np.int32), [1, 3], 1, "from 0 to 3 items, not .1 3."),
        (np.zeros(3, np.int32), [0, 2], 1, "from 0 to 3 items, not .0 2."),
    ],
)
def test_sequences_that_contradict_themselves_are_refused(
    items: NDArray[Any], offsets: list[int], users: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sequences(items, np.array(offsets), np.zeros(users, np.int32))


def test_force_replaces_a_damaged_dataset_known_by_its_manifest(tmp_path: Path) -> None:
    write(tmp_path / "data")
    rewrite_manifest(tmp_path / "data", version=1)
    alter_byte(tmp_path / "data")
    (tmp_path / "data" / "test_users.npy").unlink()
    with pytest.raises(InputError, match="or replace it with force=True"):
        check_target(tmp_path / "data")
    write(tmp_path / "data", force=True)
    PreparedDataset.load(tmp_path / "data")


THEIRS = b'{"format": "another", "files": {"item_ids_mine.npy": 1}}'


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": {}}', THEIRS, None])
def test_force_never_deletes_what_only_has_the_names_of_ours(
    tmp_path: Path, content: bytes | None
) -> None:
    theirs = tmp_path / "data"
    if content is None:  # a dataset of ours, with a file of theirs
        write(theirs)
    else:
        theirs.mkdir()
        (theirs / "dataset.json").write_bytes(content)
    (theirs / "item_ids_mine.npy").write_text("dear")
    with pytest.raises(InputError, match=r"holds .*item_ids_mine.npy; choose another directory"):
        write(theirs, force=True)
    assert (theirs / "item_ids_mine.npy").read_text() == "dear"


def test_places_that_cannot_be_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for place, message in [
        (".", "is the current directory"),
        ("/", "cannot write /: "),
        ("loop", "cannot write loop: "),
        ("none/../data", r"there is no none/\.\.; name it without"),
        (250 * "n", "cannot write n+: .*File name too long"),
    ]:
        with pytest.raises(InputError, match=message):
            check_target(place)
    with pytest.raises(InputError, match="loop does not exist"):
        PreparedDataset.load("loop")


def titled(ids: Vocabulary, word: str) -> Vocabulary:
    texts = [f"{word} {ids[code]}".encode() for code in range(len(ids))]
    return Vocabulary.from_sorted_text(b"".join(texts), np.array([*map(len, texts)]))


@pytest.mark.parametrize("others", [[3, 9, 10**12], ["-7", "0", "a", "9"], [-7, 3, 10**12]])
@pytest.mark.parametrize("own", [[-7, 3, 10**12], ["-7", "1", "b"]])
def test_items_of_another_catalogue_are_united_by_id(
    own: list[Any], others: list[Any], tmp_path: Path
) -> None:
    mine, theirs = (
        Vocabulary.from_strings(ids) if isinstance(ids[0], str) else Vocabulary.from_integers(ids)
        for ids in (own, others)
    )
    dataset = write(tmp_path / "data", item_ids=mine, titles=titled(mine, "my"))
    for named in (True, False):
        before = dataset if named else replace(dataset, titles=None)
        found = before.unite(theirs, titled(theirs, "your"))
        found.item_ids.check()
        ids = [str(found.item_ids[code]) for code in range(found.n_items)]
        assert {*ids} == {*map(str, own), *map(str, others)}
        assert found.content_hash == dataset.content_hash
        for split in ("train", "test"):
            was, now = (getattr(one, split).items for one in (dataset, found))
            assert [ids[code] for code in now] == [str(mine[code]) for code in was]
        words = {str(one): "your" for one in others}
        words = words | {str(one): "my" for one in own} if named else words
        assert found.titles is not None
        expected = [f"{words[one]} {one}" if one in words else "" for one in ids]
        assert found.titles.decode(range(found.n_items)) == expected
        assert before.unite(theirs).n_items == found.n_items
    assert dataset.unite(mine, titled(mine, "your")) is dataset
