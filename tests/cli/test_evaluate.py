import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from sce.cli import main
from sce.cli.output import show_metrics
from sce.data.prepared import PreparedDataset, write_prepared
from sce.data.storage import read_json, write_json
from sce.evaluation.evaluate import evaluate
from sce.evaluation.ranking import Popularity, Ranker
from sce.training.run import Run, load_model, read_ranks
from sce.training.run_start import note_divergence, start_run
from tests.complaint import complaint
from tests.cycle_data import lay_out, make_cycle, train, walk
from tests.tiny_run import make_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    train(dataset, out=out, config={"loss": {"name": "ce"}})  # as `sce train` names it
    return out


def test_the_table_has_the_numbers_that_training_found(run: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    result = Run.open(run).result()
    assert result is not None
    for name, values in [("ce", result["test"]), ("popularity", result["popularity"]["test"])]:
        for metric in ("ndcg", "hr", "mrr", "cov"):
            cells = " +".join(f"{values[f'{metric}@{k}']:.4f}" for k in (1, 5, 10, 20, 50))
            assert re.search(rf"{name} +{cells}", captured.out)
    assert "24 users" in captured.out
    assert captured.err == ""
    told = [
        f"{part['ndcg@10']:.4f} of {part['users']} users with a {kind} target"
        for kind, part in result["by_popularity"]["test"].items()
    ]
    assert f"NDCG@10 {', '.join(told)}\n" in captured.out
    model, popular = result["test"]["ndcg@10"], result["popularity"]["test"]["ndcg@10"]
    assert captured.out.startswith(
        f"NDCG@10 {model:.4f} against {popular:.4f} of popularity: on 24 test users, too few"
    )


def test_the_ranks_of_users_are_kept_with_the_run(run: Path) -> None:
    result = Run.open(run).result()
    assert result is not None
    ranks = read_ranks(run, result["test_ranks"])
    assert ranks is not None
    assert ((ranks > 0) & (ranks <= 10)).mean() == pytest.approx(result["test"]["hr@10"])
    before = read_ranks(run, result["validation_ranks"], "validation")  # of the best epoch
    assert before is not None
    assert ((before > 0) & (before <= 10)).mean() == pytest.approx(result["validation"]["hr@10"])


@pytest.mark.parametrize(
    ("users", "value", "end"),
    [(200, 0.0499, ": 1.00 times as much, worse than popularity"),
     (199, 0.0499, ": on 199 test users, too few to tell"),
     (30, 0.1, ": on 30 test users, too few to tell"),
     (30, 0.5, ": 10.00 times as much")],
)  # fmt: skip
def test_worse_than_popularity_is_said(users: int, value: float, end: str, capsys: Capture) -> None:
    rows = {
        name: {f"{metric}@10": value for metric in ("ndcg", "hr", "mrr", "cov")}
        for name, value in [("ce", value), ("popularity", 0.05)]
    }
    show_metrics(rows, title="test", users=users, apart={})
    assert capsys.readouterr().out.splitlines()[0].endswith(f"of popularity{end}")


@pytest.mark.parametrize("verb", ["evaluate", "recommend", "report"])
def test_a_run_that_has_not_ended_is_used_and_said_to_be(
    verb: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    Run.open(out).result_file.unlink()
    more = ["--out", str(tmp_path / "found.csv")] if verb == "recommend" else []
    assert main([verb, str(out), "--device", "cpu", *more]) == 0
    said = f"sce: warning: the training of {out} has not ended: it is still going, or it was "
    assert capsys.readouterr().err.count(said) == 1


def test_a_diverged_run_says_so(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    shutil.copytree(run, out)
    opened = Run.open(out)
    opened.result_file.unlink()
    note_divergence(opened, epoch=3, step=7)
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("NDCG@10 ")
    assert captured.err == (
        f"sce: warning: the training of {out} diverged at step 7 of epoch 3: try a lower "
        "--learning-rate, with --resume to go on from the last good state\n"
    )


def test_a_run_that_diverged_at_once(
    dataset: PreparedDataset, tmp_path: Path, capsys: Capture
) -> None:
    run = make_run(tmp_path / "run", dataset, weights=False)
    note_divergence(run, epoch=1, step=2)
    line = complaint(["evaluate", run.path, "--device", "cpu"], capsys)
    assert "no weights yet: nothing was saved so far; the training of" in line
    assert "with --force to begin anew" in line
    assert "--resume" not in line


def test_a_model_of_ones_own_is_for_python(
    dataset: PreparedDataset, tmp_path: Path, capsys: Capture
) -> None:
    config: dict[str, dict[str, str]] = {"model": {}, "loss": {"name": "ce"}}
    start_run(tmp_path / "run", dataset, config=config, derived={}, model="mine.Model")
    line = complaint(["evaluate", tmp_path / "run", "--device", "cpu"], capsys)
    assert f"Recommender.load('{tmp_path / 'run'}', model=Model(...))" in line
    assert 'sce.evaluate(recommender.model, dataset, split="test")' in line


def test_the_comparison_is_at_10_or_the_deepest(run: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--device", "cpu", "--k", "3", "1"]) == 0
    assert capsys.readouterr().out.startswith("NDCG@3 ")


def test_json_on_request(run: Path, dataset: PreparedDataset, capsys: Capture) -> None:
    options = ["--split", "validation", "--keep-seen", "--k", "3", "1", "--json", "--device", "cpu"]
    assert main(["evaluate", str(run), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    model = load_model(Run.open(run))
    popular = Popularity(dataset.train, dataset.n_items)
    rankers: list[tuple[str, Ranker]] = [("model", model), ("popularity", popular)]
    for name, ranker in rankers:
        expected = evaluate(ranker, dataset, ks=(1, 3), keep_seen=True).values
        assert found[name] == expected
    parts = evaluate(model, dataset, ks=(1, 3), keep_seen=True).by_popularity
    assert found["by_popularity"] == parts
    assert next(iter(found["model"])) == "ndcg@1"
    assert found["split"] == "validation"
    assert found["users"] == 24


def test_targets_that_were_seen_are_said(tmp_path: Path, capsys: Capture) -> None:
    data = make_cycle(tmp_path / "data")
    # The first user's last event is one that came before.
    again = write_prepared(
        tmp_path / "again",
        train=data.train,
        test=lay_out([[*walk(0, 4), 0], [*walk(3, 4), 9]], [70, 71]),
        user_ids=data.user_ids,
        item_ids=data.item_ids,
        settings={},
        counts={},
    )
    out = tmp_path / "run"
    train(again, out=out, epochs=1)
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    assert "and so are targets among them: 1 misses" in capsys.readouterr().out
    assert main(["evaluate", str(out), "--device", "cpu", "--keep-seen"]) == 0
    assert "are ranked as well" in capsys.readouterr().out


def test_a_dataset_that_was_moved(run: Path, tmp_path: Path, capsys: Capture) -> None:
    data = make_cycle(tmp_path / "data")
    out = shutil.copytree(run, tmp_path / "run")
    manifest = read_json(out / "run.json")
    manifest["dataset"]["path"] = str(tmp_path / "gone")
    write_json(out / "run.json", manifest)
    line = complaint(["evaluate", out], capsys)
    assert f"{tmp_path / 'gone'}, which is not there" in line
    assert "--data DIR" in line
    assert main(["evaluate", str(out), "--data", str(data.path), "--device", "cpu"]) == 0


def test_another_dataset_is_refused_by_both_contents(
    run: Path, dataset: PreparedDataset, tmp_path: Path, capsys: Capture
) -> None:
    other = make_cycle(tmp_path / "other", train=9)
    line = complaint(["evaluate", run, "--data", other.path], capsys)
    assert dataset.content_hash[:12] in line
    assert other.content_hash[:12] in line


def test_runs_that_are_none(
    run: Path, dataset: PreparedDataset, tmp_path: Path, capsys: Capture
) -> None:
    assert "does not exist; make it with: sce train" in complaint(
        ["evaluate", tmp_path / "no"], capsys
    )
    assert "is not a run" in complaint(["evaluate", dataset.path], capsys)
    young = make_run(tmp_path / "young", dataset, weights=False)
    assert "has no weights yet" in complaint(["evaluate", young.path], capsys)
    broken = shutil.copytree(run, tmp_path / "broken")
    weights = broken / "best.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert "best.safetensors is half-written or altered" in complaint(["evaluate", broken], capsys)


@pytest.mark.parametrize(
    ("free", "doing"),
    [(1000, "loading .*best.safetensors"), (50_000, "ranking 12 items for 9,999 users at once")],
)
@pytest.mark.parametrize("verb", ["evaluate", "recommend"])
def test_too_little_memory_is_said_before_it_is_taken(
    verb: str, free: int, doing: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sce.memory.free_memory", lambda: free)
    line = complaint([verb, run, "--batch-size", "9999", "--device", "cpu"], capsys)
    assert re.search(rf"{doing} needs about .*iB of memory, and .*B is free; ", line)


def test_wrong_options(run: Path, capsys: Capture) -> None:
    assert "k must be at least 1; got 0" in complaint(["evaluate", run, "--k", "0"], capsys)
    assert "--k names no depth" in complaint(["evaluate", run, "--k"], capsys)
    assert "k is 13, but the catalogue has only 12 items; ask for fewer" in complaint(
        ["evaluate", run, "--k", "5", "13"], capsys
    )
    assert "--batch-size must be at least 1" in complaint(
        ["evaluate", run, "--batch-size", "0"], capsys
    )
    assert "train" in complaint(["evaluate", run, "--split", "train"], capsys)
    if not torch.cuda.is_available():
        assert "device cuda was asked for" in complaint(
            ["evaluate", run, "--device", "cuda"], capsys
        )
