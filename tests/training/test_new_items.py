"""New items without training."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sce.cli import main
from sce.data.prepared import PreparedDataset, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate
from sce.recommend import Recommender
from sce.training.checkpoint import read_tensors
from sce.training.fit import fit
from sce.training.new_items import add_items
from sce.training.run import Run
from sce.training.start import unite_items
from tests.cycle_data import settings, small_model, train
from tests.tiny_run import lay_out, make_dataset, make_run

OLD, NEW = range(100, 112), (7, 105_000)


@pytest.fixture(scope="module")
def old(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("old") / "run"
    train(dataset, out=out)
    return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained run of 60 items with names."""
    home = tmp_path_factory.mktemp("wide")
    items = Vocabulary.from_strings(f"item {n:02}" for n in range(60))
    dataset = make_dataset(home / "data", items, Vocabulary.from_integers(range(30)))
    return make_run(home / "run", dataset, ended=True).path


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def grown(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("grown")
    similar = [[100, 101, 105], [111]]
    records = [{"item_id": i, "similar_to": s} for i, s in zip(NEW, similar, strict=True)]
    found = add_items(old, write(home / "items.jsonl", records), home / "run")
    assert (found["similar"], found["content"], found["error"]) == (2, 0, None)
    return home / "run"


def test_a_new_item_is_the_mean_of_similar_ones(old: Path, grown: Path) -> None:
    before, after = (Recommender.load(path, "cpu") for path in (old, grown))
    assert after.item_ids.decode(range(14)) == [7, *OLD, 105_000]
    rows = before.model.catalogue.detach()
    expected = rows[[0, 1, 5]].double().mean(0).float()
    assert torch.equal(after.model.catalogue[0], expected)
    assert torch.equal(after.model.catalogue[13], rows[11])
    assert torch.equal(after.model.catalogue[1:13], rows)


def test_scores_of_other_items_stay(old: Path, grown: Path, dataset: PreparedDataset) -> None:
    before, after = (Recommender.load(path, "cpu") for path in (old, grown))
    histories = [[100, 101, 102], [111], [105, 109, 103]]
    for was, now in zip(
        before.recommend(histories, k=12, keep_seen=True),
        after.recommend(histories, k=14, keep_seen=True),
        strict=True,
    ):
        scores = dict(zip(now.items, now.scores.tolist(), strict=True))
        assert scores.keys() == {*OLD, *NEW}
        assert [scores[item] for item in was.items] == was.scores.tolist()
    # The dataset has other codes than the run, whether the run opened it or not.
    users = ["user000", "user050", "user060"]
    known = dict(before.stream_users(dataset, users, k=12))
    for given in (dataset, Run.open(grown).load_dataset()):
        for user, found in after.stream_users(given, users, k=14):
            kept = [item for item in found.items if item not in NEW]
            assert kept == known[user].items
            assert {*found.items} >= {*NEW}


def test_it_is_a_run_as_any_other(
    old: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(grown), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    model: Any = Recommender.load(grown, "cpu").model
    run = Run.open(grown)
    assert found == evaluate(model, run.load_dataset(), split="test").values
    assert main(["report", str(grown), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["recommend", str(grown), "--users", "user001"]) == 0
    result = run.result()
    assert result is not None
    assert "test" not in result  # which was of fewer items
    assert run.config["added"]["run"] == str(old.resolve())


def test_training_goes_on_from_it_but_not_in_it(
    old: Path, grown: Path, dataset: PreparedDataset, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="made by sce add-items: go on from it"):
        train(dataset, out=grown, resume=True)
    united = unite_items(dataset, grown)
    found = fit(
        small_model(united), torch_loss, united, settings=settings(epochs=1),
        out=tmp_path / "new", start_from=grown, progress=False,
    )  # fmt: skip
    assert found.start is not None
    assert (found.start["carried"], found.start["new"], found.start["unseen"]) == (14, 0, 2)
    model: Any = Recommender.load(grown, "cpu").model
    begun = evaluate(model, Run.open(grown).load_dataset(), split="validation").values
    assert found.history[0]["validation"] == begun
    assert found.start["optimizer"] == "carried over"
    before, _ = read_tensors(old / "resume.safetensors")
    after, _ = read_tensors(grown / "resume.safetensors")
    name = "optimizer.exp_avg.model.catalogue"
    assert torch.equal(after[name][1:13], before[name])
    assert not after[name][[0, 13]].any()


def torch_loss(states: Any, catalogue: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(
        (states @ catalogue.T).flatten(0, -2), targets.flatten().long()
    )


def test_training_goes_on_with_the_rows_that_new_items_were_given(
    grown: Path, tmp_path: Path
) -> None:
    walks = [[7, *OLD, 105_000]] * 3
    ids = Vocabulary.from_integers({*walks[0]})
    dataset = write_prepared(
        tmp_path / "data",
        train=lay_out([ids.lookup(walk).tolist() for walk in walks], range(3)),
        test=lay_out([range(9)], [3]),
        user_ids=Vocabulary.from_integers(range(4)),
        item_ids=ids,
        settings={},
        counts={},
    )
    model = small_model(dataset)
    found = fit(
        model, torch_loss, dataset, settings=settings(epochs=1, learning_rate=1e-30),
        start_from=grown, progress=False,
    )  # fmt: skip
    assert found.start is not None
    assert (found.start["carried"], found.start["new"]) == (14, 0)
    rows = read_tensors(grown / "best.safetensors")[0]["catalogue"]
    assert torch.equal(model.catalogue.detach(), rows)


def test_titles_of_new_items_are_shown(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[str, Any]] = [{"item_id": 1, "similar_to": [100], "title": "A novelty"}]
    file, run = write(tmp_path / "items.jsonl", records), str(tmp_path / "run")
    assert main(["add-items", str(old), str(file), "--out", run]) == 0
    capsys.readouterr()
    assert main(["similar", run, "100", "-k", "1"]) == 0
    assert "A novelty" in capsys.readouterr().out
    only, page = tmp_path / "only.txt", tmp_path / "page.html"
    only.write_text("1\n")
    assert main(["recommend", run, "--users", "user001", "--allow", str(only)]) == 0
    assert "A novelty" in capsys.readouterr().out
    assert main(["report", run, "--out", str(page)]) == 0
    told = page.read_text()
    assert f"items added to {old.resolve()} without training: 1 by similar items" in told
    assert "A novelty" in told


def test_content_vectors_are_mapped(wide: Path, tmp_path: Path) -> None:
    rows = read_tensors(wide / "best.safetensors")[0]["catalogue"].double().numpy()
    random = np.random.default_rng(0)
    mixing = random.normal(size=(8, 8))
    content = (rows[:50] - 0.25) @ np.linalg.inv(mixing)
    new = random.normal(size=(3, 8))
    ids = ["item 055x", "zebra", "a"]
    records = [{"item_id": f"item {n:02}", "vector": content[n].tolist()} for n in range(50)]
    records += [{"item_id": i, "vector": v.tolist()} for i, v in zip(ids, new, strict=True)]
    found = add_items(wide, write(tmp_path / "items.jsonl", records), tmp_path / "run")
    assert (found["content"], found["vectors"]) == (3, 50)
    assert found["error"] < 1e-4
    grown = Recommender.load(tmp_path / "run", "cpu")
    names = [*(f"item {n:02}" for n in range(60)), *ids]
    assert grown.item_ids.decode(range(63)) == sorted(names)
    codes = torch.from_numpy(grown.item_ids.lookup(ids))
    made = grown.model.catalogue.detach()[codes].double().numpy()
    np.testing.assert_allclose(made, new @ mixing + 0.25, atol=0.05)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"item_id": 101, "similar_to": [100]}', "item 101 is in the catalogue already"),
        ('{"item_id": 1, "similar_to": [100, 5, 6]}', "names what is not in the catalogue: 5, 6"),
        ('{"item_id": 1, "similar_to": []}', "similar_to is a list of ids"),
        ('{"item_id": [1], "similar_to": [100]}', r"ids are integers or strings, got \[1\]"),
        ('{"item_id": 1, "similar_to": [true]}', "ids are integers or strings, got True"),
        ('{"item_id": "x", "similar_to": [100]}', "ids of the catalogue are integers"),
        ('{"item_id": 3, "vector": [1, 2, 3]}', "a vector of 3 numbers, and others have 2"),
        ('{"item_id": 3, "vector": [1, NaN]}', "not finite"),
        ('{"item_id": 3, "vector": [1, -2e9]}', r"not finite, or beyond 1e\+09"),
        ('{"item_id": 3, "vector": [1, "2"]}', "a list of numbers"),
        ('{"item_id": 2, "vector": [1, 2]}', "item 2 is there twice"),
        ('{"item_id": 3, "vector": [1, 2], "title": 5}', "a title is a text, got 5"),
        ('{"item_id": 3}', "expected .*similar_to"),
        ('{"item_id": 3, "vector": [1, 2], "similar_to": [100]}', "expected .*similar_to"),
        ("[3]", "expected .*similar_to"),
        ('{"item_id": 3, "vector": [1, 2], "titel": "x"}', "the key 'titel' is none of item_id"),
        ('{"item_id": 3, "item_id": 4, "vector": [1, 2]}', "the key 'item_id' occurs twice"),
        ("{", "not JSON"),
    ],
)
def test_mistakes_are_named_with_their_line(
    line: str, message: str, old: Path, tmp_path: Path
) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"item_id": 2, "vector": [0.5, 1]}\n\n' + line + "\n")
    with pytest.raises(InputError, match=f"line 3: .*{message}"):
        add_items(old, file, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_device_is_no_file_of_lines(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.data.lines._LONGEST_LINE", 100)
    (tmp_path / "zeros").write_bytes(b"\0" * 1000)
    with pytest.raises(InputError, match="line 1: longer than 100 bytes"):
        add_items(old, tmp_path / "zeros", tmp_path / "run")


def test_mistakes_of_the_whole(old: Path, tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", [{"item_id": n, "vector": [n]} for n in range(95, 112)])
    with pytest.raises(InputError, match="vectors of 12 items of the catalogue, and at least 20"):
        add_items(old, few, tmp_path / "run")
    with pytest.raises(InputError, match="has no new item"):
        add_items(old, write(tmp_path / "none.jsonl", []), tmp_path / "run")
    with pytest.raises(InputError, match="cannot read"):
        add_items(old, tmp_path / "missing.jsonl", tmp_path / "run")
    one = write(tmp_path / "one.jsonl", [{"item_id": 1, "similar_to": [100]}])
    with pytest.raises(InputError, match="exists; choose another"):
        add_items(old, one, old)


def test_the_command_tells(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, Any]] = [
        {"item_id": f"item {n:02}", "vector": [n, n % 7]} for n in range(70)
    ]
    file = write(tmp_path / "items.jsonl", [*records, {"item_id": "x", "similar_to": ["item 01"]}])
    assert main(["add-items", str(wide), str(file), "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "11 items: 1 by similar items, 10 by content vectors" in told
    assert "learned from 60 content vectors; held-out error" in told
    assert main(["add-items", str(wide), str(file), "--out", str(tmp_path / "run")]) == 2


def test_titles_histories_and_popularity_stay_with_their_items(tmp_path: Path) -> None:
    dataset = write_prepared(
        tmp_path / "data",
        train=lay_out([[0, 1, 1], [2, 1]], [0, 1]),
        test=lay_out([[0, 2, 1]], [2]),
        user_ids=Vocabulary.from_integers(range(3)),
        item_ids=Vocabulary.from_strings(["b", "d", "f"]),
        everyone=Vocabulary.from_integers(range(4)),
        whole=lay_out([[2, 0, 2]], [3]),
        titles=Vocabulary.from_sorted_text("BéF!".encode(), np.array([1, 0, 4])),
        settings={},
        counts={},
    )
    run = make_run(tmp_path / "old", dataset, ended=True)
    titles: list[dict[str, Any]] = [{"title": "  Ä new one "}, {"title": None}, {}]
    records = [
        {"item_id": item, "similar_to": ["d"], **title}
        for item, title in zip(["a", "e", "g"], titles, strict=True)
    ]
    add_items(run.path, write(tmp_path / "items.jsonl", records), tmp_path / "new")
    grown = Run.open(tmp_path / "new")
    assert grown.item_ids.decode(range(6)) == ["a", "b", "d", "e", "f", "g"]
    assert grown.titles is not None
    assert grown.titles.decode(range(6)) == ["Ä new one", "B", "", "", "éF!", ""]
    assert grown.popularity is not None
    assert grown.popularity.tolist() == [0, 1, 3, 0, 1, 0]
    found = grown.load_dataset()
    assert found.titles is grown.titles
    assert [history.tolist() for history in found.histories(np.array([1, 2, 3]))] == [
        [4, 2],
        [1, 4, 2],
        [4, 1, 4],
    ]
    with pytest.raises(InputError, match="has items that are not in the catalogue"):
        dataset.with_items(Vocabulary.from_strings(["b", "c", "d", "e"]))
