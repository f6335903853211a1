import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sce.serving import onnx_graph as module
from sce.serving.onnx_graph import INT8, INT32, Graph


def test_a_graph_is_onnx_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[bytes] = []
    onnx_function = module.onnx_function

    def kept(model: bytes) -> Any:
        models.append(model)
        return onnx_function(model)

    monkeypatch.setattr(module, "onnx_function", kept)
    graph = Graph()
    weights = np.arange(-300, 300, dtype=np.int64).astype(np.int8).reshape(3, 200)
    product = graph.node("MatMulInteger", "given", graph.constant(weights))
    largest = graph.node("ReduceMax", product, graph.constant(np.array([-1])), keepdims=1)
    run = graph.run(("given", INT8, 3), (largest, INT32, 1))
    onnx.checker.check_model(onnx.load_from_string(models[0]))
    given = np.array([[1, -2, 3], [-128, 127, 0]], np.int8)
    wanted = (given.astype(np.int64) @ weights.astype(np.int64)).max(axis=1, keepdims=True)
    assert np.array_equal(run(given), wanted)


def test_onnxruntime_reports_to_nobody(tmp_path: Path) -> None:
    """Where it does, it leaves a file with the number of its session."""
    code = "from sce.serving.onnx_graph import *\n"
    code += "graph = Graph(); made = graph.node('Neg', 'given')\n"
    code += "graph.run(('given', INT32, 1), (made, INT32, 1))"
    others = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment = others | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not [*tmp_path.iterdir()]
