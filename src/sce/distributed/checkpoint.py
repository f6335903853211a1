"""Checkpoints of a sharded table, of the same bytes for any number of ranks.

`state-STEP/` has parts of the table and its optimizer, each of 2²² consecutive ids, all other
tensors in `rest.safetensors`, and in `state.json` the BLAKE2b of each file. It is put in place
whole, and then `latest.json` names it: after a crash there is the old checkpoint or the new one.
Reading executes no code.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.optim import Optimizer

from sce.data import storage
from sce.distributed.ranks import Ranks
from sce.distributed.table import ShardedTable, first_place, rounds
from sce.errors import InputError, checked

T = TypeVar("T")

LATEST = "latest.json"
_FORMAT, _VERSION = "sce sharded state", 1
_STATE, _REST = "state.json", "rest.safetensors"
_PART_ITEMS = 1 << 22
_ROWS_AT_ONCE = 1 << 18


@checked
def save_sharded(
    directory: Path | str,
    step: int,
    table: ShardedTable,
    optimizer: Optimizer,
    rest: Mapping[str, Tensor],
    progress: Mapping[str, Any] | None = None,
    *,
    more: Mapping[str, Tensor] | None = None,
    part_items: int = _PART_ITEMS,
) -> None:
    """Save a checkpoint, by all ranks together; earlier ones go once it is there.

    `directory` is one that all ranks see, `step` names the checkpoint, `optimizer` is that of the
    table's shard. `rest` are all other tensors, the same on every rank, `progress` is anything
    else, as JSON has it, and `more` other values of the shard by name, on any device, such as its
    best.
    """
    if step < 0 or part_items < 1:
        raise InputError(f"a step is not negative, and a file has items; got {step}, {part_items}")
    directory = Path(directory)
    ranks, place, stack = table.ranks, directory / f"state-{step}", ExitStack()
    shards = _shards(table, optimizer) | dict(more or {})
    _check(rest, shards, len(table.shard), progress)

    def make() -> str:
        if ranks.rank:
            return ""
        for left in directory.glob(".state-*"):
            storage.tidy(directory / left.name.split(".")[1])
        return stack.enter_context(storage.atomic_directory(place, replace=place.exists())).name

    def write() -> dict[str, str]:
        files, faults = {}, []
        for name, tensors in _collect(table, shards, part_items, rest):
            try:  # the other ranks go on
                data = save({key: one.detach().cpu().contiguous() for key, one in tensors.items()})
                with storage.atomic_file(half / name) as partial:
                    partial.write_bytes(data)
                files[name] = storage.digest_bytes(data)
            except InputError as error:
                faults.append(error)
        if faults:
            raise faults[0]
        return files

    def finish() -> None:
        if ranks.rank:
            return
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": step,
            "n_items": table.n_items,
            "dim": table.dim,
            "part_items": part_items,
            "shards": sorted(shards),
            "progress": dict(progress or {}),
            "files": dict(sorted(pair for files in written for pair in files.items())),
        }
        storage.write_json(half / _STATE, content)
        stack.close()
        storage.write_json(directory / LATEST, {"state": place.name})
        for left in directory.iterdir():
            if re.fullmatch(r"state-\d+", left.name) and left != place:
                shutil.rmtree(left, ignore_errors=True)

    with stack:  # what is half-written goes
        half = place.with_name(_together(ranks, make)[0])
        written = _together(ranks, write)
        _together(ranks, finish)


@checked
def load_sharded(
    directory: Path | str,
    table: ShardedTable,
    optimizer: Optimizer,
    *,
    more: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Restore table and optimizer from the latest checkpoint, of any number of ranks.

    Returns the other tensors, on the host, and the progress; `more` is filled as it was saved.
    """
    directory, ranks, shards = Path(directory), table.ranks, _shards(table, optimizer)
    latest = _together(ranks, lambda: "" if ranks.rank else _latest(directory))[0]
    place = directory / latest
    content = _together(ranks, partial(_read_state, place))[0]
    files = content["files"]
    was, now = [content["n_items"], content["dim"]], [table.n_items, table.dim]
    if was != now:
        raise InputError(f"{place / _STATE} is of a table {was}, and this one is {now}")
    if more is not None:
        new = [name for name in content["shards"] if name not in shards]
        more |= {name: torch.empty_like(table.shard, device="cpu") for name in new}
        shards |= more
    tensors: dict[str, Tensor] = {}  # of the file that was read last

    def read(name: str) -> None:
        if name:
            tensors.update(_read(place / name, files))

    _together(ranks, partial(read, _REST))
    rest = dict(tensors)
    for each in rounds(ranks, table.n_items, content["part_items"]):
        tensors.update({name: shard[:0] for name, shard in shards.items()})
        _together(ranks, partial(read, _part(each.part)))
        for name, shard in shards.items():
            part = tensors[name].to(table.shard.device, shard.dtype)
            given = ranks.exchange(each.cut(part), each.receive, each.send)
            shard[each.here] = given.to(shard.device)
    return rest, content["progress"]


def read_whole(
    directory: Path, name: str = "rows"
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Read the whole table of the latest checkpoint, the other tensors, and the progress.

    With the `name` "sum", the optimizer's state of all rows instead of these.
    """
    place = directory / _latest(directory)
    content = _read_state(place)
    files = content["files"]
    rest = _read(place / _REST, files)
    rows = torch.empty(0)
    for first in range(0, content["n_items"], content["part_items"]):
        part = _read(place / _part(first // content["part_items"]), files)[name]
        if first == 0:
            rows = part.new_empty(content["n_items"], *part.shape[1:])
        rows[first : first + len(part)] = part
    return rows, rest, content["progress"]


def whole_rows(
    table: ShardedTable, shard: Tensor, *, to_all: bool = False, at_once: int = _ROWS_AT_ONCE
) -> Iterator[Tensor]:
    """Yield rows of the table in the order of ids, on the host of the first rank, or of all.

    Other ranks, which must ask for them too, are given empty tensors. `shard` are values of the
    table's shard, on any device.
    """
    rank, size, n_items = table.ranks.rank, table.ranks.size, table.n_items
    for first in range(0, n_items, at_once):
        starts, ends = (
            [first_place(min(item, n_items), of, size) for of in range(size)]
            for item in (first, first + at_once)
        )
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        send = [counts[rank] if to_all or of == 0 else 0 for of in range(size)]
        receive = counts if to_all or rank == 0 else [0] * size
        here = shard[starts[rank] : ends[rank]].to(table.ranks.device)
        given = torch.cat([here] * size) if to_all else here
        received = table.ranks.exchange(given, send, receive)
        offsets = [(of - first) % size for of in range(size)]
        yield _interleave(received, receive, offsets).cpu()


def _latest(directory: Path) -> str:
    """Name the latest checkpoint, and see that it is in place."""
    if not (directory / LATEST).exists():
        raise InputError(f"{directory} has no checkpoint: {LATEST} is missing")
    name = str(storage.read_json(directory / LATEST)["state"])
    storage.tidy(directory / name)  # a save that was killed may have moved it aside
    return name


def _read_state(place: Path) -> dict[str, Any]:
    """Read what a checkpoint consists of."""
    state = place / _STATE
    try:
        content = storage.read_json(state)
    except OSError as error:
        raise InputError(f"cannot read {state}: {error.strerror}") from error
    if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        raise InputError(f"{state} is no checkpoint that this sce can read")
    return content


def _collect(
    table: ShardedTable, shards: Mapping[str, Tensor], part_items: int, rest: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield the name and the tensors of each file that this rank writes."""
    ranks = table.ranks
    if ranks.rank == 0:
        yield _REST, rest
    for each in rounds(ranks, table.n_items, part_items):
        tensors = {}
        for name, shard in shards.items():
            given = shard[each.here].to(table.shard.device)
            received = ranks.exchange(given, each.send, each.receive)
            tensors[name] = _interleave(received, each.receive, each.offsets)
        if name := _part(each.part):
            yield name, tensors


def _interleave(rows: Tensor, counts: list[int], offsets: list[int]) -> Tensor:
    """Put rows that came by rank into the order of ids."""
    found = torch.empty_like(rows)
    for offset, part in zip(offsets, rows.split(counts), strict=True):
        found[offset :: len(counts)] = part
    return found


def _part(number: int | None) -> str:
    return "" if number is None else f"table-{number:06}.safetensors"


def _shards(table: ShardedTable, optimizer: Optimizer) -> dict[str, Tensor]:
    sums = optimizer.state.get(table.shard, {}).get("sum")
    if sums is None or sums.shape != table.shard.shape[:1]:
        found = type(optimizer).__name__
        raise InputError(f"a sharded table needs a sce.RowwiseAdagrad of its shard; got {found}")
    return {"rows": table.shard.detach(), "sum": sums}


def _check(
    rest: Mapping[str, Tensor], shards: Mapping[str, Tensor], rows: int, progress: Any
) -> None:
    """Refuse what cannot be saved, before anything is written."""
    for name, tensor in [*rest.items(), *shards.items()]:
        if not isinstance(tensor, Tensor):
            raise InputError(f"a checkpoint has tensors; {name} is a {type(tensor).__name__}")
    for name, tensor in shards.items():
        if tensor.shape[:1] != (rows,):
            raise InputError(f"{name} must have the {rows} rows of the shard; got {tensor.shape}")
    try:
        json.dumps(progress)
    except (TypeError, ValueError) as error:
        raise InputError(f"progress is kept as JSON, and cannot be: {error}") from error


def _read(path: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if storage.digest_bytes(data) != files.get(path.name):
        raise InputError(f"{path} is half-written or altered")
    return load(data)


def _together(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Do something on every rank and return all results, as JSON has them; all fail if one does."""
    result, fault = None, ""
    try:
        result = work()
    except InputError as error:
        fault = str(error)
    found = ranks.gather_json([result, fault])
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(found) if fault]
    if faults:
        raise InputError("; ".join(faults) if ranks.size > 1 else fault)
    return [each for each, _ in found]
