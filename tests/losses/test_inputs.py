from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from sce.losses import CrossEntropy, Loss, SampledCrossEntropy
from tests.losses.test_every_loss import every_loss


class Scaled(nn.Linear):
    """A layer whose logits are not products with its weight."""

    def forward(self, states: Tensor) -> Tensor:
        return 2 * super().forward(states)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "integer states": ({"states": torch.ones(6, 4, dtype=torch.long)}, "states must be floating"),
    "integer catalogue": (
        {"catalogue": torch.ones(9, 4, dtype=torch.int)},
        r"catalogue must be floating point .*, got torch.int32",
    ),
    "float targets": (
        {"targets": torch.zeros(6)},
        r"targets must be item indices \(int64, int32\)",
    ),
    "another module": (
        {"catalogue": nn.Sequential(nn.Linear(4, 9))},
        r"a tensor, an nn.Embedding or an nn.Linear, got .*Sequential",
    ),
    "its own forward": ({"catalogue": Scaled(4, 9)}, "with a forward or hooks of its own"),
    "hooks": ({"catalogue": hooked(nn.Linear(4, 9))}, "with a forward or hooks of its own"),
    "padding row": ({"catalogue": nn.Embedding(9, 4, padding_idx=0)}, "padding is no item"),
    "renormalized rows": ({"catalogue": nn.Embedding(9, 4, max_norm=1.0)}, "with max_norm, which"),
    "a list": ({"targets": [0, 1, 2]}, "targets must be a tensor, got list"),
    "sparse": ({"catalogue": torch.eye(9, 4).to_sparse()}, "catalogue must be a dense tensor"),
    "nested": (
        {"states": torch.nested.nested_tensor([torch.zeros(6, 4)])},
        "states must be a dense tensor, got a nested one",
    ),
    "no numbers": (
        {
            "states": torch.zeros(6, 4, device="meta"),
            "catalogue": torch.zeros(9, 4, device="meta"),
            "targets": torch.zeros(6, dtype=torch.long, device="meta"),
        },
        "on the device meta have none",
    ),
    "an array": ({"states": np.zeros((6, 4))}, "states must be a tensor, got ndarray"),
    "eighth precision": (
        {"catalogue": torch.zeros(9, 4).to(torch.float8_e5m2)},
        r"catalogue must be floating point \(float64, .* float16\), got torch.float8",
    ),
    "scalar states": ({"states": torch.tensor(1.0)}, r"states \(\) and catalogue \(9, 4\) differ"),
    "flat catalogue": (
        {"catalogue": torch.zeros(4)},
        r"catalogue must be \[items, d\] and not empty, got shape \(4,\)",
    ),
    "rows of no numbers": (
        {"states": torch.zeros(6, 0), "catalogue": torch.zeros(9, 0)},
        r"catalogue must be .* not empty, got shape \(9, 0\)",
    ),
    "empty catalogue": ({"catalogue": torch.zeros(0, 4)}, r"not empty, got shape \(0, 4\)"),
    "other d": (
        {"catalogue": torch.zeros(9, 5)},
        r"states \(6, 4\) and catalogue \(9, 5\) differ in their last dimension",
    ),
    "other positions": (
        {"targets": torch.zeros(5, dtype=torch.long)},
        r"targets must be \(6,\), one for each state, got \(5,\)",
    ),
    "target too large": (
        {"targets": torch.tensor([0, 1, 9, -100, 0, 0])},
        r"targets must lie in \[0, 9\) or equal ignore_index \(-100\), got 9",
    ),
    "negative target": (
        {"targets": torch.tensor([0, 1, -1, -100, 0, 0])},
        r"targets must lie in \[0, 9\) or equal ignore_index \(-100\), got -1",
    ),
    "other device": (
        {"catalogue": torch.zeros(9, 4, device="meta")},
        "one device, got states on cpu, catalogue on meta, targets on cpu",
    ),
    "targets on another device": (
        {"targets": torch.zeros(6, dtype=torch.long, device="meta")},
        "one device, got states on cpu, catalogue on cpu, targets on meta",
    ),
}


@every_loss
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_what_was_given(loss: Loss, case: str) -> None:
    change, message = BAD[case]
    given = {
        "states": torch.zeros(6, 4),
        "catalogue": torch.zeros(9, 4),
        "targets": torch.zeros(6, dtype=torch.long),
    } | change
    with pytest.raises((ValueError, TypeError), match=message):
        loss(**given)


@pytest.mark.parametrize(
    "loss", [CrossEntropy(), CrossEntropy(chunk_size=3), SampledCrossEntropy(4)]
)
@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(4), r"bias must be one number per item, \(9,\), got \(4,\)"),
        (torch.zeros(9, 1), r"\(9,\), got \(9, 1\)"),
        (torch.zeros(9, dtype=torch.long), "bias must be floating point"),
        ([0.0] * 9, "bias must be a tensor, got list"),
        (torch.zeros(9, device="meta"), "bias on meta"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(loss: Loss, bias: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        loss(torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, dtype=torch.long), bias=bias)


def test_a_bias_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="bias is given twice"):
        CrossEntropy()(torch.zeros(1, 4), nn.Linear(4, 9), torch.tensor([0]), bias=torch.zeros(9))


@every_loss
def test_a_forward_put_on_a_layer_is_refused(loss: Loss) -> None:
    layer: Any = nn.Linear(4, 9, bias=False)
    layer.forward = lambda x: x @ layer.weight.T * 2
    with pytest.raises(TypeError, match="a forward or hooks of its own"):
        loss(torch.zeros(6, 4), layer, torch.zeros(6, dtype=torch.long))


@every_loss
def test_a_dtensor_is_refused_with_what_to_do(loss: Loss, tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        shards = distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)])
        with pytest.raises(TypeError, match=r"catalogue is a DTensor.* catalogue.full_tensor\(\)"):
            loss(torch.zeros(6, 4), shards, torch.zeros(6, dtype=torch.long))
    finally:
        distributed.destroy_process_group()


@every_loss
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ignore_index": x}, f"ignore_index must be an integer, got {x!r}")
        for x in (None, 0.5, True)
    ]
    + [({"reduction": "max"}, "reduction must be one of .*, got 'max'")],
)
def test_a_bad_setting_of_every_loss_is_refused(
    loss: Loss, setting: dict[str, Any], message: str
) -> None:
    required = {"n_negatives": 4} if hasattr(loss, "n_negatives") else {}
    make: Any = type(loss)
    with pytest.raises((TypeError, ValueError), match=message):
        make(**required, **setting)


@every_loss
def test_int32_targets_are_taken(loss: Loss) -> None:
    states, catalogue = torch.randn(6, 4), torch.randn(30, 4)
    targets = torch.tensor([0, 8, -100, 3, 3, 1])
    g = torch.Generator()
    wide = loss(states, catalogue, targets, generator=g.manual_seed(1))
    narrow = loss(states, catalogue, targets.int(), generator=g.manual_seed(1))
    assert torch.equal(wide, narrow)
