"""Kernels compile for a GPU that is not here: the interpreter sees neither types nor limits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from sce.losses import kernels
from tests.losses.kernels import compile_launches

# Of 512 dimensions rows are cut into slices.
CASES = ["bfloat16,64,coverage", "float32,24,paper", "autocast,32,wide", "bfloat16,64,exact",
         "float32,512,coverage"]  # fmt: skip


def test_every_kernel_compiles(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", compile_launches.__name__, *CASES]
    root = Path(__file__).parents[3]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    sources = [path.read_text() for path in Path(kernels.__path__[0]).glob("*.py")]
    expected = re.findall(r"^def (\w+_kernel)\(", "".join(sources), re.MULTILINE)
    assert found.stdout.split()[1:] == sorted(expected)
