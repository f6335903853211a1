from typing import Any

import pytest

from sce.errors import InputError
from sce.training.settings import TrainingSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "training.epochs must be at least 1; got 0"),
        ({"batch_size": -1}, "training.batch_size must be at least 1"),
        ({"patience": -1}, "training.patience must not be negative"),
        ({"learning_rate": 0.0}, "training.learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "training.learning_rate must be above 0"),
        ({"clip_norm": -1.0}, "training.clip_norm must be above 0"),
        ({"betas": (0.9, 1.0)}, "training.betas are two numbers"),
        ({"schedule": "step"}, "training.schedule is one of constant"),
        ({"precision": "fp8"}, "training.precision is one of float32"),
        ({"warmup_steps": 5}, "belongs to the schedule warmup-cosine"),
        ({"warmup_steps": -5, "schedule": "warmup-cosine"}, "must not be negative"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingSettings(**wrong)
