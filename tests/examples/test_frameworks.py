"""The examples for other libraries, where those are installed."""

from pathlib import Path

import pytest


def test_hugging_face(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import hugging_face

    options = {"max_steps": 20, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    out = str(tmp_path / "run")
    assert hugging_face.main([str(text)], out, 8, learning_rate=1e-2, **options) < 10  # of 41


def test_lightning(text: Path) -> None:
    pytest.importorskip("lightning")
    import lightning_module

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    assert lightning_module.main([str(text)], 7, max_steps=60, **quiet) < 10  # of 41
