import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from sce import export as module
from sce.cli import main
from sce.data.prepared import PreparedDataset
from sce.data.requests import Query
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.export import by_torch, compare, export, load_pt2, measure_index
from sce.models.base import Backbone
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.models.sasrec import SASRec
from sce.recommend import Recommender
from sce.serving import engine as engine_module
from sce.serving.engine import Engine, Request
from sce.serving.exported import open_export
from sce.serving.index import Index
from sce.training.checkpoint import read_tensors, write_tensors
from sce.training.run import Run
from sce.training.run_start import start_run
from tests.complaint import complaint
from tests.tiny_run import make_dataset, make_run, write_result

ITEMS, MAX_LENGTH = 90, 9
NAMES = [f"item {n:02d}" for n in range(ITEMS)]
TITLES = Vocabulary.from_sorted_text(b"A title", np.array([7] + [0] * (ITEMS - 1)))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    users = Vocabulary.from_integers(range(30))
    path = tmp_path_factory.mktemp("data") / "tiny"
    return make_dataset(path, Vocabulary.from_strings(NAMES), users)


def start(path: Path, dataset: PreparedDataset, name: str, *, seed: int = 1, **options: Any) -> Run:
    """A run of a backbone, with weights that no layer's beginning has."""
    blocks = 2 if name == DEFAULT_BACKBONE else 1  # writing a graph takes seconds
    settings = {"dim": 16, "blocks": blocks, "max_length": MAX_LENGTH, **options}
    config = {"model": {"name": name, **settings}, "loss": {"name": "ce"}, "training": {}}
    run = start_run(path, dataset, config=config, derived={}, model=name)
    model: Any = BACKBONES[name].settings(**settings).build(ITEMS, seed=seed)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    write_tensors(run.best_weights, model.state_dict(), {"run": run.identity})
    write_result(run)
    return run


# For what does not depend on the backbone.
ONE = pytest.mark.parametrize("exported", [DEFAULT_BACKBONE], indirect=True)


@pytest.fixture(scope="module", params=BACKBONES)
def exported(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    dataset: PreparedDataset,
) -> tuple[Run, Path]:
    """A run of every backbone, and its export."""
    place = tmp_path_factory.mktemp("exports")
    run = start(place / "run", replace(dataset, titles=TITLES), request.param)
    export(run, place / "onnx")
    return run, place / "onnx"


def run_engine(run: Run) -> Engine:
    """An engine whose encoder is that of the run: no graph need be traced."""
    model: Any = Recommender.load(run, "cpu").model
    table = model.catalogue.detach().numpy()
    return Engine(by_torch(model.encode), table, run.item_ids, model.max_length, run.identity)


def histories(length: int, batch: int) -> list[list[str]]:
    random = np.random.default_rng(length)
    return [[NAMES[n] for n in random.integers(0, ITEMS, length)] for _ in range(batch)]


def assert_equal(engine: Engine, run: Run) -> None:
    recommender = Recommender.load(run, "cpu")
    for length in range(1, MAX_LENGTH + 3):
        for batch in (1, 7, 64) if length in (1, MAX_LENGTH) else (7,):
            given = histories(length, batch)
            ours = engine.recommend([Request(one) for one in given])
            for mine, theirs in zip(ours, recommender.recommend(given, 10), strict=True):
                atol = 1e-5 * max(1.0, np.abs(theirs.scores).max())
                np.testing.assert_allclose(mine.scores, theirs.scores, rtol=0, atol=atol)
                assert mine.items == theirs.items


def test_an_export_is_the_run(exported: tuple[Run, Path]) -> None:
    run, path = exported
    engine = Engine.load(path)
    assert (engine.n_items, engine.dim, engine.max_length) == (ITEMS, 16, MAX_LENGTH)
    assert engine.item_ids == run.item_ids
    assert engine.titles is not None
    assert engine.titles.decode([0, 1]) == ["A title", ""]
    assert engine.popularity is not None
    assert run.popularity is not None
    assert np.array_equal(engine.popularity, run.popularity)
    assert engine.dataset == (run.dataset.content_hash, run.dataset.times)
    (unknown,) = engine.recommend([Request(["?"])])
    (wanted,) = Recommender.load(run, "cpu").recommend([["?"]])
    assert (unknown.items, unknown.source) == (wanted.items, "popular")
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
    assert_equal(engine, run)
    assert_equal(run_engine(run), run)
    mixed = [one for length in (1, 4, 9, 30) for one in histories(length, 3)]
    together = engine.recommend([Request(one) for one in mixed])
    for one, found in zip(mixed, together, strict=True):
        (alone,) = engine.recommend([Request(one)])
        assert alone.items == found.items


def test_the_encoder_knows_no_items(exported: tuple[Run, Path]) -> None:
    run, path = exported
    files = json.loads((path / "export.json").read_text())["files"]
    encoder = (path / "encoder.onnx").read_bytes()
    table = open_export(path).table
    weights = Recommender.load(run, "cpu").model.catalogue.detach().numpy()
    assert np.array_equal(table, weights)
    assert table[3].tobytes() not in encoder
    assert str(Path(module.__file__).parent).encode() not in encoder
    assert b"stack_trace" not in encoder
    assert {*files} == {file.name for file in path.iterdir()} - {"export.json"}


@pytest.mark.parametrize("name", BACKBONES)
def test_pt2_is_the_run(name: str, tmp_path: Path, dataset: PreparedDataset) -> None:
    others = {"heads": 2, "blocks": 1, "sink": False} if name == "sasrec" else {}
    run = start(tmp_path / "run", dataset, name, **others)
    found = export(run, tmp_path / "out", "pt2")
    assert found["of"] == "dataset"
    assert_equal(load_pt2(tmp_path / "out"), run)
    with pytest.raises(InputError, match=r"encoder\.pt2, which needs torch; export with --format"):
        Engine.load(tmp_path / "out")


@ONE
def test_any_flipped_bit_and_any_missing_file_is_refused(
    exported: tuple[Run, Path], tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(exported[1], path)
    random = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in {0, len(whole) - 3, *random.integers(0, len(whole) - 2, 4).tolist()}:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(random.integers(8))
            file.write_bytes(flipped)
            with pytest.raises(InputError, match=r"altered|is not a model export|version"):
                Engine.load(path)
        file.write_bytes(whole[:-9])
        with pytest.raises(InputError, match="half-written"):
            Engine.load(path)
        file.unlink()
        with pytest.raises(InputError, match=r"is missing|has no export\.json"):
            Engine.load(path)
        file.write_bytes(whole)
    assert Engine.load(path).version == Engine.load(exported[1]).version


@pytest.fixture
def run(exported: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose encoder need not be traced once more: that takes seconds."""
    encoder = (exported[1] / "encoder.onnx").read_bytes()
    monkeypatch.setattr(module, "_write_encoder", lambda _, file: file.write_bytes(encoder))
    return exported[0]


def test_new_items_need_no_new_export(
    run: Run, exported: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those added to the export are those of an export of the run with them added."""
    before, after = exported[1], tmp_path / "more"
    random = np.random.default_rng(0)
    lines: list[dict[str, Any]] = [
        {"item_id": "a new one", "similar_to": NAMES[3:6], "title": "Novelty"},
        {"item_id": "item 05b", "vector": random.normal(size=3).tolist()},
        *({"item_id": name, "vector": random.normal(size=3).tolist()} for name in NAMES[:30]),
    ]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given, out in ((before, after), (run.path, tmp_path / "run")):
        assert main(["add-items", str(given), str(file), "--out", str(out)]) == 0
        assert "2 items: 1 by similar items, 1 by content vectors" in capsys.readouterr().out
    export(tmp_path / "run", tmp_path / "exported")
    for written in sorted((tmp_path / "exported").iterdir()):
        same = written.read_bytes() == (after / written.name).read_bytes()
        assert same == (written.name != "export.json"), written.name
    assert (after / "encoder.onnx").read_bytes() == (before / "encoder.onnx").read_bytes()
    table = load_file(after / "items.safetensors")["catalogue"]
    assert np.array_equal(table, Recommender.load(tmp_path / "run").model.catalogue.detach())
    old, new = Engine.load(before), Engine.load(after)
    asked = [Request(one, ITEMS, keep_seen=True) for one in histories(4, 20)]
    for was, now in zip(old.recommend(asked), new.recommend(asked), strict=True):
        kept = [n for n, item in enumerate(now.items) if item in NAMES]
        assert [now.items[n] for n in kept] == was.items[: len(kept)]
        np.testing.assert_array_equal(now.scores[kept], was.scores[: len(kept)])
    (found,) = new.recommend([Request(["a new one", "item 05b"])])
    assert (found.known, found.source, len(found.items)) == (2, "model", 10)
    again = tmp_path / "again.jsonl"
    again.write_text('{"item_id": "third", "similar_to": ["a new one"]}')
    command = ["add-items", str(after), str(again), "--out", str(after)]
    assert "more exists; choose another" in complaint(command, capsys)
    of_run = ["add-items", str(run.path), *command[2:], "--force"]
    assert "--force replaces an export" in complaint(of_run, capsys)
    assert main([*command, "--force"]) == 0
    assert json.loads((after / "export.json").read_text())["added"] == 3


def test_what_differs_from_the_run_is_not_left_behind(
    run: Run, tmp_path: Path, dataset: PreparedDataset
) -> None:
    export(run, tmp_path / "out")
    before = Engine.load(tmp_path / "out").version
    other = start(tmp_path / "run", dataset, run.model, seed=2)
    for out in ("new", "out"):
        with pytest.raises(InputError, match="is not the run: scores differ by up to"):
            export(other, tmp_path / out, force=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "run"]
    assert Engine.load(tmp_path / "out").version == before


def test_items_out_of_place_are_noticed(tmp_path: Path, dataset: PreparedDataset) -> None:
    run = make_run(tmp_path / "run", dataset)
    engine, recommender = run_engine(run), Recommender.load(run, "cpu")
    given = [Query(np.array(one), 10, False) for one in ([1, 2, 3], [7])]
    assert compare(engine, recommender, given)["overlap@10"] == 1
    table = engine.table[::-1].copy()
    with pytest.raises(InputError, match="scores differ"):
        compare(replace(engine, table=table), recommender, given)
    states = dict(zip((3, 1), engine.states([one.history for one in given]), strict=True))

    def remembered(_: Any, lengths: Any) -> Any:
        return np.stack([states[int(n)] for n in lengths])

    with pytest.raises(InputError, match="other items are the best 10"):
        compare(replace(engine, table=table, encode=remembered), recommender, given)


@pytest.mark.parametrize("seed", [0, 4])
def test_large_weights_are_no_fault(seed: int, tmp_path: Path, dataset: PreparedDataset) -> None:
    """Sharp attention turns rounding into differences of more than 1e-5."""
    run = start(tmp_path / "run", dataset, "sasrec", seed=seed)
    weights, metadata = read_tensors(run.best_weights)
    sharp = {name: 30 if "query" in name or "key" in name else 1 for name in weights}
    weights = {name: weight * sharp[name] for name, weight in weights.items()}
    write_tensors(run.best_weights, weights, metadata)
    random = np.random.default_rng(0)
    sizes = (1 + n % MAX_LENGTH for n in range(256))
    given = [Query(random.integers(ITEMS, size=n), 10, False) for n in sizes]
    found = compare(run_engine(run), Recommender.load(run, "cpu"), given)
    assert 1e-5 <= found["allowed"] <= 1e-3


def test_what_is_allowed_follows_from_the_runs_own_rounding(
    tmp_path: Path, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", dataset)
    engine, recommender = run_engine(run), Recommender.load(run, "cpu")
    given = [Query(np.array(one), 10, False) for one in ([1, 2, 3], [7])]

    def off(part: float) -> Engine:
        return replace(engine, encode=lambda *given: engine.encode(*given) * np.float32(1 + part))

    exact = module._exact_states
    for rounding, allowed in ((0.0, 1e-5), (1e-4, 8e-4), (1e-2, 1e-3)):
        rounded = lambda *given, part=rounding: exact(*given) * (1 + part)  # noqa: E731
        monkeypatch.setattr(module, "_exact_states", rounded)
        found = compare(off(0.9 * allowed), recommender, given)
        assert found["allowed"] == pytest.approx(allowed, rel=0.1)
        with pytest.raises(InputError, match=r"differ by up to .*, 2\..e-0. of .* is allowed"):
            compare(off(2.5 * allowed), recommender, given)


def test_without_torch_an_export_recommends(exported: tuple[Run, Path]) -> None:
    run, path = exported
    code = f"""
import sys
sys.modules["torch"] = None
from sce.serving.engine import Engine, Request
engine = Engine.load({str(path)!r})
(found,) = engine.recommend([Request({NAMES[:4]!r}, k=5)])
print(*found.items, sep=",")
assert not [name for name in sys.modules if name.split(".")[0] in ("polars", "cyclopts")]
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (wanted,) = Recommender.load(run, "cpu").recommend([NAMES[:4]], 5)
    assert found.stdout.strip().split(",") == wanted.items


@ONE
def test_the_command_says_what_was_compared(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["export", str(run.path), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "on 30 histories (of its dataset): scores of up to" in said.out
    assert "100.00% of the ten best are the same" in said.out
    assert f"next: sce serve {out}" in said.out
    assert said.err == ""
    assert "exists; choose another directory" in complaint(command, capsys)
    assert main([*command, "--force"]) == 0
    capsys.readouterr()
    (out / "mine").touch()
    assert "export.json of sce export lists" in complaint([*command, "--force"], capsys)


@ONE
def test_an_index_is_measured_and_used_when_asked_for(
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run.path), "--out", str(out), "--index"]) == 0
    said = capsys.readouterr().out
    assert "the index finds 100.0% of the ten best (recall@10), looking at 100 items" in said
    written = json.loads((out / "export.json").read_text())
    assert written["index"] == {"effort": 100, "recall@10": 1}
    assert "items.voyager" in written["files"]
    exact, searching = Engine.load(out), Engine.load(out, index=True)
    assert exact.index is None  # there are so few items
    monkeypatch.setattr(engine_module, "FROM", ITEMS)
    assert Engine.load(out).index is not None
    assert Engine.load(out, index=False).index is None
    assert searching.index is not None
    assert searching.index.effort == 100
    asked = [Request(one) for one in histories(4, 20)]
    for mine, wanted in zip(searching.recommend(asked), exact.recommend(asked), strict=True):
        assert mine.items == wanted.items
    line = complaint(
        ["add-items", str(out), "items.jsonl", "--out", str(tmp_path / "more")], capsys
    )
    assert "has an index, which finds no others than its items; add new ones to the run" in line
    (out / "items.voyager").write_bytes(b"x" * written["files"]["items.voyager"]["bytes"])
    with pytest.raises(InputError, match=r"the content of items\.voyager was altered"):
        Engine.load(out)


@ONE
def test_an_index_that_nothing_would_use_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command: list[str | Path] = ["export", run.path, "--out", tmp_path / "out"]
    line = complaint([*command, "--index", "--format", "pt2"], capsys)
    assert "an index is used with the format onnx only; got pt2" in line


def test_an_index_that_finds_little_tries_harder(tmp_path: Path, dataset: PreparedDataset) -> None:
    engine = run_engine(make_run(tmp_path / "run", dataset))

    class Lazy(Index):
        def near(self, states: Any, depths: Any, hidden: Any) -> Any:
            skipped = 0 if self.effort == 400 else 2
            near = super().near(states, depths + skipped, hidden)
            return {row: items[skipped:] for row, items in near.items()}

    given = [Query(np.array(one), 10, False) for one in ([1, 2, 3], [7])]
    lazy = Lazy(Index.build(engine.table).graph)
    assert measure_index(engine, lazy, given) == {"effort": 400, "recall@10": 1}


@pytest.mark.parametrize("exported", [DEFAULT_BACKBONE, "hstu"], indirect=True)
def test_without_the_dataset_histories_are_random(run: Run, tmp_path: Path) -> None:
    moved = replace(run, dataset=replace(run.dataset, path=str(tmp_path / "gone")))
    found = export(moved, tmp_path / "out")
    assert (found["of"], found["histories"]) == ("random", module.HISTORIES)
    with pytest.raises(InputError, match="does not exist"):
        export(moved, tmp_path / "other", data=tmp_path / "gone")


def test_a_backbone_without_encode_is_refused(
    tmp_path: Path, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", dataset)
    monkeypatch.setattr(SASRec, "encode", Backbone.encode)
    with pytest.raises(InputError, match="SASRec has no method `encode`"):
        export(run, tmp_path / "out")
