import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from sce.cli import main
from sce.data.prepared import PreparedDataset
from sce.models.sasrec import SASRecSettings
from sce.planning import PLANNED, Job, largest_batch, predict
from sce.units import parse_size
from tests.complaint import complaint
from tests.tiny_run import make_dataset

Capture = pytest.CaptureFixture[str]
ISSUE = shlex.split("plan --items 1_000_000 --batch 128 --length 200 --dim 64 --memory 16GB")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("plan") / "data").path


def shown(arguments: list[str], capsys: Capture) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def as_json(arguments: list[str], capsys: Capture) -> Any:
    return json.loads(shown([*arguments, "--json"], capsys))


def test_a_row_for_each_loss_plain_in_a_pipe(capsys: Capture) -> None:
    out = shown(ISSUE, capsys)
    assert "\x1b" not in out
    lines = out.splitlines()
    header = lines[0]
    rows = {
        loss: next(line for line in lines[2:] if line.startswith(f"{loss}  ")) for loss in PLANNED
    }
    at = header.index("fits")
    assert rows["ce"][at:].startswith("no")
    assert rows["sce"][at:].startswith("yes")
    assert "; 256 negatives; chunks of 1,024 items" in out
    assert "14.9 GiB, of which 14.4 GiB can be used" in out
    assert "--loss.bucket-size-y 2048 --loss.n-buckets 320" in out
    assert "just" not in out


@pytest.mark.parametrize(("given", "items"), [("1e6", 1_000_000), ("2_000", 2000), ("7", 7)])
def test_counts_as_people_write_them(capsys: Capture, given: str, items: int) -> None:
    assert as_json(["plan", "--items", given], capsys)["job"]["items"] == items
    assert as_json(["plan", "--items", "9", "--batch", given], capsys)["job"]["batch"] == items


def test_what_is_seen_adds_up(capsys: Capture) -> None:
    out = shown(ISSUE, capsys)
    header, row = out.splitlines()[0], next(r for r in out.splitlines() if r.startswith("bce "))
    assert re.split(r"\s{2,}", header)[1:5] == ["peak", "fits", "largest batch", "model"]
    sizes = [parse_size(f"{size}{unit}") for size, unit in re.findall(r"([\d.]+) (.iB)", row)]
    assert sizes[0] == pytest.approx(sum(sizes[1:5]), rel=0.01)


def test_a_batch_of_all_users(capsys: Capture, prepared: Path) -> None:
    users = len(PreparedDataset.load(prepared).train)
    out = shown(["plan", "--data", str(prepared), "--memory", "16GB"], capsys)
    assert f" {users} or more" not in out
    assert f" {users} (all)" in out


def test_json_has_the_same_numbers(capsys: Capture) -> None:
    found = as_json([*ISSUE, "--precision", "bf16", "--blocks", "3"], capsys)
    job = Job(1_000_000, backbone=SASRecSettings(blocks=3), precision="bf16")
    buckets = {row["loss"]: row["settings"].get("bucket_size_y") for row in found["losses"]}
    assert (buckets["sce"], buckets["sce row-wise"]) == (2048, 256)
    assert found["memory_bytes"] == 16 * 10**9
    assert [row["loss"] for row in found["losses"]] == list(PLANNED)
    for row in found["losses"]:
        expected = predict(job, row["loss"])
        assert row["peak_bytes"] == round(expected.total)
        assert sum(row["parts"].values()) == pytest.approx(expected.total, abs=4)
        assert row["largest_batch"] == largest_batch(job, row["loss"], 16 * 10**9)
        assert row["fits"] == (row["largest_batch"] >= 128)


def test_every_option_reaches_the_job(capsys: Capture) -> None:
    options = {
        "batch": 32,
        "length": 50,
        "mean-length": 20.5,
        "dim": 32,
        "blocks": 1,
        "heads": 2,
        "dtype": "tf32",
        "negatives": 99,
        "bucket-size-y": 77,
        "chunk-size": 55,
        "alpha": 4.0,
        "beta": 0.5,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    found = as_json(["plan", "--items", "5000", *flags], capsys)["job"]
    assert found["items"] == 5000
    names = {"dtype": "precision", "negatives": "n_negatives"}
    for name, value in options.items():
        assert found[names.get(name, name.replace("-", "_"))] == value


@pytest.mark.parametrize("there", [False, True])
def test_the_memory_of_the_gpu_that_is_there(
    there: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    arguments = ["plan", "--items", "1000"]
    found, out = as_json(arguments, capsys), shown(arguments, capsys)
    assert found["memory_bytes"] == (24 * 2**30 if there else None)
    assert ("there is no GPU here; give --memory to see what fits" in out) != there
    assert ("largest batch" in out) == there
    assert found["losses"][0]["fits"] is (True if there else None)


@pytest.mark.parametrize(
    ("memory", "takes", "fit"),
    [
        ("16GiB", "119 GiB", r"--training.row-wise with --dim 40 or less, or --dim 8 or less"),
        ("80GiB", "119 GiB", r"--training.row-wise, or --dim \d+ or less"),
        ("30GiB --batch 4096", "119 GiB", "--training.row-wise --batch-size BATCH, or --dim "),
        ("520MiB", "119 GiB", "nothing on this GPU"),
    ],
)
def test_what_would_fit_where_one_sequence_does_not(
    memory: str, takes: str, fit: str, capsys: Capture
) -> None:
    arguments = ["plan", "--items", "100_000_000", "--memory", *memory.split()]
    (line,) = [x for x in shown(arguments, capsys).splitlines() if x.startswith("too large")]
    (row,) = [r for r in as_json(arguments, capsys)["losses"] if r["loss"] == "sce row-wise"]
    assert f"one sequence takes {takes}" in line
    assert re.search("fit: " + fit.replace("BATCH", str(row["largest_batch"])), line)


def test_a_loss_that_holds_nothing_at_the_peak_is_explained(capsys: Capture) -> None:
    out = shown(ISSUE, capsys)
    assert " 0 B " in next(row for row in out.splitlines() if row.startswith("sce "))
    assert re.search(r"of the loss +what it holds at the peak; 0 B: ", out)


@pytest.mark.parametrize(
    ("arguments", "command", "why"),
    [
        ("--items 5e6 --memory 9GB", "DATA --training.row-wise", "1.43 GiB instead of 5.98 GiB"),
        (
            "--items 3e5 --dim 32 --length 50 --memory 9GB",
            "DATA --model.dim 32 --model.max-length 50",
            "as it",
        ),
        (
            "--items 3e5 --batch 9 --dtype bf16 --memory 9GB",
            "DATA --batch-size 9 --training.precision bf16",
            "",
        ),
        (
            "--items 2e4 --dtype bf16 --memory 9GB",
            "DATA --loss sce --training.precision bf16",
            "as it",
        ),
        (
            "--items 3e5 --model gru4rec --alpha 4 --memory 9GB",
            "DATA --model.name gru4rec --model.blocks 2 --loss.alpha 4.0",
            "",
        ),
        ("--items 1e4 --batch 1e5 --memory 2GB", "DATA --batch-size [0-9]+", "a batch that has"),
        ("--items 3e5 --memory 1GB", "DATA --training.row-wise", "440 MiB instead of 507 MiB"),
    ],
)
def test_the_training_to_try_is_a_command(
    arguments: str, command: str, why: str, capsys: Capture
) -> None:
    out = shown(["plan", *arguments.split()], capsys)
    assert re.search(rf"^next +sce train {command}\n +.*{why}.*no advice$", out, re.MULTILINE)
    taken = re.findall(r"^next +sce (.*)", out, re.MULTILINE)[0]
    assert "does not exist" in complaint([*taken.split(), "--out", "nowhere"], capsys)


def test_where_nothing_fits_or_is_known_nothing_is_advised(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for memory in ([], ["--memory", "520MiB"]):
        assert "\nnext" not in shown(["plan", "--items", "1e8", *memory], capsys)


def test_what_fits_just_and_what_is_too_wide_is_explained(capsys: Capture) -> None:
    out = shown(["plan", "--items", "3e5", "--memory", "1GB"], capsys)
    assert re.search(r"^just +fits by less than 15%", out, re.MULTILINE)
    assert "alone; buckets of 256 items" in out
    assert "\nkernels" not in out
    out = shown(["plan", "--items", "3e5", "--dim", "768"], capsys)
    assert "of sce take up to 512 dimensions: with 768 it runs in plain PyTorch" in out


def test_a_narrow_terminal_shows_what_matters(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(["plan", "--items", "1_000_000", "--memory", "16GB"], capsys)
    assert "…" not in out
    head = next(line for line in out.splitlines() if "loss" in line)
    assert "largest batch" in head
    assert "activations" not in head
    monkeypatch.setenv("COLUMNS", "120")
    out = shown(["plan", "--items", "1_000_000", "--memory", "16GB"], capsys)
    assert "…" not in out
    assert "activations" in next(line for line in out.splitlines() if "loss" in line)


def test_a_small_catalogue_fits_into_one_bucket(capsys: Capture) -> None:
    out = shown(["plan", "--items", "496", "--memory", "16GB"], capsys)
    assert "; bucket-size-y of any size fits" in out


def test_a_batch_that_does_not_fit_and_one_that_does(capsys: Capture) -> None:
    arguments = ["plan", "--items", "1000", "--batch", "100000", "--memory", "8GB"]
    (row,) = [r for r in as_json(arguments, capsys)["losses"] if r["loss"] == "sce"]
    assert f"fits with --batch-size {row['largest_batch']}\n" in shown(arguments, capsys)


def test_smaller_buckets_where_only_they_fit(capsys: Capture) -> None:
    arguments = ["plan", "--items", "100000", "--memory", "825MiB"]
    smaller = as_json(arguments, capsys)["largest_bucket_size_y"]
    assert 0 < smaller < 2048
    assert f", or with --bucket-size-y {smaller}\n" in shown(arguments, capsys)
    fitting = as_json([*arguments, "--bucket-size-y", str(smaller)], capsys)["losses"]
    assert next(row["fits"] for row in fitting if row["loss"] == "sce")


def test_items_and_lengths_of_a_prepared_dataset(capsys: Capture, prepared: Path) -> None:
    dataset = PreparedDataset.load(prepared)
    lengths = np.minimum(dataset.train.lengths - 1, 4)
    found = as_json(["plan", "--data", str(prepared), "--length", "4"], capsys)["job"]
    assert found["items"] == dataset.n_items
    assert found["length"] == 4
    assert found["mean_length"] == pytest.approx(lengths[lengths >= 1].mean())
    assert found["events"] == len(dataset.train.items)
    assert found["users"] == len(dataset.train)
    trained = lengths[lengths >= 1]
    assert found["longer"] == pytest.approx([np.mean(trained > width) for width in (2, 1)])
    # A batch is no wider than the longest history.
    longest = as_json(["plan", "--data", str(prepared)], capsys)["job"]["length"]
    assert longest == dataset.train.lengths.max() - 1
    given = as_json(["plan", "--data", str(prepared), "--mean-length", "1.5"], capsys)["job"]
    assert given["mean_length"] == 1.5
    assert given["longer"] is None  # those of the dataset are of another mean


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "how large is the catalogue? Give --items N, or --data PREPARED"),
        (["--items", "5", "--data", "x"], "--data says how many items there are"),
        (["--items", "5", "--memory", "lots"], "memory is an amount such as 16GB"),
        (["--items", "1.5"], '"1.5"'),
        (["--items", "1e-3"], '"1e-3"'),
        (["--items", "0"], "items must be at least 1; got 0"),
        (["--items", "5", "--dtype", "fp8"], "fp8"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in complaint(["plan", *arguments], capsys)
