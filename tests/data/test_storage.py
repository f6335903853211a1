import errno
import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sce.data import storage
from sce.data.shapes import parse_json
from sce.data.storage import (
    append_json_line,
    atomic_directory,
    atomic_file,
    check_writable,
    digest_bytes,
    json_line,
    read_json,
    read_json_lines,
    write_json,
    write_text,
)
from sce.errors import InputError

RECORD: dict[str, Any] = {"name": "a\u2028b\udc80ż", "loss": 0.1 + 0.2, "nested": {"1": [1, None]}}


def test_digests_are_those_of_b2sum() -> None:
    data = bytes(range(256)) * 5000
    assert digest_bytes(data) == hashlib.blake2b(data, digest_size=32).hexdigest()


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e400", str(2**63), "9" * 5000])
def test_numbers_that_nothing_of_ours_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"finite|64 bits|limit"):
        parse_json(f'{{"a": [{text}]}}'.encode())


# --- directories


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_nothing_is_seen_before_all_is_written(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "a" / "b") as directory:
        (directory / "file").write_text("content")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "content"
    assert names(tmp_path / "a") == ["b"]


def test_what_is_in_place_is_no_failure_though_its_name_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_files(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(storage, "_sync", only_files)
    with atomic_directory(tmp_path / "data") as directory:
        (directory / "file").write_text("content")
    write_text(tmp_path / "file", "text")
    assert names(tmp_path) == ["data", "file"]


def test_what_came_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_directory(tmp_path / "a") as directory:
            (directory / "file").write_text("ours")
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "file").write_text("theirs")

    with pytest.raises(InputError, match=r"cannot write .*/a: "):
        write()
    assert (tmp_path / "a" / "file").read_text() == "theirs"
    assert names(tmp_path) == ["a"]


def interrupted(place: Path, exchange: bool, when: int, deadly: int) -> bool:
    """Replace a directory in a child process that gets a signal at call number `when`."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    seen = 0

    def counted(really: Callable[..., Any]) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            for moment in range(2):  # before and after
                seen += 1
                if seen == when:
                    os.kill(os.getpid(), deadly)
                if moment == 0:
                    result = really(*args, **kwargs)
            return result

        return fake

    code = 1
    with suppress(BaseException), pytest.MonkeyPatch.context() as patch:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not exchange:
            patch.setattr(storage, "_exchange", lambda *_: False)
        for owner, name in [
            (storage, "_exchange"),
            (Path, "rename"),
            (Path, "mkdir"),
            (os, "fsync"),
        ]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with atomic_directory(place, replace=True) as directory:
            for name in ("one", "two"):
                (directory / name).write_text("new")
        code = 0
    os._exit(code)


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("exchange", [True, False])
def test_old_or_new_is_there_after_an_interruption_at_any_moment(
    tmp_path: Path, exchange: bool, deadly: int
) -> None:
    place, outcomes = tmp_path / "data", set()
    for when in range(1, 100):
        place.mkdir(exist_ok=True)
        for name in ("one", "two"):
            (place / name).write_text("old")
        was_interrupted = interrupted(place, exchange, when, deadly)
        if exchange:  # before anybody tidies up
            assert place.is_dir()
        check_writable(place)
        assert names(tmp_path) == ["data"]
        contents = {(place / name).read_text() for name in ("one", "two")}
        assert len(contents) == 1
        outcomes |= contents
        if not was_interrupted:
            break
    assert outcomes == {"old", "new"}
    assert 10 < when < 99


def test_the_leftovers_of_a_living_command_stay(tmp_path: Path) -> None:
    place = tmp_path / "data"
    dead, other = tmp_path / ".data.partial-00000000", tmp_path / ".data.partial-thesis"
    with atomic_directory(place) as directory:
        dead.mkdir()
        other.mkdir()
        check_writable(place)
        assert names(tmp_path) == sorted([directory.name, other.name])
    assert names(tmp_path) == sorted([other.name, "data"])


# --- files


def test_a_file_that_another_command_writes_is_refused(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "file") as mine:
        mine.write_text("mine")
        with pytest.raises(InputError, match="another command is writing"):
            storage.write_text(tmp_path / "file", "theirs")
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file"]


def test_links_are_not_written_through(tmp_path: Path) -> None:
    dear = tmp_path / "dear"
    dear.mkdir()
    (dear / "file").write_text("dear")
    (tmp_path / "lines").symlink_to(dear / "file")
    (tmp_path / ".file.partial").symlink_to(dear)
    with pytest.raises(InputError, match=r"lines is a symbolic link, .*; remove it"):
        append_json_line(tmp_path / "lines", {})
    with pytest.raises(InputError, match="partial is a symbolic link"):
        storage.write_text(tmp_path / "file", "ours")
    assert (dear / "file").read_text() == "dear"
    assert names(dear) == ["file"]


# --- JSON


def test_json_reads_as_it_was_written_and_by_others(tmp_path: Path) -> None:
    write_json(tmp_path / "file", RECORD | {"checksum": "of before"})
    assert read_json(tmp_path / "file") == RECORD
    assert list(json.loads((tmp_path / "file").read_text())) == [*RECORD, "checksum"]
    for _ in range(3):
        append_json_line(tmp_path / "lines", RECORD)
    assert (tmp_path / "lines").read_text() == 3 * json_line(RECORD)
    assert read_json_lines(tmp_path / "lines") == 3 * [RECORD]


def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    file, lines = tmp_path / "file", tmp_path / "lines"
    write_json(file, RECORD)
    lines.write_text(2 * json_line(RECORD))
    for path, read in [(file, read_json), (lines, read_json_lines)]:
        whole = path.read_bytes()
        for bit in [*range(0, 8 * len(whole), 7), *range(8 * len(whole) - 8, 8 * len(whole))]:
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            with suppress(InputError):
                assert read(path) in (RECORD, 2 * [RECORD])


def test_a_half_written_last_line_is_passed_over_and_replaced(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    whole = json_line(RECORD).encode()
    for cut in range(len(whole)):
        lines.write_bytes(whole + whole[:cut])
        there = 1 if cut < len(whole) - 1 else 2  # nothing but the end of the line is missing
        assert read_json_lines(lines) == there * [RECORD]
        append_json_line(lines, RECORD)
        assert lines.read_bytes() == (there + 1) * whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is half-written or altered: it is not JSON"),
        (b"[" * 100_000, "is half-written or altered: it is not JSON"),
        (b'{"a": "\xff"}', "is half-written or altered: it is not JSON"),
        (b"[1]", "has no checksum: it was altered, or is of an older sce"),
        (b'{"a": 1}', "has no checksum: it was altered, or is of an older sce"),
        (b'{"a": NaN, "checksum": ""}', "is half-written or altered: it is not JSON"),
        (b'{"a": 1, "checksum": ""}', "was altered: its checksum does not fit"),
    ],
)
def test_other_content_is_named_with_file_and_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=f"file {message}"):
        read_json(tmp_path / "file")
    (tmp_path / "file").write_bytes(json_line(RECORD).encode() + content + b"\n")
    with pytest.raises(InputError, match=f"file, line 2, {message}"):
        read_json_lines(tmp_path / "file")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InputError, match=r"cannot write .*lines: no space left"):
        append_json_line(tmp_path / "lines", RECORD)


@pytest.mark.parametrize("handles", [0, 1])
def test_too_few_file_handles_leave_nothing(tmp_path: Path, handles: int) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + handles, usual[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*: too many open files; .* ulimit -n"):
            write_text(tmp_path / "file", "text")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert not list(tmp_path.iterdir())


def test_bytes_are_on_the_disk_before_a_file_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file", list[Any]()
    monkeypatch.setattr(storage, "_sync", lambda one: synced.append((one.name, path.exists())))
    storage.write_text(path, "text")
    assert synced == [("file", False), (tmp_path.name, True)]
