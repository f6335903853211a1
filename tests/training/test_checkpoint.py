import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sce.data.storage import partial_directory, write_text
from sce.errors import InputError
from sce.training import checkpoint
from sce.training.checkpoint import (
    Checkpointer,
    EpochSoFar,
    Progress,
    Trained,
    read_tensors,
    write_tensors,
)
from sce.training.trainer import make_record


def make_trained(seed: int = 0, *, amsgrad: bool = False) -> Trained:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    loss = nn.Linear(4, 1)
    parameters = [*model.parameters(), *loss.parameters()]
    return Trained(model, loss, torch.optim.Adam(parameters, lr=0.1, amsgrad=amsgrad))


def move(trained: Trained, steps: int) -> None:
    assert trained.loss is not None
    for step in range(steps):
        torch.manual_seed(step)
        trained.optimizer.zero_grad()
        trained.loss(trained.model(torch.randn(5, 3))).square().mean().backward()
        trained.optimizer.step()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_training_goes_on_as_if_nothing_had_been(amsgrad: bool, tmp_path: Path) -> None:
    file = tmp_path / "state"
    one = make_trained(amsgrad=amsgrad)
    move(one, 3)
    Checkpointer(one, file).save(Progress())
    other = make_trained(seed=1, amsgrad=amsgrad)
    assert Checkpointer(other, file).resume() == Progress()
    move(one, 4)
    move(other, 4)
    mine, theirs = one.tensors()[0], other.tensors()[0]
    assert mine.keys() == theirs.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.loss.") for name in mine)
    assert "model.1.running_mean" in mine
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    write_tensors(file, one.model.state_dict(), {})  # what was read is no view of the file
    assert torch.equal(other.tensors()[0]["model.0.weight"], theirs["model.0.weight"])


def test_progress_and_best_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    trained = make_trained()
    progress = Progress(
        history=[make_record(1, EpochSoFar(step=1, loss_sum=0.1 + 0.2, targets=1))],
        current=EpochSoFar(
            step=3, loss_sum=1 / 3, targets=7, statistics={"placed": 0.1 + 0.2}, samples=1
        ),
        best_epoch=1,
        best_score=2 / 3,
        stale=4,
    )
    one = Checkpointer(trained, tmp_path / "state")
    one.keep_best()
    move(trained, 1)
    one.save(progress)
    other = Checkpointer(make_trained(seed=1), tmp_path / "state")
    assert other.resume() == progress
    assert other.best.keys() == one.best.keys()
    assert all(torch.equal(value, other.best[name]) for name, value in one.best.items())


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    Checkpointer(make_trained(), tmp_path / "state").save(Progress())
    other = nn.Linear(9, 9)
    trained = Trained(other, None, torch.optim.Adam(other.parameters()))
    with pytest.raises(InputError, match="checkpoint of another model"):
        Checkpointer(trained, tmp_path / "state").resume()
    tensors, metadata = read_tensors(tmp_path / "state")
    write_tensors(tmp_path / "state", tensors | {"model.0.bias": torch.ones(4).long()}, metadata)
    with pytest.raises(InputError, match="its weights are of another type"):
        Checkpointer(make_trained(), tmp_path / "state").resume()


def test_tied_weights_and_strides_are_no_obstacle(tmp_path: Path) -> None:
    table = torch.arange(6.0).view(2, 3)
    write_tensors(tmp_path / "file", {"a": table, "b": table, "c": table.T}, {"note": "tied"})
    tensors, metadata = read_tensors(tmp_path / "file")
    assert metadata == {"note": "tied"}
    assert all(torch.equal(tensors[name], table) for name in "ab")
    assert torch.equal(tensors["c"], table.T)


def test_files_can_be_read_by_whom_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / "file", {"a": torch.zeros(1)}, {})
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_cannot_be_written_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    write_tensors(file, {"a": torch.zeros(1)}, {})
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write .*no space left"):
        write_tensors(file, {"a": torch.ones(1)}, {})
    with pytest.raises(InputError, match=r"cannot write .*no space left"):
        write_text(file, "text")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_crash_left_is_cleared_by_the_next_write(tmp_path: Path) -> None:
    litter = partial_directory(tmp_path / "file")
    litter.mkdir()
    (litter / ".tmpXYZ").write_text("half")
    write_text(tmp_path / "file", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_may_not_be_read_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "safe_open", Mock(side_effect=FileNotFoundError))
    (tmp_path / "weights").touch()
    with pytest.raises(InputError, match="weights cannot be read: permission denied"):
        read_tensors(tmp_path / "weights")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is missing"):
        read_tensors(tmp_path / "none")
    (tmp_path / "text").write_text("not tensors at all")
    with pytest.raises(InputError, match="half-written or altered"):
        read_tensors(tmp_path / "text")
    write_tensors(tmp_path / "weights", {"a": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(InputError, match="no checkpoint that this sce can read"):
        Checkpointer(make_trained(), tmp_path / "weights").resume()


@pytest.mark.parametrize("metadata", ["[]", "null", "NaN", "[" * 100_000, '{"epoch": 1e999}'])
def test_metadata_that_are_none_of_ours(metadata: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "weights", {"sce": metadata})
    with pytest.raises(InputError, match="half-written or altered"):
        read_tensors(tmp_path / "weights")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("progress", None),
        ("progress.history", {}),
        ("progress.history", [{}]),
        ("progress.start", {"epoch": 0}),
        ("progress.current", {"step": 1}),
        ("progress.current.statistics", {"placed": "all"}),
        ("progress.best_epoch", "x"),
        ("optimizer_scalars", [1]),
        ("run", None),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    file, trained = tmp_path / "state", make_trained()
    Checkpointer(trained, file).save(Progress())
    tensors, metadata = read_tensors(file)
    *above, name = path.split(".")
    inner = metadata
    for key in above:
        inner = inner[key]
    inner[name] = value
    write_tensors(file, tensors, metadata)
    with pytest.raises(InputError, match=f"{path}.* is missing, or of another kind|another run"):
        Checkpointer(trained, file).resume()


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
def test_an_optimizer_state_that_fits_no_weights_is_refused(key: str, tmp_path: Path) -> None:
    trained = make_trained()
    move(trained, 1)
    Checkpointer(trained, tmp_path / "state").save(Progress())
    sound, metadata = read_tensors(tmp_path / "state")
    name = next(one for one in sound if one.startswith(f"optimizer.{key}."))
    for wrong in (torch.zeros(7), sound[name].long(), None):
        tensors = sound | {name: wrong}
        write_tensors(
            tmp_path / "state", {n: t for n, t in tensors.items() if t is not None}, metadata
        )
        with pytest.raises(InputError, match=f"the optimizer's {key} of .* is missing, or of"):
            Checkpointer(make_trained(), tmp_path / "state").resume()


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Write a file again as safetensors would, valid but for what was changed."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["sce"])
    change(tensors, metadata)
    save_file(tensors, path, {"sce": json.dumps(metadata)})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, _: tensors["a"].add_(1e-7),
        lambda tensors, _: tensors.update(b=tensors.pop("a")),
        lambda tensors, _: tensors.update(a=tensors["a"].view(3, 2)),
        lambda tensors, _: tensors.update(a=tensors["a"].view(torch.int32)),
        lambda tensors, _: tensors.update(more=torch.zeros(1)),
        lambda _, metadata: metadata.update(epoch=4),
        lambda _, metadata: metadata.clear(),
    ],
    ids=["value", "name", "shape", "type", "another", "metadata", "digest"],
)
def test_a_file_that_was_altered_is_refused(
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    write_tensors(file, {"a": torch.rand(2, 3)}, {"epoch": 3})
    assert read_tensors(file)[1] == {"epoch": 3}
    rewrite(file, change)
    with pytest.raises(InputError, match=r"file is half-written or altered: .*checksum"):
        read_tensors(file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_type_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    given = {"scalar": torch.ones((), dtype=dtype), "empty": torch.ones(0, 3, dtype=dtype)}
    write_tensors(tmp_path / "file", given, {})
    found, _ = read_tensors(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_comes_by_rows_is_read_as_any_other(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    table = torch.rand(7, 3).to(dtype)
    others = {"a": torch.rand(2, 3).T, "b": torch.tensor([True] * 3), "z": torch.tensor(5)}
    for name, parts in (("m", table.split(2)), ("A", iter([table]))):
        file, metadata = tmp_path / name, {"epoch": 3, "note": 'ü "'}
        write_tensors(file, others, metadata, (name, dtype, [7, 3], parts))
        found, about = read_tensors(file)
        assert about == metadata
        assert found.keys() == {name, *others}
        assert all(torch.equal(found[key], value) for key, value in others.items())
        assert torch.equal(found[name], table)
        assert found[name].dtype == dtype


def test_equal_content_gives_equal_files(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.int64), 'ä."': torch.ones(())}
    written = set()
    for number in range(8):
        file = tmp_path / f"{number}.safetensors"
        write_tensors(file, tensors, {"epoch": "1", "format": 'ü "\n', "version": "2"})
        read, metadata = read_tensors(file)
        assert {name: value.tolist() for name, value in read.items()} == {
            name: value.tolist() for name, value in tensors.items()
        }
        assert metadata == {"epoch": "1", "format": 'ü "\n', "version": "2"}
        written.add(file.read_bytes())
    assert len(written) == 1


def test_weights_are_looked_at_in_chunks(
    monkeypatch: pytest.MonkeyPatch, largest_tensor: Any
) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 1000)
    model = nn.Linear(100, 300)
    trained = Trained(model, None, torch.optim.SGD(model.parameters()))
    with largest_tensor() as largest:
        largest.known = model.weight.data_ptr()
        assert trained.finite()
    assert largest.numel <= 1000
    for row, wrong in ((0, math.nan), (299, math.inf)):
        with torch.no_grad():
            model.weight[row, 99] = wrong
        assert not trained.finite()
        torch.nn.init.zeros_(model.weight)
