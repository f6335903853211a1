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

# Of 512 dimensions rows are cut into slices; mixed: float32 states, a catalogue in half precision.
CASES = ["bfloat16,64,coverage", "float32,24,paper", "autocast,32,wide", "bfloat16,64,exact",
         "float32,512,coverage", "bfloat16,128,coverage", "mixed,64,coverage",
         "mixed,16,paper"]  # fmt: skip


def compiled(chip: int, cases: list[str], cache: Path) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", compile_launches.__name__, str(chip), *cases]
    root = Path(__file__).parents[3]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.split()[1:]


def test_every_kernel_compiles(tmp_path: Path) -> None:
    sources = [path.read_text() for path in Path(kernels.__path__[0]).glob("*.py")]
    expected = re.findall(r"^def (\w+_kernel)\(", "".join(sources), re.MULTILINE)
    assert compiled(90, CASES, tmp_path) == sorted(expected)


@pytest.mark.parametrize(
    ("chip", "cases", "kernel"),
    [
        (86, ["float32,64,coverage"], "_mark_kernel"),
        (100, ["autocast,256,exact", "bfloat16,512,exact"], "_forward_kernel"),
    ],
)
def test_other_chips_have_enough_shared_memory(
    chip: int, cases: list[str], kernel: str, tmp_path: Path
) -> None:
    assert kernel in compiled(chip, cases, tmp_path)
