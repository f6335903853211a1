"""Peak memory of one phase of the work, apart from the others."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MIB = 2**20


class PeakMemory:
    """Measures the highest memory in use during phases, each by itself.

    On a GPU that is what torch had allocated there. On a CPU it is the resident memory of the whole
    process, Python and libraries included; where the system cannot start its peak anew, a phase
    shows the highest since the process began. `measures` says which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib: dict[str, float] = {}  # by phase, the highest so far
        if device.type == "cuda":
            self.measures = "GPU memory allocated"
        elif _start_anew():
            self.measures = "resident memory of the process"
        else:
            self.measures = "highest resident memory since the process began"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what the block takes."""
        self._reset()
        try:
            yield
        finally:
            self.mib[name] = max(self.mib.get(name, 0.0), self._read() / _MIB)

    def now(self) -> float:
        """The peak of the phase under way, in MiB."""
        return self._read() / _MIB

    def take(self, name: str) -> float:
        """Return a phase's peak in MiB, and forget it."""
        return self.mib.pop(name, 0.0)

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _start_anew()

    def _read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident_peak()


def _start_anew() -> bool:
    """Set the peak of resident memory to what is resident now; say whether that worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0  # Windows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
