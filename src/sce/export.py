"""Write a run as an export: see `sce.serving.exported` for its files.

What is written is loaded as a server loads it and compared with the run, on histories of the run's
dataset where it is found; an export that differs is not left behind.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sce import __version__
from sce.data.items import Items
from sce.data.prepared import check_target
from sce.data.requests import Query
from sce.data.storage import atomic_directory
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, checked, needing
from sce.evaluation.queries import states_after
from sce.models.base import Backbone
from sce.recommend import Recommender
from sce.serving.engine import Encode, Engine, Request
from sce.serving.exported import INDEX, MANIFEST, TENSOR, open_export, write_export
from sce.serving.index import EFFORTS, GOAL, Index
from sce.training.run import Run

TOLERANCE = 1e-5  # of scores, as a part of the largest of their history
# Large weights sharpen attention: in float32 the run's own scores are then off by 1e-4 or so, as
# are those of any other order of operations. Eight times that is allowed too, up to a limit.
_ROUNDING, _MOST = 8, 1e-3
HISTORIES = 256  # compared
_K = 10
_BATCH, _LENGTH = 5, 7  # of the trace: any but 0 and 1, which would be taken for constants
_ITEMS_AT_ONCE = 1 << 16

Format = Literal["onnx", "pt2"]


@checked
def export(
    run: Run | Path | str,
    out: Path | str,
    format: Format = "onnx",  # noqa: A002
    *,
    index: bool = False,
    data: Path | str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write the best weights of a run as an export, whole or not at all.

    Args:
        run: The run, or its directory.
        out: The directory to write.
        format: Of the encoder: "onnx", which needs no torch to run, or "pt2", of `torch.export`,
            for `load_pt2`.
        index: Add an index for approximate search, to the format onnx.
        data: The run's dataset, if it was moved. Without it random histories are compared.
        force: Replace an export that is there.

    Returns:
        What the comparison with the run found, as the manifest has it; and under "index", the
        recall of the index.
    """
    if index and format != "onnx":
        raise InputError(f"an index is used with the format onnx only; got {format}")
    exists = check_target(out, force=force, manifest=MANIFEST)
    opened = run if isinstance(run, Run) else Run.open(run)
    recommender = Recommender.load(opened, "cpu")
    model = _exportable(recommender)
    with atomic_directory(Path(out), replace=exists) as directory:
        name = f"encoder.{format}"
        _write_encoder(model, directory / name)
        table = model.catalogue.detach().numpy()
        graph = Index.build(table) if index else None
        if graph is not None:
            (directory / INDEX).write_bytes(graph.graph.as_bytes())
        items = Items(opened.item_ids, opened.titles, opened.popularity)
        content: dict[str, Any] = {
            "sce": __version__,
            "encoder": name,
            "max_length": model.max_length,
            "model": opened.model,
            **({"times": True} if model.uses_times else {}),
            "run": {
                "identity": opened.identity,
                "dataset": opened.dataset.content_hash,
                "times": opened.dataset.times,
            },
        }
        content = write_export(directory, table, items, content)
        load = partial(Engine.load, index=False) if format == "onnx" else load_pt2
        engine = load(directory)
        queries, source = _queries(opened, data, model)
        found: dict[str, Any] = {"check": {"of": source, **compare(engine, recommender, queries)}}
        if graph is not None:
            found["index"] = measure_index(engine, graph, queries)
        MANIFEST.write(directory, content | found)
    return {**found.pop("check"), **found}


def load_pt2(path: Path | str) -> Engine:
    """An engine of an export in the format of `torch.export`."""
    exported = open_export(path)
    program = torch.export.load(Path(path) / exported.manifest["encoder"])
    return Engine.of(exported, by_torch(program.module()), index=False)


def measure_index(engine: Engine, index: Index, queries: Sequence[Query]) -> dict[str, Any]:
    """The least effort of an index that reaches its goal, and its recall@10."""
    asked = _asked(engine.item_ids, queries)
    exact = [{*found.items} for found in engine.recommend(asked)]
    for effort in EFFORTS:
        searching = replace(engine, index=replace(index, effort=effort))
        found = [{*one.items} for one in searching.recommend(asked)]
        shared = sum(len(mine & best) for mine, best in zip(found, exact, strict=True))
        recall = shared / max(1, sum(map(len, exact)))
        if recall >= GOAL:
            break
    return {"effort": effort, "recall@10": recall}


def compare(engine: Engine, recommender: Recommender, queries: Sequence[Query]) -> dict[str, Any]:
    """Compare an engine with the run: the scores of all items, and the ten best.

    Differences are measured against the largest score of their history. `TOLERANCE` is allowed, or
    some times the largest difference between the run and the same weights in float64.

    Raises:
        InputError: When a score differs by more, or other items are among the ten best than those
            of equal scores.
    """
    model = _exportable(recommender)
    catalogue = model.catalogue.detach()
    with torch.no_grad():
        states = states_after(model, queries)
        found = engine.states([one.history for one in queries], [one.times for one in queries])
        other, exact = torch.from_numpy(found), _exact_states(model, queries)
        scales, differences, rounding = (
            _largest(each, catalogue) for each in (states, other - states, exact - states)
        )
    part, own = (float((each / scales).nan_to_num(0).amax()) for each in (differences, rounding))
    allowed = min(_MOST, max(TOLERANCE, _ROUNDING * own))
    if not bool((differences <= allowed * scales).all()):  # also where one is not a number
        raise InputError(
            f"the export is not the run: scores differ by up to {float(differences.max()):.3g}, "
            f"{part:.1e} of the largest of their history, and {allowed:.1e} is allowed (float32 "
            f"makes {own:.1e} of the run's own); nothing was written"
        )
    asked, shared, total = _asked(recommender.item_ids, queries), 0, 0
    both = zip(
        engine.recommend(asked), recommender.stream(asked, 1), strict=True
    )  # with their own k
    slack = (allowed * scales).tolist()
    for state, most_off, (mine, theirs) in zip(states, slack, both, strict=True):
        codes = torch.from_numpy(recommender.item_ids.lookup(mine.items))
        scores = catalogue[codes] @ state
        least = float(theirs.scores[-1]) if len(theirs) else 0.0
        worse = least - float(scores.min()) if len(codes) else 0.0
        off = float(np.abs(scores.numpy() - mine.scores).max(initial=0))
        if len(mine.items) != len(theirs) or max(worse, off) > most_off:
            raise InputError(
                f"the export is not the run: other items are the best {mine.asked}, {mine.items} "
                f"instead of {theirs.items}; their scores are up to {max(worse, off):.3g} off, and "
                f"{most_off:.3g} is allowed; nothing was written"
            )
        shared += len({*mine.items} & {*theirs.items})
        total += len(theirs)
    return {
        "histories": len(queries),
        "difference": float(differences.max()),
        "scale": float(scales.max()),
        "allowed": allowed,
        "overlap@10": shared / max(1, total),
    }


class _Encoder(nn.Module):
    """The model without its catalogue: a format keeps all weights, also those not used."""

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.model = model.settings.build(1)
        weights = {name: w for name, w in model.state_dict().items() if name != TENSOR}
        self.model.load_state_dict(weights, strict=False)
        self.eval()

    def forward(self, embedded: Tensor, lengths: Tensor, times: Tensor | None = None) -> Tensor:
        more = () if times is None else (times,)
        return self.model.encode(embedded, lengths, *more)  # type: ignore[no-any-return]


def _exact_states(model: Backbone, queries: Sequence[Query]) -> Tensor:
    """The states after histories, computed in float64, one by one."""
    encode, most, found = _Encoder(model).double(), model.max_length, []
    for one in queries:
        embedded = model.catalogue[torch.tensor(one.history[-most:])][None].double()
        # The next event is right after the last.
        seconds = [] if one.times is None else [[*one.times[-most:], one.times[-1]]]
        more = [torch.tensor([each], dtype=torch.int32) for each in seconds]
        found.append(encode(embedded, torch.tensor([embedded.shape[1]]), *more))
    return torch.cat(found).float()


def _asked(item_ids: Vocabulary, queries: Sequence[Query]) -> list[Request]:
    times = (None if one.times is None else one.times.tolist() for one in queries)
    pairs = zip(queries, times, strict=True)
    return [Request(item_ids.decode(one.history), one.k, times=some) for one, some in pairs]


def _exportable(recommender: Recommender) -> Backbone:
    model = recommender.model
    if not isinstance(model, Backbone) or type(model).encode is Backbone.encode:
        name = type(model).__name__
        raise InputError(f"{name} has no method `encode` and cannot be exported: see Backbone")
    return model


def by_torch(encode: Any) -> Encode:
    """An encoder of torch for an engine."""

    @torch.no_grad()
    def run(*given: NDArray[Any]) -> NDArray[np.float32]:
        found: Tensor = encode(*map(torch.from_numpy, given))
        return found.numpy()

    return run


def _write_encoder(model: Backbone, file: Path) -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    dim = model.catalogue.shape[1]
    given = [torch.zeros(_BATCH, _LENGTH, dim), torch.ones(_BATCH, dtype=torch.int64)]
    shapes: dict[str, Any] = {"embedded": {0: batch, 1: length}, "lengths": {0: batch}}
    if model.uses_times:
        shapes["times"] = {0: batch, 1: length + 1}
        given.append(torch.zeros(_BATCH, _LENGTH + 1, dtype=torch.int32))
    with _quiet(), torch.no_grad():
        program = torch.export.export(_Encoder(model), tuple(given), dynamic_shapes=shapes)
        for part in program.graph_module.modules():
            if isinstance(part, torch.fx.GraphModule):
                for node in part.graph.nodes:
                    node.meta.pop("stack_trace", None)  # with paths of this machine
        if file.suffix == ".pt2":
            torch.export.save(program, file)
        else:
            with needing("export", "the format onnx"):
                import onnxscript  # noqa: F401  # used by torch
            converted = torch.onnx.export(program, dynamo=True, verbose=False)
            assert converted is not None
            _strip(written := converted.model_proto)  # made anew whenever it is asked for
            file.write_bytes(written.SerializeToString())


def _strip(part: Any) -> None:
    """Clear what was noted beside a graph and all inside it: paths of this machine."""
    for field, value in part.ListFields():
        if field.name in ("metadata_props", "doc_string"):
            part.ClearField(field.name)
        elif field.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                _strip(each)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch says of itself: missing torchvision, deprecations in its own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _queries(run: Run, data: Path | str | None, model: Backbone) -> tuple[list[Query], str]:
    """Queries to compare, and where their histories are from: the dataset, or chance."""
    random, source, n_items = np.random.default_rng(0), "random", len(run.item_ids)
    lengths = np.linspace(1, model.max_length, HISTORIES).astype(np.int64)
    found: list[Any] = [random.integers(n_items, size=n) for n in lengths]
    gaps = (random.integers(1 << 17, size=n) for n in lengths)
    times: list[Any] = [np.cumsum(one, dtype=np.int32) for one in gaps]
    try:
        dataset = run.load_dataset(data, verify=False)
    except InputError:
        if data is not None:
            raise
    else:
        users = np.linspace(0, len(dataset.everyone) - 1, 2 * HISTORIES).astype(np.int64)
        users = np.unique(users)
        users = users[[len(one) > 0 for one in dataset.histories(users)]][:HISTORIES]
        if len(users):
            found, source = dataset.histories(users), "dataset"
            times = dataset.histories(users, "times") if model.uses_times else []
    queries = [Query(one, min(_K, n_items), False) for one in found]
    if model.uses_times:
        both = zip(queries, times, strict=True)
        queries = [one._replace(times=some) for one, some in both]
    return queries, source


def _largest(states: Tensor, catalogue: Tensor) -> Tensor:
    """By state, the largest absolute score of any item."""
    found = [(states @ chunk.T).abs().amax(1) for chunk in catalogue.split(_ITEMS_AT_ONCE)]
    return torch.stack(found).amax(0)
