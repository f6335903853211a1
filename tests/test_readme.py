"""The README's code, as it is printed there."""

import re
from pathlib import Path

import pytest

from sce.cli import main
from tests.cycle_data import make_cycle

README = Path(__file__).parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


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
