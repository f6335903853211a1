"""Which implementation a loss runs on, and what is said of it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sce.losses import ScalableCrossEntropy, backend
from sce.losses.backend import explain, why_not_triton

STATES, CATALOGUE = torch.ones(3, 8), torch.ones(5, 8)
TARGETS = torch.arange(3)


def test_auto_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    explain.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="sce"):
        for choice in ("auto", "auto", "torch"):
            assert ScalableCrossEntropy(backend=choice)(STATES, CATALOGUE, TARGETS).isfinite()
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == (
        "the plain PyTorch path is used: the states are on cpu, not on a GPU"
    )


def test_rows_too_wide_for_the_kernels_are_a_warning_once_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    explain.cache_clear()
    monkeypatch.setattr(backend, "_HAS_TRITON", True)
    wide = torch.ones(3, backend.MAX_DIM + 1)
    assert ScalableCrossEntropy()(wide, wide, TARGETS).isfinite()
    assert not recwarn  # on a CPU they would not run anyway
    on_gpu: Any = SimpleNamespace(
        dtype=torch.float32, shape=wide.shape, is_cuda=True, device=torch.device("cuda", 0)
    )
    reason = why_not_triton(on_gpu, on_gpu, "auto")
    assert reason is not None
    for choice in ("auto", "auto", "torch"):
        explain(reason, choice)
    (warning,) = recwarn
    assert "slower: the kernels take up to 512 dimensions, got 513" in str(warning.message)


def test_asked_for_it_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = ScalableCrossEntropy(backend="triton")
    with pytest.raises(ValueError, match="'triton' does not work here: the kernels know no torch"):
        loss(STATES, CATALOGUE.double(), TARGETS)
    monkeypatch.setattr(backend, "_HAS_TRITON", False)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not work here: triton is not installed"):
            loss(STATES, CATALOGUE, TARGETS)


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_HAS_TRITON", True)
    monkeypatch.setattr(backend, "_interpreted", lambda: True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert why_not_triton(STATES.to(dtype), CATALOGUE.to(dtype), "triton") is None
    wide = torch.ones(2, backend.MAX_DIM + 1)
    reason = why_not_triton(wide, wide, "triton")
    assert reason == "the kernels take up to 512 dimensions, got 513"
    assert why_not_triton(wide[:, 1:], wide[:, 1:], "triton") is None
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    assert why_not_triton(STATES, CATALOGUE, "triton") == "the states are on cpu, not on a GPU"


@pytest.mark.parametrize(
    ("hip", "capability", "reason"),
    [
        (None, (8, 0), None),
        (None, (9, 0), None),
        (None, (7, 5), "the kernels need compute capability 8.0, A GPU has 7.5"),
        ("6.4", (9, 4), "the kernels are for NVIDIA GPUs, and this torch is built for ROCm"),
    ],
)
def test_the_gpus_that_the_kernels_run_on(
    hip: str | None, capability: tuple[int, int], reason: str | None, monkeypatch: Any
) -> None:
    major, minor = capability
    gpu = SimpleNamespace(name="A GPU", major=major, minor=minor)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(backend, "_HAS_TRITON", True)
    backend._remembered.cache_clear()
    on_gpu: Any = SimpleNamespace(
        dtype=torch.float32, shape=STATES.shape, is_cuda=True, device=torch.device("cuda", 0)
    )
    try:
        for choice in ("auto", "triton"):
            assert why_not_triton(on_gpu, on_gpu, choice) == reason
    finally:
        backend._remembered.cache_clear()
