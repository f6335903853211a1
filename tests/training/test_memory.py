import mmap
from pathlib import Path

import pytest
import torch

from sce.training import memory
from sce.training.memory import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.skipif(not memory._start_anew(), reason="this system cannot start a peak anew")
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
