"""The export directory, as it is read without torch.

DIR/export.json         manifest: size and digest of every other file, the run, the check
DIR/encoder.onnx        (or .pt2) embedded [b, l, d], lengths [b] -> states [b, d]; of a model that
                        uses times, also times [b, l + 1], int32: see Engine.states
DIR/items.safetensors   the item table, "catalogue" [n, d]
DIR/items.voyager       a graph of the items for approximate search, if wanted: see index.py
DIR/items_*.npy         the item vocabulary: row i is the id of catalogue index i
DIR/popularity.npy      training events of each item, by catalogue index, if the run has them
DIR/titles_*.npy        titles by catalogue index, laid out as the strings of a vocabulary, if any

The encoder takes rows of the table and does not hold it: other items need another table and
vocabulary, not another encoder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.manifest import Manifest
from sce.data.shapes import misfit, parse_json
from sce.data.storage import json_checksum
from sce.data.vocabulary import Vocabulary

_MEASURED = ("difference", "scale", "overlap@10")
TABLE, TENSOR, INDEX = "items.safetensors", "catalogue", "items.voyager"
ITEMS, TITLES, POPULARITY = "items", "titles", "popularity.npy"
MANIFEST = Manifest(
    file="export.json",
    format="sce export",
    version=1,
    noun="model export",
    command="sce export RUN",
    remedy="export the run again",
    shape={
        "sce": str,
        "encoder": str,
        "item_ids": str,
        "max_length": int,
        "times?": bool,
        "model": str,
        "run": {"identity": str, "dataset": str},
        "check?": {"histories": int, **dict.fromkeys(_MEASURED, int | float)},
        "index?": {"effort": int, "recall@10": int | float},
    },
)
_HEADER = {"dtype": str, "shape": [int], "data_offsets": [int]}


class Exported(NamedTuple):
    """An export, opened: its files are as they were written."""

    manifest: dict[str, Any]
    encoder: bytes
    table: NDArray[np.float32]  # [n, d], memory-mapped
    item_ids: Vocabulary
    titles: Vocabulary | None  # by catalogue index: not sorted, only to be decoded
    popularity: NDArray[np.int64] | None
    graph: NDArray[np.uint8] | None  # of its index, the bytes
    version: str  # of the content


def open_export(path: Path | str) -> Exported:
    """Open an export.

    Raises:
        InputError: When there is none, or it is not as it was written.
    """
    path = Path(path)
    manifest, files = MANIFEST.open(path)
    try:
        table = _read_table(files[TABLE])
        item_ids = Vocabulary.from_arrays(manifest["item_ids"], _parts(files, ITEMS))
        parts = _parts(files, TITLES)
        titles = Vocabulary.from_arrays("string", parts) if parts else None
        popularity = files.get(POPULARITY)
        beside = (item_ids, titles, popularity)
        if any(len(each) != len(table) for each in beside if each is not None):
            raise ValueError(f"the table has {len(table):,} items, and what is beside it has not")
        encoder = files[manifest["encoder"]].tobytes()
        if manifest["max_length"] < 1:
            raise ValueError(f"its max_length is {manifest['max_length']}")
    except KeyError as error:
        raise MANIFEST.damaged(path, f"{error.args[0]} is not listed") from error
    except (ValueError, RecursionError) as error:
        raise MANIFEST.damaged(path, str(error)) from error
    version = json_checksum({"files": manifest["files"]})
    graph = files.get(INDEX)
    return Exported(manifest, encoder, table, item_ids, titles, popularity, graph, version)


def _parts(files: Mapping[str, NDArray[Any]], owner: str) -> dict[str, NDArray[Any]]:
    """Arrays of a vocabulary: from items_values.npy to values."""
    named = {Path(name).stem: array for name, array in files.items() if name.endswith(".npy")}
    begins = f"{owner}_"
    return {n.removeprefix(begins): array for n, array in named.items() if n.startswith(begins)}


def _read_table(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The table in the bytes of a safetensors file, not copied."""
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    content = parse_json(data[8:begin].tobytes())
    if misfit(content, {TENSOR: _HEADER}) is not None or content[TENSOR]["dtype"] != "F32":
        raise ValueError(f"{TABLE} has no table of float32")
    (rows, dim), (first, end) = content[TENSOR]["shape"], content[TENSOR]["data_offsets"]
    if min(rows, dim, first) < 0 or end - first != 4 * rows * dim:
        raise ValueError(f"{TABLE} has a table of another size")
    return data[begin + first : begin + end].view(np.float32).reshape(int(rows), int(dim))
