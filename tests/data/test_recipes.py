"""The recipes of docs/large-logs.md, as they are printed there."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from sce.data.prepare import prepare

DOCUMENT = Path(__file__).parents[2] / "docs" / "large-logs.md"


@pytest.mark.parametrize("engine", ["pyspark", "duckdb"])
@pytest.mark.filterwarnings("ignore::sce.data.prepare.PrepareWarning")
def test_an_engine_writes_the_parts(engine: str, tmp_path: Path) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    if engine == "pyspark" and shutil.which("java") is None:
        pytest.skip("there is no Java")
    users = np.repeat(np.arange(100), 10)
    frame = pl.DataFrame(
        {
            "user_id": users,
            "item_id": [f"item {place % 13}" for place in range(len(users))],
            "timestamp": 1_600_000_000 + np.arange(len(users)),  # each its own
        }
    ).sample(fraction=1, shuffle=True, seed=0)
    (tmp_path / "logs").mkdir()
    for number in range(4):
        frame[250 * number : 250 * number + 250].write_csv(tmp_path / "logs" / f"{number}.csv")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (recipe,) = (block for block in blocks if engine in block)
    subprocess.run([sys.executable, "-c", recipe], cwd=tmp_path, check=True, capture_output=True)
    found = prepare(tmp_path / "parts", tmp_path / "data", partitions=True)
    whole = prepare(str(tmp_path / "logs" / "*.csv"), tmp_path / "whole")
    assert found.content_hash == whole.content_hash
