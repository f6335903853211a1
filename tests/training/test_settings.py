import re
from typing import Any

import pytest

from sce.errors import InputError, settings_as_flags
from sce.training.settings import TrainingSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, r"^epochs must be from 1 to 2\*\*31 - 1; got 0"),
        ({"max_steps": 0}, "^max_steps must be from 1 to"),
        ({"batch_size": 10**10}, "^batch_size must be from 1 to"),
        ({"patience": -1}, "^patience must not be negative"),
        ({"seed": -1}, "^seed lies between 0 and"),
        ({"learning_rate": 0.0}, "^learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "^learning_rate must be above 0"),
        ({"clip_norm": -1.0}, "^clip_norm must be above 0"),
        ({"betas": (0.9, 1.0)}, "^betas are two numbers"),
        ({"schedule": "step"}, "schedule must be one of constant, warmup-cosine; got 'step'"),
        ({"precision": "fp8"}, "precision must be one of float32"),
        ({"warmup_steps": 5}, "warmup_steps does not go with schedule='constant'"),
        ({"warmup_steps": -5, "schedule": "warmup-cosine"}, "must not be negative"),
        ({"catalogue_learning_rate": 0.1}, "does not go with row_wise off"),
        ({"row_wise": True, "catalogue_learning_rate": 0.0}, "must be above 0"),
        ({"row_wise": True, "clip_norm": 1.0}, "clip_norm does not go with row_wise"),
        ({"row_wise": True, "weight_decay": 0.1}, "weight_decay does not go with"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingSettings(**wrong)
    with settings_as_flags(), pytest.raises(InputError) as caught:
        TrainingSettings(**wrong)
    flags = "|".join(f"--(training\\.)?{name.replace('_', '-')} " for name in wrong)
    assert re.match(flags, str(caught.value))


def test_the_catalogue_has_a_rate_of_its_own_when_it_is_updated_by_rows() -> None:
    assert TrainingSettings().catalogue_learning_rate is None
    assert TrainingSettings(row_wise=True).catalogue_learning_rate == 0.03
    given = TrainingSettings(row_wise=True, catalogue_learning_rate=0.3)
    assert given.catalogue_learning_rate == 0.3
