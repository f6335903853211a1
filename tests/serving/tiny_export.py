"""An export without a run: the state after a history is the vector of its last item."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from sce.data.items import Items
from sce.data.storage import atomic_directory
from sce.data.vocabulary import Vocabulary
from sce.serving import exported
from sce.serving.engine import Engine

ITEM_IDS = Vocabulary.from_integers(range(100, 140))
TITLED = [f"Item {number}" if number % 7 else "" for number in range(40)]


def random_table(items: int = 40, dim: int = 8, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((items, dim)).astype(np.float32)


def listed(titles: Sequence[str]) -> Vocabulary:
    """Titles by catalogue index."""
    texts = [title.encode() for title in titles]
    return Vocabulary.from_sorted_text(b"".join(texts), np.array([*map(len, texts)], np.int64))


def make_engine(version: str = "one", **changes: Any) -> Engine:
    """An engine in memory."""
    settings: dict[str, Any] = {
        "encode": lambda embedded, lengths: embedded[np.arange(len(lengths)), lengths - 1],
        "table": random_table(),
        "item_ids": ITEM_IDS,
        "max_length": 6,
        "titles": listed(TITLED),
    }
    return Engine(version=version, **(settings | changes))


def write_export(
    path: Path,
    *,
    seed: int = 0,
    titles: Vocabulary | None = None,
    popularity: NDArray[np.int64] | None = None,
    dataset: str = "none",
) -> Path:
    """Write one of 40 items, in place of one that is there."""
    with atomic_directory(path, replace=path.exists()) as directory:
        (directory / "encoder.onnx").write_bytes(_last_event())
        content = {
            "sce": "0",
            "encoder": "encoder.onnx",
            "max_length": 6,
            "model": "last event",
            "run": {"identity": "none", "dataset": dataset},
            "check": {"of": "random", "histories": 0, "difference": 0, "scale": 0, "overlap@10": 1},
        }
        items = Items(ITEM_IDS, titles, popularity)
        exported.write_export(directory, random_table(seed=seed), items, content)
    return path


def _last_event() -> bytes:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Sub", ["lengths", "one"], ["last"]),
        helper.make_node("Unsqueeze", ["last", "one"], ["places"]),
        helper.make_node("GatherND", ["embedded", "places"], ["states"], batch_dims=1),
    ]
    given = [
        helper.make_tensor_value_info("embedded", TensorProto.FLOAT, ["batch", "length", "dim"]),
        helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"]),
    ]
    made = [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["batch", "dim"])]
    graph = helper.make_graph(nodes, "last event", given, made, [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
