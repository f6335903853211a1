from pathlib import Path

import pytest

from sce import memory
from sce.errors import InputError

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 8 GiB available, and no limits."""
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    put(tmp_path, "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_host_has_what_is_available(root: Path) -> None:
    assert memory.free_memory() == 8 * GIB


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [
        ("0::/a/b", "sys/fs/cgroup", "memory.max", "memory.current"),
        (
            "4:cpu,memory:/a/b",
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_every_control_group_above_counts_less_its_page_cache(
    root: Path, line: str, folder: str, limit: str, used: str
) -> None:
    put(root, "proc/self/cgroup", f"7:cpuset:/x\n{line}\n")
    for group, size in [("/a/b", "max"), ("/a", str(4 * GIB)), ("", str(7 * GIB))]:
        put(root, f"{folder}{group}/{limit}", f"{size}\n")
        put(root, f"{folder}{group}/{used}", f"{3 * GIB}\n")
    assert memory.free_memory() == GIB
    stat = f"inactive_file {GIB}\nactive_file {GIB // 2}\nworkingset_file 5\n"
    put(root, f"{folder}/a/memory.stat", stat)
    assert memory.free_memory() == 2.5 * GIB


def test_a_step_that_does_not_fit_is_refused_with_both_figures(root: Path) -> None:
    memory.require_memory(8 * GIB, "sorting")
    message = r"sorting needs about 9.00 GiB of memory, and 8.00 GiB is free; free some"
    with pytest.raises(InputError, match=message):
        memory.require_memory(9 * GIB, "sorting")


def test_a_system_that_does_not_tell_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    assert memory.free_memory() is None
    memory.require_memory(1e30, "anything")
