"""The device: which one, in which precision, its free memory and the peak of its use."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sce.errors import InputError
from sce.evaluation.precision import Precision as Precision
from sce.evaluation.precision import matmul_precision as matmul_precision

_WORKSPACE, _SMALL, _SAME_BITS = "CUBLAS_WORKSPACE_CONFIG", ":4096:1", ":4096:8"  # KiB, how many
_MIB = 2**20


def resolve_device(name: str) -> torch.device:
    """Turn "auto", "cpu", "cuda", "cuda:1" … into a device that is there.

    Raises:
        InputError: When there is no such device, or not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = f"device is auto, cpu, cuda or cuda:N; got {name!r}"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(wrong) from error
    if device.type == "cuda":
        return _cuda(device)
    if name not in ("cpu", "mps"):
        raise InputError(wrong)  # torch knows more, such as meta, on which nothing is computed
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("device mps was asked for, and this machine has none; use --device cpu")
    return device


def _cuda(device: torch.device) -> torch.device:
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"this PyTorch ({torch.__version__}) was built without CUDA"
    elif not torch.cuda.is_available():
        why = "no GPU can be used here (nvidia-smi shows what the system sees)"
    elif (device.index or 0) >= torch.cuda.device_count():
        why = f"there are {torch.cuda.device_count()} here, counted from 0"
    else:
        return torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
    raise InputError(f"device {device} was asked for, but {why}; use --device cpu or auto")


def device_name(device: torch.device) -> str:
    """The name of the processor, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated there now; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds for itself and does not use is as good as free.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable")), None)
    return None if kib is None else int(kib) * 1024


def cpu_has_bf16() -> bool:
    """True if the processor computes in bf16; torch imitates it, slowly, where it does not."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return True  # torch does not tell; then neither do we


@contextmanager
def quiet_bf16(device: torch.device) -> Iterator[None]:
    """Hide, inside the block, the warning of torch about a CPU without bf16."""
    if device.type != "cpu":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        yield


def spare_workspace(device: torch.device) -> None:
    """Let cuBLAS keep less memory for itself, unless the environment says how much.

    On Hopper it takes 32 MiB for each thread and stream that multiplies matrices, of which training
    has two, on older GPUs 8; with 4 MiB training was as fast (docs/paper.md). It looks at this when
    it is first used.
    """
    if device.type == "cuda":
        os.environ.setdefault(_WORKSPACE, _SMALL)


@contextmanager
def same_bits(device: torch.device) -> Iterator[None]:
    """Let torch use only deterministic algorithms inside the block; a CPU does in any case."""
    if device.type != "cuda":
        yield
        return
    # cuBLAS reads this when it starts; without it, torch refuses to promise anything.
    if os.environ.get(_WORKSPACE, _SMALL) == _SMALL:
        os.environ[_WORKSPACE] = _SAME_BITS
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        # The fused kernels of attention sum their gradients in any order.
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warn)


class PeakMemory:
    """Peak memory of phases of the work, each by itself.

    On a GPU it is the memory that torch allocated. On a CPU it is the resident memory of the whole
    process, Python and libraries included; where the system cannot reset its peak, a phase shows
    the highest since the process began. `measures` says which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib: dict[str, float] = {}  # by phase, the highest so far
        if device.type == "cuda":
            self.measures = "GPU memory allocated"
        elif _reset_resident_peak():
            self.measures = "resident memory of the process"
        else:
            self.measures = "highest resident memory since the process began"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the peak of the block."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_resident_peak()
        try:
            yield
        finally:
            self.mib[name] = max(self.mib.get(name, 0.0), self.now())

    def now(self) -> float:
        """The peak of the phase under way, in MiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _MIB
        return _resident_peak() / _MIB

    def take(self, name: str) -> float:
        """Return a phase's peak in MiB, and forget it."""
        return self.mib.pop(name, 0.0)


def _reset_resident_peak() -> bool:
    """Set the peak of resident memory to what is resident now; False where that is impossible."""
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
