import json
import math
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sce.data.manifest import describe_file, write_array
from sce.data.prepared import PreparedDataset
from sce.data.storage import LOCK, locked, write_json
from sce.errors import InputError
from sce.models.sasrec import SASRec
from sce.training.checkpoint import Checkpointer, Progress, Trained, read_tensors, write_tensors
from sce.training.run import Run, caveat, load_model
from sce.training.run_start import check_target, note_divergence, run_target, start_run
from tests.cycle_data import MODEL
from tests.tiny_run import write_result

CONFIG: dict[str, Any] = {
    "model": {"name": "sasrec", **vars(MODEL)},
    "loss": {"name": "ce"},
    "training": {"epochs": 3, "schedule": "constant"},
}


@pytest.fixture
def run(dataset: PreparedDataset, tmp_path: Path) -> Run:
    run = start_run(tmp_path / "run", dataset, config=CONFIG, derived={}, model="sasrec")
    write_tensors(
        run.best_weights, SASRec(dataset.n_items, MODEL, seed=9).state_dict(), {"run": run.identity}
    )
    return run


def test_what_was_written_is_opened(run: Run, dataset: PreparedDataset) -> None:
    opened = Run.open(run.path)
    assert opened.config == CONFIG
    assert (opened.model, opened.loss, opened.derived) == ("sasrec", "ce", {})
    assert opened.dataset.content_hash == dataset.content_hash
    assert opened.dataset.n_items == 12
    assert opened.item_ids == dataset.item_ids
    assert opened.metrics() == []
    assert opened.result() is None
    assert repr(opened) == f"Run('{run.path}': sasrec with ce on {dataset.path})"
    assert opened.load_dataset().content_hash == dataset.content_hash


def test_the_model_comes_back_with_its_weights(run: Run) -> None:
    model = load_model(run)
    assert not model.training
    expected = SASRec(12, MODEL, seed=9).eval()
    histories = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(histories), expected(histories))


def test_opening_a_run_executes_nothing(run: Run) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle was loaded",))

    run.best_weights.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InputError, match="half-written or altered"):
        load_model(Run.open(run.path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: shutil.rmtree(path), "does not exist; make it with: sce train"),
        (lambda path: path.rename(f"{path} before") and path.touch(), "is a file, not a run"),
        (lambda path: (path / "run.json").unlink(), "is not a run: it has no run.json"),
        (lambda path: (path / "run.json").write_text("{"), "run.json cannot be read"),
        (lambda path: (path / "run.json").write_text("{}"), "is of something else"),
        (lambda path: edit(path, '"version": 3', '"version": 2'), "has format version 2, and this"),
        (lambda path: edit(path, '"dim": 16', '"dim": 32'), "run.json was altered"),
        (lambda path: edit(path, '"checksum"', '"other"'), "run.json was altered"),
        (lambda path: (path / "items_values.npy").unlink(), "items_values.npy is missing"),
        (lambda path: flip(path / "items_values.npy"), "items_values.npy was altered"),
    ],
)
def test_damage_is_said(damage: Any, message: str, run: Run) -> None:
    damage(run.path)
    with pytest.raises(InputError, match=message):
        Run.open(run.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.update(item_ids="string"), "no vocabulary of kind 'string'"),
        (lambda run: run["files"].clear(), "no vocabulary of kind 'integer'"),
        (lambda run: run["dataset"].update(other=1), "unexpected keyword argument 'other'"),
        (lambda run: run["dataset"].update(n_items=2**62), f"{2**62} items, and ids of"),
    ],
)
def test_contents_that_do_not_fit_each_other_are_said(change: Any, message: str, run: Run) -> None:
    file = run.path / "run.json"
    content = json.loads(file.read_text())
    change(content)
    write_json(file, content)  # with a checksum that fits
    with pytest.raises(InputError, match=f"run is half-written or altered: .*{message}"):
        Run.open(run.path)


def test_a_popularity_of_other_items_is_refused(run: Run) -> None:
    write_array(run.path / "popularity.npy", np.zeros(3, np.int64))
    content = json.loads((run.path / "run.json").read_text())
    content["files"]["popularity.npy"] = describe_file(run.path / "popularity.npy")
    write_json(run.path / "run.json", content)
    with pytest.raises(InputError, match=r"altered: popularity.npy is not a count of \d+ items"):
        Run.open(run.path)


def edit(path: Path, old: str, new: str) -> None:
    text = (path / "run.json").read_text()
    assert old in text
    (path / "run.json").write_text(text.replace(old, new))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(file.read_bytes()[:-9]), lambda file: flip(file)]
)
def test_weights_that_are_cut_or_altered_are_refused(damage: Any, run: Run) -> None:
    damage(run.best_weights)
    with pytest.raises(InputError, match=r"best.safetensors is half-written or altered"):
        load_model(run)


def test_weights_of_another_shape_are_refused(run: Run) -> None:
    write_tensors(run.best_weights, SASRec(7, MODEL).state_dict(), {"run": run.identity})
    with pytest.raises(InputError, match="its weights are of another model"):
        load_model(run)


def test_weights_that_are_no_numbers_are_refused(run: Run) -> None:
    weights = load_model(run).state_dict()
    weights["catalogue"][1, 2] = math.inf
    write_tensors(run.best_weights, weights, {"run": run.identity})
    with pytest.raises(InputError, match="some of its weights are not finite numbers"):
        load_model(run)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_numbers_of_a_model_are_refused(dtype: torch.dtype, run: Run) -> None:
    weights, metadata = read_tensors(run.best_weights)
    write_tensors(run.best_weights, {n: t.to(dtype) for n, t in weights.items()}, metadata)
    with pytest.raises(InputError, match="its weights are of another model"):
        load_model(run)


def test_the_last_weights_of_a_run_that_ended_are_not_taken_for_the_best(
    run: Run, dataset: PreparedDataset
) -> None:
    weights, metadata = read_tensors(run.best_weights)
    latest = {f"model.{name}": weight for name, weight in weights.items()}
    write_tensors(run.resume_state, latest, metadata)
    run.best_weights.unlink()
    load_model(run)
    write_result(run)
    with pytest.raises(InputError, match=r"altered: best.safetensors is missing"):
        load_model(run)


def test_weights_of_another_run_are_refused(
    run: Run, dataset: PreparedDataset, tmp_path: Path
) -> None:
    training = CONFIG["training"] | {"seed": 1}
    config = CONFIG | {"training": training}
    other = start_run(tmp_path / "other", dataset, config=config, derived={}, model="sasrec")
    shutil.copy(run.best_weights, other.best_weights)
    with pytest.raises(InputError, match=r"altered: best.safetensors is of another run"):
        load_model(other)
    state = Checkpointer(Trained(load_model(run), None, torch.optim.SGD([torch.zeros(1)])))
    state.state_file, state.identity = other.resume_state, other.identity
    state.save(Progress())
    state.identity = run.identity
    with pytest.raises(InputError, match="is the checkpoint of another run"):
        state.resume()
    more = CONFIG | {"training": CONFIG["training"] | {"epochs": 99}}
    longer = start_run(tmp_path / "longer", dataset, config=more, derived={}, model="sasrec")
    assert longer.identity == run.identity  # a run may be given more epochs


def test_a_model_of_the_users_own_cannot_be_built(dataset: PreparedDataset, tmp_path: Path) -> None:
    run = start_run(tmp_path / "own", dataset, config=CONFIG, derived={}, model="my.Model")
    with pytest.raises(InputError, match=r"is my.Model, which sce cannot build"):
        load_model(run)


def test_a_run_is_no_dataset(run: Run) -> None:
    with pytest.raises(InputError, match=r"is not a prepared dataset: it has no dataset.json"):
        run.load_dataset(run.path)


def test_records_are_lines_at_once_and_a_torn_one_is_none(run: Run) -> None:
    run.write_metrics([{"epoch": 1}])
    run.add_metrics({"epoch": 2})
    assert run.metrics() == [{"epoch": 1}, {"epoch": 2}]
    with run.metrics_file.open("a") as file:
        file.write('{"epo')
    assert run.metrics() == [{"epoch": 1}, {"epoch": 2}]
    run.add_metrics({"epoch": 3})
    assert run.metrics()[2:] == [{"epoch": 3}]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "result.json"])
def test_no_byte_of_a_runs_own_files_can_change_unnoticed(name: str, run: Run) -> None:
    run.write_metrics([{"epoch": 1, "loss": 0.5}])
    write_json(run.result_file, {"test": {"ndcg@10": 0.25}})
    file = run.path / name
    whole = file.read_bytes()
    tried = 0

    def read() -> Any:
        opened = Run.open(run.path)
        return opened.config, opened.metrics(), opened.result()

    expected = read()
    for place in range(0, len(whole), 1 if len(whole) < 200 else 17):
        for bit in (1, 128):  # the latter is no UTF-8
            altered = bytearray(whole)
            altered[place] ^= bit
            file.write_bytes(altered)
            tried += 1
            with suppress(InputError):
                assert read() == expected  # white space, or the end of the last line
    print(f"{tried} bits of {name} flipped")


# --- where a run may be written


def test_targets(run: Run, tmp_path: Path) -> None:
    assert check_target(tmp_path / "new" / "deep") is False
    (tmp_path / "empty").mkdir()
    assert check_target(tmp_path / "empty") is False
    assert check_target(tmp_path / "empty", resume=True) is False
    with pytest.raises(InputError, match=r"nothing to resume at .*empty: leave out resume=True"):
        check_target(tmp_path / "empty", resume=True, needed=True)
    with pytest.raises(
        InputError, match="exists; go on with resume=True, replace it with force=True"
    ):
        check_target(run.path)
    assert check_target(run.path, resume=True) is True
    assert check_target(run.path, force=True) is True
    (run.path / ".resume.safetensors.partial").mkdir()  # a crash left it
    (run.path / "report.html").touch()
    assert check_target(run.path, force=True) is True
    (run.path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"also holds notes.txt, which force=True would delete"):
        check_target(run.path, force=True)
    assert check_target(run.path, resume=True) is True
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        check_target(tmp_path / "file", force=True)
    with pytest.raises(InputError, match="file is a file; choose another directory"):
        check_target(tmp_path / "file")
    with pytest.raises(InputError, match="holds other things than a run; choose another"):
        check_target(tmp_path)


def test_the_current_directory_is_not_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path)
    for path in (".", run.path):
        with pytest.raises(InputError, match="is the current directory; name one inside it"):
            check_target(path, force=True)
    assert check_target(".", resume=True) is True


def test_a_run_is_replaced(run: Run, dataset: PreparedDataset) -> None:
    options: dict[str, Any] = {"config": CONFIG, "model": "sasrec", "derived": {"n_buckets": 6}}
    new = start_run(run.path, dataset, **options, replace=True)
    assert new.derived == {"n_buckets": 6}
    assert not new.best_weights.exists()


@pytest.mark.parametrize("name", ["run", "new"])
def test_a_run_is_locked_from_its_first_moment(
    name: str, run: Run, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen, real = run.path.with_name(name), [], Run.open

    def first_moment(path: Path) -> Run:
        with pytest.raises(InputError, match=f"trained in by process {os.getpid()}"), locked(path):
            pass
        seen.append(path)
        return real(path)

    monkeypatch.setattr(Run, "open", first_moment)
    options: dict[str, Any] = {"config": CONFIG, "model": "sasrec", "force": True}
    with run_target(path, dataset, **options) as open_run:
        open_run({})
    assert seen == [path]
    assert not (path / LOCK).exists()
    with locked(path):
        pass


def test_what_is_wrong_is_told_until_the_run_has_ended(run: Run) -> None:
    assert "(no epoch complete), and goes on with resume=True" in str(caveat(run))
    note_divergence(run, epoch=2, step=7)
    said = caveat(run)
    assert said is not None
    assert "diverged at step 7 of epoch 2: try a lower learning_rate, with force=True" in said
    run.resume_state.touch()
    assert "with resume=True" in str(caveat(run))
    run.result_file.touch()
    assert caveat(run) is None
