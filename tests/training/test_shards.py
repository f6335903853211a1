"""A sharded catalogue in training, by one process; and who gets one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sce.cli.train import with_shards
from sce.config import Config
from sce.data.prepared import PreparedDataset
from sce.distributed import Ranks
from sce.errors import InputError
from sce.losses import CrossEntropy, ScalableCrossEntropy
from sce.models.sasrec import SASRec
from sce.training.settings import TrainingSettings
from sce.training.shards import settle
from tests.cycle_data import MODEL, make_cycle, train
from tests.training.launched import ITEMS, run

pytestmark = pytest.mark.filterwarnings("ignore::sce.errors.TrainingWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle", items=ITEMS).path


def test_it_is_the_row_wise_training_of_one_process(data: Path) -> None:
    sharded, whole = (run(None, data, name, accumulate=2) for name in ("sharded", "row-wise"))
    assert sharded["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert sharded["validation"] == pytest.approx(whole["validation"], abs=0.1)
    for name, values in whole["weights"].items():
        found = sharded["weights"][name]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(values), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("loss", "model", "says"),
    [
        (CrossEntropy(), None, "needs the loss sce, as a mean"),
        (ScalableCrossEntropy(reduction="sum"), None, "needs the loss sce, as a mean"),
        (ScalableCrossEntropy(), nn.Embedding(ITEMS, 8), "needs a sce.models.base.Backbone"),
        (ScalableCrossEntropy(), SASRec(ITEMS, MODEL).half(), "float32; this is in torch.float16"),
    ],
)
def test_other_losses_and_models_are_refused(loss: Any, model: Any, says: str, data: Path) -> None:
    if isinstance(model, nn.Embedding):
        model.catalogue = model.weight
    with pytest.raises(InputError) as refusal:
        train(PreparedDataset.load(data), loss, model=model, shard_catalogue=True)
    assert says in str(refusal.value)


def test_a_catalogue_that_is_frozen_stays_as_it_is(data: Path) -> None:
    model = SASRec(ITEMS, MODEL)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.catalogue.requires_grad_(False)
    train(PreparedDataset.load(data), ScalableCrossEntropy(), model=model, shard_catalogue=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) is (name == "catalogue")


@pytest.mark.parametrize("name", ["compile", "capture"])
def test_steps_of_a_fixed_shape_are_refused(name: str) -> None:
    given: Any = {name: True}
    with pytest.raises(InputError, match=f"^{name} does not go with shard_cat"):
        TrainingSettings(shard_catalogue=True, **given)


class Fake:
    """Two ranks with GPUs, as far as settling needs them."""

    size, device = 2, torch.device("cuda:0")

    def gather_counts(self, number: int) -> list[list[int]]:
        return [[number], [0]]


@pytest.mark.parametrize(
    ("gigabytes", "row_wise", "compiled", "needed"),
    [(80, False, False, True), (80, True, False, False), (20, True, False, True),
     (10, True, False, False), (80, False, True, False), (140, False, False, False)],
)  # fmt: skip
def test_gpus_that_are_too_small_get_shards(
    gigabytes: int,
    row_wise: bool,
    compiled: bool,
    needed: bool,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A hundred million items: with Adam 102 GB, row-wise 26 GB, in two shards 13 GB each."""
    gpu = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    dataset: Any = SimpleNamespace(train=PreparedDataset.load(data).train, n_items=10**8)
    settings = TrainingSettings(row_wise=row_wise, compile=compiled)
    ranks: Any = Fake()
    model, loss = SASRec(3), ScalableCrossEntropy()
    found, note = settle(settings, model, loss, dataset, ranks, {})
    assert (found.accumulate, found.shard_catalogue) == (2, True if needed else None)
    assert ("one GPU is too small" in note) == needed
    assert settle(settings, model, CrossEntropy(), dataset, ranks, {})[1] == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    chosen = Config.compose({"training": {"row_wise": row_wise, "compile": compiled}})
    chosen = with_shards(chosen, dataset, ranks.device, {}, first=True)
    assert bool(chosen.training.shard_catalogue) == needed
    assert ("one GPU is too small" in capsys.readouterr().err) == needed


def test_what_was_begun_with_shards_goes_on_with_them(data: Path) -> None:
    begun = {"accumulate": 2, "shard_catalogue": True}
    dataset, ranks = PreparedDataset.load(data), Ranks()
    found, _ = settle(TrainingSettings(), SASRec(3), ScalableCrossEntropy(), dataset, ranks, begun)
    assert (found.accumulate, found.shard_catalogue, found.row_wise) == (2, True, True)
    chosen = with_shards(Config.compose({}), dataset, ranks.device, begun, first=True)
    assert chosen.build(dataset)[0].catalogue.is_meta
