from typing import Any

import pytest

import sce


@pytest.mark.parametrize("settings", [sce.TrainingSettings, sce.PrepareOptions, sce.SASRecSettings])
def test_help_shows_every_setting_and_its_meaning(settings: Any) -> None:
    text = settings.__doc__
    assert [name for name in settings.__annotations__ if f"\n    {name} (" not in text] == []


def test_a_setting_has_its_type_default_and_docstring() -> None:
    text = " ".join(str(sce.TrainingSettings.__doc__).split())
    assert "epochs (int = 100): Passes over the training sequences, at most." in text
    assert "clip_norm (float | None = None): Largest norm of the gradient. [default: any]" in text
