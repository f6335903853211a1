import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sce.errors import InputError
from sce.training import device
from sce.training.device import (
    PeakMemory,
    device_name,
    free_memory,
    matmul_precision,
    quiet_bf16,
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
        (None, False, 0, "was built without CUDA; use --device cpu"),
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


def test_determinism_is_asked_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with same_bits(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG")
    assert not torch.are_deterministic_algorithms_enabled()
    with same_bits(CPU):
        assert not torch.are_deterministic_algorithms_enabled()


def test_cublas_keeps_little_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, ":16:8")  # so that it is as it was, in the end
    spare_workspace(torch.device("cuda"))
    assert os.environ[name] == ":16:8"
    del os.environ[name]
    spare_workspace(CPU)
    assert name not in os.environ
    spare_workspace(torch.device("cuda"))
    assert os.environ[name] == ":4096:1"
    with same_bits(torch.device("cuda")):
        assert os.environ[name] == ":4096:8"
    os.environ[name] = ":16:8"
    with same_bits(torch.device("cuda")):
        assert os.environ[name] == ":16:8"


def test_only_what_torch_says_of_bf16_is_hidden() -> None:
    with warnings.catch_warnings(record=True) as heard, quiet_bf16(CPU):
        warnings.simplefilter("always", ResourceWarning)
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", UserWarning, stacklevel=1)
        warnings.warn("another thing failed", ResourceWarning, stacklevel=1)
    assert [str(one.message) for one in heard] == ["another thing failed"]


# --- peak memory


@pytest.mark.skipif(
    not device._reset_resident_peak(), reason="this system cannot start a peak anew"
)
def test_phases_are_measured_apart() -> None:
    peaks = PeakMemory(CPU)
    assert peaks.measures == "resident memory of the process"
    with peaks.phase("idle"):
        pass
    with peaks.phase("large"):
        block = mmap.mmap(-1, 300 * MIB)  # given back when closed; torch may keep what it freed
        block.write(bytes(300 * MIB))
        now = peaks.now()
        block.close()
    with peaks.phase("idle again"):
        pass
    idle, large, after = (peaks.mib[name] for name in ("idle", "large", "idle again"))
    assert 290 < large - idle < 700  # the zeros are written from memory, too
    assert now == pytest.approx(large, abs=10)
    assert after - idle < 50


def test_a_phase_keeps_its_highest_until_taken() -> None:
    peaks = PeakMemory(CPU)
    peaks.mib["phase"] = 1e9
    with peaks.phase("phase"):
        pass
    assert peaks.take("phase") == 1e9
    assert peaks.take("phase") == 0.0


def test_a_system_that_cannot_start_anew_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    peaks = PeakMemory(CPU)
    assert peaks.measures == "highest resident memory since the process began"
    with peaks.phase("all"):
        pass
    assert peaks.take("all") > 50
