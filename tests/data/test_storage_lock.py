import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sce.data.storage import LOCK, locked
from sce.errors import InputError

HOLDER = """
import sys, time
from pathlib import Path
from sce.data.storage import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_lock_of_a_living_process_names_it_and_that_of_a_killed_one_is_nothing(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(InputError, match=rf"trained in by process {holder.pid} on "),
            locked(tmp_path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()  # nobody was left to remove it
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} on ")
    assert not (tmp_path / LOCK).exists()


def test_a_lock_is_kept_within_one_process_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()


def test_a_lock_that_was_replaced_is_left_to_its_owner(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK).unlink()
        with locked(tmp_path):  # of a directory that took the place of the first
            mine = (tmp_path / LOCK).stat().st_ino
            (tmp_path / LOCK).rename(tmp_path / "aside")
            (tmp_path / LOCK).touch()
        assert (tmp_path / LOCK).stat().st_ino != mine


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    (tmp_path / LOCK).symlink_to("dear")
    with pytest.raises(InputError, match=r"\.lock is a symbolic link"), locked(tmp_path):
        pass
    assert (tmp_path / "dear").read_text() == "dear"


def test_a_file_system_without_locks_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        pass


def test_a_lock_can_be_waited_for_and_names_what_is_done(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER.replace("60", "0.5"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="being swept in by"), locked(tmp_path, "swept in"):
            pass
        with locked(tmp_path, "swept in", patience=20):
            pass


def test_an_inherited_lock_is_held_until_the_last_child_ends(tmp_path: Path) -> None:
    with locked(tmp_path, inherited=True) as descriptor:
        assert descriptor is not None
        child = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    with (
        pytest.raises(InputError, match="or what it left running"),
        locked(tmp_path, inherited=True),
    ):
        pass
    child.kill()
    child.wait()
    with locked(tmp_path, inherited=True):
        pass
