"""The device: which one, in which precision, its free memory and the peak of its use."""

import os
import platform
import re
import resource
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sce import memory
from sce.errors import InputError, named
from sce.evaluation.precision import Precision as Precision
from sce.evaluation.precision import matmul_precision as matmul_precision
from sce.units import plural

_WORKSPACE, _SMALL, _SAME_BITS = "CUBLAS_WORKSPACE_CONFIG", ":4096:1", ":4096:8"  # KiB, how many
_MIB = 2**20
_SAMPLE_SECONDS = 0.02


def resolve_device(name: str) -> torch.device:
    """Turn "auto", "cpu", "cuda", "cuda:1" … into a device that is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name):
        raise InputError(f"{named('device')} is auto, cpu, cuda or cuda:N; got {name!r}")
    device, why = torch.device(name), ""
    if device.type == "mps" and not torch.backends.mps.is_available():
        why = "this machine has none"
    elif device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        why = f"this PyTorch ({torch.__version__}) was built without CUDA"
    elif device.type == "cuda" and not torch.cuda.is_available():
        why = "no GPU can be used here (nvidia-smi shows what the system sees)"
    elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = f"there are {torch.cuda.device_count()} here, counted from 0"
    if why:
        hint = f"use {named('device', 'cpu')} or auto"
        raise InputError(f"device {device} was asked for, but {why}; {hint}")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def device_name(device: torch.device) -> str:
    """The name of the processor, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {plural(torch.get_num_threads(), 'thread')}"


def free_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated there now; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds for itself and does not use is as good as free.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return memory.free_memory()


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Hide, inside the block, what torch says of a CPU without bf16 and of sparse gradients."""
    with warnings.catch_warnings():
        for text in ("mkldnn_matmul failed", "Sparse invariant checks are implicitly disabled"):
            warnings.filterwarnings("ignore", text, UserWarning)
        yield


@contextmanager
def plain_products(device: torch.device, precision: Precision) -> Iterator[None]:
    """Multiply float32 matrices on an ARM processor without oneDNN inside the block.

    It prepares for each product of attention longer (0.1 to 0.6 ms) than that takes.
    """
    if device.type != "cpu" or precision != "float32" or platform.machine() != "aarch64":
        yield
        return
    onednn: Any = torch.backends.mkldnn  # its `flags` would warn of Intel's GPUs
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


@contextmanager
def spare_workspace(device: torch.device, size: str = _SMALL) -> Iterator[None]:
    """Let cuBLAS keep less memory for itself, unless the environment says how much.

    On Hopper it takes 32 MiB for each thread and stream that multiplies matrices, of which training
    has two; with 4 MiB training was as fast (docs/notebook.md). It looks when it is first used.
    """
    if device.type != "cuda" or _WORKSPACE in os.environ:
        yield
        return
    os.environ[_WORKSPACE] = size
    try:
        yield
    finally:
        del os.environ[_WORKSPACE]


@contextmanager
def same_bits(device: torch.device) -> Iterator[None]:
    """Let torch use only deterministic algorithms inside the block; a CPU does in any case."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    # The fused kernels of attention sum their gradients in any order; and without workspaces of
    # its choice, torch refuses to promise anything of cuBLAS.
    with spare_workspace(device, _SAME_BITS), sdpa_kernel(SDPBackend.MATH):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=only_warn)


class PeakMemory:
    """Peak memory of phases of the work, each by itself.

    On a GPU it is the memory that torch allocated. On a CPU it is the resident memory of the
    process: exact where a phase takes more than any before it, else the highest of fifty samples a
    second. The system's own record of the peak is read, and left to others as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.measures = "GPU memory allocated" if on_gpu else "resident memory of the process"
        self._sampled = 0.0  # of the phase under way
        self._before = 0.0  # the peak of the process when it began

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Measure the peak of the block."""
        over = threading.Event()
        sampling = threading.Thread(target=self._sample, args=(over,), daemon=True)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            over.set()
        self._sampled, self._before = _resident_mib()
        sampling.start()
        try:
            yield
        finally:
            over.set()
            sampling.join()

    def peak(self) -> float:
        """The peak of the phase under way, or of the last one, in MiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _MIB
        resident, peak = _resident_mib()
        self._sampled = max(self._sampled, resident)
        return peak if peak > self._before else self._sampled

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(_SAMPLE_SECONDS):
            self._sampled = max(self._sampled, _resident_mib()[0])


def _resident_mib() -> tuple[float, float]:
    """Resident memory of the process now, and its peak since it began."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        kib = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("Vm")}
        return kib["VmRSS:"] / 1024, kib["VmHWM:"] / 1024
    except (OSError, KeyError):  # not Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mib = peak / _MIB if sys.platform == "darwin" else peak / 1024
        return peak_mib, peak_mib
