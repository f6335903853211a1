"""The README's code, as it is printed there."""

import re
import tomllib
from pathlib import Path

import pytest

from sce.cli import main
from tests.cycle_data import make_cycle

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_what_is_said_of_installing() -> None:
    """Versions and extras are those of constraints.txt and pyproject.toml."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    pins = README.with_name("constraints.txt").read_text()
    (tested,) = re.findall(r"^torch==(.+)$", pins, re.MULTILINE)
    project = tomllib.loads(README.with_name("pyproject.toml").read_text())["project"]
    (least,) = (need[7:] for need in project["dependencies"] if need.startswith("torch>="))
    minor = tested.rpartition(".")[0]
    assert f"`uv pip install torch=={tested} --torch-backend cpu`" in text
    assert f"Any torch from {least} on should do: the tests run on {minor}," in text
    assert {tested} == {*re.findall(r"torch==([\d.]+)", text)}
    assert "`pip wheel . --no-deps` builds a wheel" in text
    assert f"Python ≥ {project['requires-python'].removeprefix('>=')}" in text
    named = re.findall(r"\.\[([\w,]+)\]'|the extra `(\w+)`", text)
    extras = {extra for some in named for one in some for extra in one.split(",") if extra}
    assert {"prepare", "report", "serve", "index"} <= extras <= {*project["optional-dependencies"]}


def test_the_loss_alone() -> None:
    (block,) = [block for block in blocks("python") if "torch.randn" in block]
    names: dict[str, object] = {}
    exec(block, names)
    assert names["states"].grad.isfinite().all()  # type: ignore[attr-defined]
    assert names["catalogue"].grad.abs().sum() > 0  # type: ignore[attr-defined]


def test_a_sweep_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("toml")
    (tmp_path / "two.toml").write_text(block)
    data = make_cycle(tmp_path / "data").path
    places = ["--data", str(data), "--out", str(tmp_path / "two"), "--dry-run"]
    assert main(["sweep", str(tmp_path / "two.toml"), *places]) == 0
    *runs, total = capsys.readouterr().out.splitlines()
    assert total == "6 runs"
    expected = {("data", loss, f"seed={seed}") for loss in ("sce", "ce") for seed in range(3)}
    assert {tuple(run.split()[1:]) for run in runs} == expected
