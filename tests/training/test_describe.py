"""A loss is known by its type and settings: in another process the same, and another is another."""

import importlib.util
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sce.data.prepared import PreparedDataset
from sce.errors import InputError, TrainingWarning
from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    PopularityNegatives,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)
from sce.losses.negatives import Draw
from sce.models.sasrec import SASRec
from sce.training.describe import describe_loss, describe_model
from sce.training.run import MANIFEST, Run
from tests.cycle_data import make_cycle, train


class LastItems:
    """A sampler of one's own."""

    correct = False

    def __init__(self, first: int = 0) -> None:
        self.first, self._cache = first, object()

    def __call__(self, rows: int, k: int, n_items: int, targets: Tensor, **_: object) -> Draw:
        return Draw(torch.arange(n_items - k, n_items).expand(rows, k), None)


class Colour(Enum):
    RED, BLUE = 1, 2


class Own(nn.Module):
    def __init__(self, power: float, inner: nn.Module) -> None:
        super().__init__()
        self.power, self.inner, self.weight = power, inner, nn.Parameter(torch.rand(3))

    def forward(self, *given: Any) -> Tensor:
        found: Tensor = self.inner(*given)
        return found


class Private(nn.Module):
    def __init__(self, k: float = 1.0, inner: nn.Module | None = None, w: float = 0.0) -> None:
        super().__init__()
        self._k, self._inner, self._cache = k, inner, torch.rand(2)
        self.register_buffer("_w", torch.tensor(w))


def plain(states: Tensor, catalogue: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = CrossEntropy()(states, catalogue, targets)
    return found


def closure(scale: float) -> Callable[..., Tensor]:
    def loss(*given: Any) -> Tensor:
        return scale * plain(*given)

    return loss


def by_popularity(*counts: float, power: float = 1.0) -> SampledCrossEntropy:
    return SampledCrossEntropy(4, negatives=PopularityNegatives(torch.tensor(counts), power=power))


# Each differs from its neighbour in one setting, or in kind.
DIFFERENT: list[Any] = [
    CrossEntropy(),
    CrossEntropy(chunk_size=8),
    ScalableCrossEntropy(),
    ScalableCrossEntropy(alpha=3.0),
    SampledCrossEntropy(4, negatives=LastItems()),
    SampledCrossEntropy(4, negatives=LastItems(3)),
    by_popularity(1, 2, 3),
    by_popularity(1, 2, 4),
    by_popularity(1, 2, 4, power=0.5),
    BinaryCrossEntropy(2),
    Own(1.0, CrossEntropy()),
    Own(2.0, CrossEntropy()),
    Own(2.0, CrossEntropy(chunk_size=8)),
    Own(math.inf, CrossEntropy()),
    Own(np.float32(3), CrossEntropy()),  # type: ignore[arg-type]
    Own(torch.ones(3, dtype=torch.bfloat16), CrossEntropy()),  # type: ignore[arg-type]
    Own(np.ones(3), CrossEntropy()),  # type: ignore[arg-type]
    Own(Colour.RED, CrossEntropy()),  # type: ignore[arg-type]
    Own(Colour.BLUE, CrossEntropy()),  # type: ignore[arg-type]
    Private(),
    Private(2.0),
    Private(inner=CrossEntropy()),
    Private(inner=ScalableCrossEntropy()),
    Private(w=1.0),
    plain,
    LastItems(1),
]


def test_every_loss_is_told_from_every_other() -> None:
    found = [json.loads(json.dumps(describe_loss(one), allow_nan=False)) for one in DIFFERENT]
    assert len({str(one) for one in found}) == len(found)
    assert [one["name"] for one in found[:5]] == ["ce", "ce", "sce", "sce", "ce-"]
    assert found[4]["negatives"] == {"name": f"{__name__}.LastItems", "first": 0}
    assert found[-2]["name"] == f"{__name__}.plain"


def test_no_address_no_weight_and_no_switch_of_training_is_in_it() -> None:
    one, other = (SampledCrossEntropy(4, negatives=LastItems()) for _ in range(2))
    assert describe_loss(one) == describe_loss(other.eval())
    assert "0x" not in str(describe_loss(one))
    assert describe_loss(Own(1.0, one)) == describe_loss(Own(1.0, other))
    assert describe_loss(Private()) == describe_loss(Private())


def test_models_of_ones_own_are_told_apart_by_their_parts() -> None:
    def model(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout)).train(dropout > 0.5)

    assert describe_model(model(0.1)) == describe_model(model(0.1).train())
    assert describe_model(model(0.1)) != describe_model(model(0.9))


@pytest.mark.parametrize(
    "loss",
    [
        lambda *given: plain(*given),
        partial(plain),
        closure(2.0),
        CrossEntropy().forward,
        Own(partial(plain), CrossEntropy()),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_told_from_another_wants_a_name(loss: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be told from another .*loss_name="):
        describe_loss(loss)
    assert describe_loss(loss, "mine") == {"name": "mine"}


def test_a_run_goes_on_with_the_loss_of_that_name_alone(tmp_path: Path) -> None:
    dataset = make_cycle(tmp_path / "data")
    out = tmp_path / "run"
    with pytest.raises(InputError, match="loss_name"):
        train(dataset, partial(plain), out=out)
    assert not out.exists()
    train(dataset, partial(plain), out=out, loss_name="twice", epochs=1)
    assert Run.open(out).loss == "twice"
    with pytest.raises(InputError, match="was 'twice' and is now 'thrice'"):
        train(dataset, partial(plain), out=out, loss_name="thrice", resume=True)
    with pytest.raises(InputError, match="was 'twice' and is now 'ce'"):
        train(dataset, out=out, resume=True)
    assert train(dataset, partial(plain), out=out, loss_name="twice", resume=True).epochs == 2
    assert train(dataset, partial(plain)).epochs == 2  # without a run there is nothing to name


def test_a_sampler_of_ones_own_resumes_in_another_process(tmp_path: Path) -> None:
    dataset, out = make_cycle(tmp_path / "data"), tmp_path / "run"
    go_on(dataset.path, out, 1)
    script = (
        "import sys; from pathlib import Path; from tests.training.test_describe import go_on;"
        "go_on(Path(sys.argv[1]), Path(sys.argv[2]), 2)"
    )
    subprocess.run([sys.executable, "-c", script, dataset.path, out], check=True, timeout=120)
    assert len(Run.open(out).metrics()) == 2


def go_on(data: Path, out: Path, epochs: int) -> None:
    loss = SampledCrossEntropy(4, negatives=LastItems())
    train(PreparedDataset.load(data), loss, out=out, resume=True, epochs=epochs)


def test_a_model_is_named_with_its_settings() -> None:
    assert describe_model(SASRec(3, dim=8))["dim"] == 8
    assert describe_model(SASRec(3))["name"] == "sasrec"
    found = describe_model(nn.Linear(2, 3))
    assert (found["name"], found["parameters"]) == ("torch.nn.modules.linear.Linear", 9)


TEXT = """
from torch import nn
from sce.losses import CrossEntropy
def loss(states, catalogue, targets):
    return {} * CrossEntropy()(states, catalogue, targets)
class Model(nn.Module):
    scale = {}
"""


def test_a_run_warns_when_its_loss_was_edited(tmp_path: Path) -> None:
    dataset, out, file = make_cycle(tmp_path / "data"), tmp_path / "run", tmp_path / "own.py"

    def written(factor: int) -> dict[str, Any]:
        file.write_text(TEXT.format(factor, factor))
        spec = importlib.util.spec_from_file_location("own", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["own"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return vars(module)

    try:
        one = written(2)
        known = describe_model(one["Model"]())
        train(dataset, one["loss"], out=out, epochs=1)
        assert describe_model(written(2)["Model"]()) == known
        with warnings.catch_warnings():
            warnings.simplefilter("error", TrainingWarning)
            train(dataset, written(2)["loss"], out=out, resume=True)
        other = written(33)
        assert describe_model(other["Model"]()) != known
        with pytest.warns(TrainingWarning, match=r"begun with other code of the loss own.loss"):
            train(dataset, other["loss"], out=out, resume=True, epochs=3)
    finally:
        sys.modules.pop("own", None)


def test_what_is_of_sce_has_no_code_and_that_of_an_older_run_does_not_count(tmp_path: Path) -> None:
    assert not any("code" in name for name in describe_loss(CrossEntropy()))
    dataset, out = make_cycle(tmp_path / "data"), tmp_path / "run"
    train(dataset, plain, out=out, epochs=1)
    manifest = MANIFEST.read(out)
    manifest["config"]["loss"]["code in Python 3.11"] = "0123456789abcdef"
    MANIFEST.write(out, manifest)
    train(dataset, plain, out=out, resume=True)
