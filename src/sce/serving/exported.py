"""The export directory, as it is read, and given new items, without torch.

DIR/export.json         manifest: size and digest of every other file, the run, the check
DIR/encoder.onnx        (or .pt2) embedded [b, l, d], lengths [b] -> states [b, d]; of a model that
                        uses times, also times [b, l + 1], int32: see Engine.states
DIR/items.safetensors   the item table, "catalogue" [n, d]
DIR/items.voyager       a graph of the items for approximate search, if wanted: see index.py
DIR/items_*.npy, titles_*.npy, popularity.npy   as a run has them: see sce.data.items

The encoder takes rows of the table and does not hold it: other items need another table and
vocabulary, not another encoder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sce.data.items import Items
from sce.data.manifest import Manifest, describe_file
from sce.data.new_items import grow
from sce.data.prepared import check_target
from sce.data.shapes import misfit, parse_json
from sce.data.storage import atomic_directory, json_checksum
from sce.errors import InputError

_MEASURED = ("difference", "scale", "overlap@10")
TABLE, TENSOR, INDEX = "items.safetensors", "catalogue", "items.voyager"
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
        "run": {"identity": str, "dataset": str, "times?": str},
        "check?": {"histories": int, **dict.fromkeys(_MEASURED, int | float)},
        "index?": {"effort": int, "recall@10": int | float},
        "added?": int,
    },
)
_HEADER = {"dtype": str, "shape": [int], "data_offsets": [int]}


class Exported(NamedTuple):
    """An export, opened: its files are as they were written."""

    manifest: dict[str, Any]
    encoder: bytes
    table: NDArray[np.float32]  # [n, d], memory-mapped
    items: Items
    graph: NDArray[np.uint8] | None  # of its index, the bytes
    version: str  # of the content


def open_export(path: Path | str) -> Exported:
    """Open an export; refused where there is none, or it is not as it was written."""
    path = Path(path)
    manifest, files = MANIFEST.open(path)
    try:
        table = _read_table(files[TABLE])
        items = Items.read(manifest["item_ids"], files)
        if len(items.ids) != len(table):
            raise ValueError(f"the table has {len(table):,} items, and what is beside it has not")
        encoder = files[manifest["encoder"]].tobytes()
        if manifest["max_length"] < 1:
            raise ValueError(f"its max_length is {manifest['max_length']}")
    except KeyError as error:
        raise MANIFEST.damaged(path, f"{error.args[0]} is not listed") from error
    except (ValueError, RecursionError) as error:
        raise MANIFEST.damaged(path, str(error)) from error
    version = json_checksum({"files": manifest["files"]})
    return Exported(manifest, encoder, table, items, files.get(INDEX), version)


def write_export(
    directory: Path, table: NDArray[np.float32], items: Items, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Write table, items and manifest beside an encoder that is there; return the manifest."""
    head = {"dtype": "F32", "shape": table.shape, "data_offsets": [0, table.nbytes]}
    text = json.dumps({TENSOR: head}).encode()
    text += b" " * (-len(text) % 8)  # so that the table begins at a multiple of its words
    with (directory / TABLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(np.ascontiguousarray(table).data)
    items.write(directory)
    files = {file.name: describe_file(file) for file in sorted(directory.iterdir())}
    manifest = {**content, "item_ids": items.ids.kind, "files": files}
    MANIFEST.write(directory, manifest)
    return manifest


def add_items(
    path: Path | str, items: Path | str, out: Path | str, *, force: bool = False
) -> dict[str, Any]:
    """Write an export with new items beside those of another, and the same encoder.

    Items are as those for a run: see `sce.training.new_items.add_items`. With `force` an export
    that is there is replaced, also that of the path itself. Returns what was added: see `grow`.
    """
    exported = open_export(path)
    if exported.graph is not None:
        raise InputError(
            f"{path} has an index, which finds no others than its items; add new ones to the run "
            "with sce add-items RUN, and export what that writes with --index"
        )
    exists = check_target(out, force=force, manifest=MANIFEST)
    grown, manifest = grow(exported.items, exported.table, Path(items)), exported.manifest
    table = exported.table[grown.sources]
    table[grown.sources < 0] = grown.rows
    added = manifest.get("added", 0) + len(grown.rows)
    with atomic_directory(Path(out), replace=exists) as directory:
        (directory / manifest["encoder"]).write_bytes(exported.encoder)
        write_export(directory, table, grown.items, {**manifest, "added": added})
    return grown.added


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
