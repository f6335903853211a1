"""Training reads the sequences where they lie: no step of it holds them all in memory."""

import subprocess
import sys
from pathlib import Path

from tests.cycle_data import make_cycle

_EVENTS = 1 << 27  # 512 MiB of items
_PROGRAM = """
import re, resource, sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from sce import SASRec, ScalableCrossEntropy, TrainingSettings, fit
from sce.data.prepared import PreparedDataset, Sequences

dataset = PreparedDataset.load(sys.argv[1])
items = np.memmap(sys.argv[2], np.int32, "r")
offsets = np.linspace(0, len(items), 101).astype(np.int64)
train = Sequences(items, offsets, np.arange(100, dtype=np.int32))
settings = TrainingSettings(max_steps=2, batch_size=32, device="cpu")
model = SASRec(dataset.n_items, dim=8, max_length=20)
used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, 2 * (used + items.nbytes // 2,))
try:
    np.array(items)
    sys.exit("there is no limit")
except MemoryError:
    pass
dataset = replace(dataset, train=train)
fit(model, ScalableCrossEntropy(), dataset, settings=settings, out=sys.argv[3])
"""


def test_training_has_not_all_sequences_in_memory(tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "cycle")
    with (tmp_path / "items").open("wb") as file:
        file.truncate(4 * _EVENTS)  # a hole: zeros that take no disk
    paths = map(str, (dataset.path, tmp_path / "items", tmp_path / "run"))
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
