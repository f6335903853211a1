from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sce.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    GeneralizedBinaryCrossEntropy,
    SampledCrossEntropy,
    ScalableCrossEntropy,
)

LOSSES: list[nn.Module] = [
    ScalableCrossEntropy(),
    CrossEntropy(),
    CrossEntropy(chunk_size=3),
    SampledCrossEntropy(4),
    BinaryCrossEntropy(),
    BinaryCrossEntropy(4),
    GeneralizedBinaryCrossEntropy(4),
]
NAMES = ["sce", "ce", "ce in chunks", "ce-", "bce", "bce+", "gbce"]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "integer states": ({"states": torch.ones(6, 4, dtype=torch.long)}, "states must be floating"),
    "integer catalogue": (
        {"catalogue": torch.ones(9, 4, dtype=torch.int)},
        r"catalogue must be floating point .*, got torch.int32",
    ),
    "float targets": ({"targets": torch.zeros(6)}, "targets must be int64 or int32 item indices"),
    "a module": ({"catalogue": nn.Embedding(9, 4)}, "got Embedding; give its weight"),
    "a list": ({"targets": [0, 1, 2]}, "targets must be a tensor, got list"),
    "an array": ({"states": np.zeros((6, 4))}, "states must be a tensor, got ndarray"),
    "eighth precision": (
        {"catalogue": torch.zeros(9, 4).to(torch.float8_e5m2)},
        r"catalogue must be floating point \(float64, .* or float16\), got torch.float8",
    ),
    "scalar states": ({"states": torch.tensor(1.0)}, "states must have a last dimension"),
    "flat catalogue": (
        {"catalogue": torch.zeros(4)},
        r"catalogue must be \[items, d\], got shape \(4,\)",
    ),
    "rows of no numbers": (
        {"states": torch.zeros(6, 0), "catalogue": torch.zeros(9, 0)},
        r"rows of no numbers: states \(6, 0\), catalogue \(9, 0\)",
    ),
    "empty catalogue": ({"catalogue": torch.zeros(0, 4)}, "catalogue has no rows"),
    "other d": (
        {"catalogue": torch.zeros(9, 5)},
        r"differ in their last dimension: states \(6, 4\), catalogue \(9, 5\)",
    ),
    "other positions": (
        {"targets": torch.zeros(5, dtype=torch.long)},
        r"without the last dimension, \(6,\), got \(5,\)",
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
        "must be on one device, got cpu, meta and cpu",
    ),
    "targets on another device": (
        {"targets": torch.zeros(6, dtype=torch.long, device="meta")},
        "must be on one device, got cpu, cpu and meta",
    ),
}


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_what_was_given(loss: nn.Module, case: str) -> None:
    change, message = BAD[case]
    given = {
        "states": torch.zeros(6, 4),
        "catalogue": torch.zeros(9, 4),
        "targets": torch.zeros(6, dtype=torch.long),
    } | change
    with pytest.raises((ValueError, TypeError), match=message):
        loss(**given)


@pytest.mark.parametrize("value", [None, 0.5, "pad", True])
@pytest.mark.parametrize(
    "make",
    [
        CrossEntropy,
        partial(SampledCrossEntropy, 4),
        BinaryCrossEntropy,
        partial(GeneralizedBinaryCrossEntropy, 4),
    ],
)
def test_an_ignore_index_that_no_target_can_equal_is_refused(make: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=f"ignore_index must be an integer, got {value!r}"):
        make(ignore_index=value)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_int32_targets_are_taken(loss: nn.Module) -> None:
    states, catalogue = torch.randn(6, 4), torch.randn(9, 4)
    targets = torch.tensor([0, 8, -100, 3, 3, 1])
    g = torch.Generator()
    wide = loss(states, catalogue, targets, generator=g.manual_seed(1))
    narrow = loss(states, catalogue, targets.int(), generator=g.manual_seed(1))
    assert torch.equal(wide, narrow)
