import mmap
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sce.errors import InputError
from sce.training.device import (
    PeakMemory,
    device_name,
    free_memory,
    matmul_precision,
    resolve_device,
    same_bits,
    spare_workspace,
)

CPU = torch.device("cpu")
MIB = 2**20


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    assert resolve_device("cpu") == CPU


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "meta", "cpu:1", "cpu:99", "xpu", "cuda:-1"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="device is auto, cpu, cuda or cuda:N; got"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("built", "visible", "count", "message"),
    [
        (None, False, 0, "was built without CUDA; use device='cpu'"),
        ("12.8", False, 0, "no GPU can be used here"),
        ("12.8", True, 2, "there are 2 here, counted from 0"),
    ],
)
def test_a_gpu_that_is_not_there(
    built: str | None, visible: bool, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(InputError, match=message):
        resolve_device("cuda:2")


def test_cuda_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda:1")
    assert resolve_device("cuda:0") == torch.device("cuda:0")


def test_free_memory_is_plausible() -> None:
    free = free_memory(CPU)
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize(("threads", "name"), [(1, "cpu, 1 thread"), (2, "cpu, 2 threads")])
def test_the_name_says_how_many_threads(
    threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name(CPU) == name


def test_tf32_is_allowed_for_a_while_only() -> None:
    matmul: Any = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, name)
    with matmul_precision(torch.device("cuda"), "tf32"):
        assert getattr(matmul, name) in ("tf32", True)
        with matmul_precision(torch.device("cuda"), "float32"):
            assert getattr(matmul, name) in ("ieee", False)
    assert getattr(matmul, name) == before


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(("block", "size"), [(spare_workspace, ":4096:1"), (same_bits, ":4096:8")])
def test_cublas_is_told_how_much_to_keep_inside_the_block_alone(
    block: Any, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    with block(CPU):
        assert WORKSPACE not in os.environ
        assert not torch.are_deterministic_algorithms_enabled()
    with block(torch.device("cuda")):
        assert os.environ[WORKSPACE] == size
        assert torch.are_deterministic_algorithms_enabled() == (block is same_bits)
    assert WORKSPACE not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with block(torch.device("cuda")):
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


# --- peak memory


def grow(mib: int) -> None:
    block = mmap.mmap(-1, mib * MIB)  # given back when closed; torch may keep what it freed
    for start in range(0, mib * MIB, MIB):
        block[start : start + MIB] = bytes(MIB)
    time.sleep(0.1)
    block.close()


def test_phases_are_measured_apart_and_the_systems_own_peak_stays() -> None:
    memory, peaks = PeakMemory(CPU), []
    for mib in (0, 400, 0, 200, 0):  # of the fourth, the process had had more: it is sampled
        with memory.phase():
            grow(mib) if mib else None
        peaks.append(memory.peak())
    idle, large, after, smaller, last = peaks
    assert large - idle == pytest.approx(400, abs=30)
    assert smaller - idle == pytest.approx(200, abs=30)
    assert max(after, last) - idle < 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 > large - 10
    status = Path("/proc/self/status")
    if status.exists():  # what monitors read has not been reset
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) / 1024 > large - 10


def test_a_system_without_proc_shows_the_highest_since_the_process_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    memory = PeakMemory(CPU)
    with memory.phase():
        pass
    assert memory.peak() > 50
