"""Predictions against the bytes of the tensors that a training step makes, counted on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plan_cells import job_of
from plan_grid import main, measure_cell
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning import PLANNED, predict


@pytest.mark.filterwarnings("ignore")
def test_every_loss_is_predicted_as_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sce.planning._WORKSPACE", 0)  # not counted
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--cells", "1", "1", "--at-most", "150MB", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["plan_grid.py", *options])
    main()
    assert "| held out | all | 11 |" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["loss"] for row in rows} == set(PLANNED)
    for row in rows:
        predicted = predict(job_of(row), row["loss"]).total / 2**20
        assert predicted == pytest.approx(row["peak MiB"], rel=0.2), row


def test_exact_cross_entropy_on_kernels_is_predicted_as_it_is_counted() -> None:
    for share in (1.0, 0.1):
        cell = {"loss": "ce chunked", "precision": "bf16", "items": 20_000, "batch": 32}
        cell |= {"length": 40, "dim": 32, "blocks": 1, "mean_share": share}
        cell |= {"n_negatives": 1, "bucket_size_y": 64, "chunk_size": 1024}
        moments = measure_cell(cell, torch.device("cpu"))["moments"]
        shape = job_of(cell).shape
        memory: Any = job_of(cell).build_loss("ce chunked").memory(shape)
        found = [moments[name] - moments["activations"] for name in ("forward", "loss backward")]
        found[1] -= shape.catalogue_bytes
        assert memory[:2] == pytest.approx(found, rel=0.15)
        # Chunks would take a thousand numbers for each target, and their states.
        assert memory.forward < 4 * 1024 * shape.max_targets / 2


# What cuDNN takes for GRU4Rec is known from a GPU alone.
@pytest.mark.parametrize("backbone", sorted(set(BACKBONES) - {DEFAULT_BACKBONE, "gru4rec"}))
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_backbone_is_predicted_as_it_is_counted(
    backbone: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sce.planning._WORKSPACE", 0)  # not counted
    cell = {"loss": "bce", "backbone": backbone, "precision": precision, "items": 500}
    cell |= {"batch": 32, "length": 40, "dim": 32, "blocks": 2, "mean_share": 0.5}
    cell |= {"n_negatives": 1, "bucket_size_y": 64, "chunk_size": 64}
    found = measure_cell(cell, torch.device("cpu"))
    assert found["predicted MiB"] == pytest.approx(found["peak MiB"], rel=0.15)
