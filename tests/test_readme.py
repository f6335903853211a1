"""README and the pages of the site: their code as it is printed there, their tables and links."""

import json
import re
import runpy
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

import plot_losses
from sce import __version__
from sce.cli import main
from tests.cycle_data import make_cycle

ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# Published figures, levels, limits and settings, and what another test asserts.
NOT_MEASURED = {
    "results": ["95 %", "29 %", "95 %", "95 %", "0.1516", "0.2821", "2.5 %", "6 %",
                "93.7 %"],
    "paper": ["0.0544", "0.0935", "18 %", "6 %", "5.5 %", "4.3 %", "17.4 %", "37.1 %", "93.7 %",
              "88 %", "100 times", "6.7 times"],
    "kernels": ["16 MiB", "1.0 ms"], "service": ["95 %", "40 %"],
    "serving": ["1 MiB", "95 %", "90 %", "99 %"], "beyond": ["2 %"],
}  # fmt: skip
RUN = [README, *(DOCS / f"{name}.md" for name in ("quickstart", "loss", "service"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_what_is_said_of_installing() -> None:
    """Versions and extras are those of constraints.txt and pyproject.toml."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    text += (DOCS / "quickstart.md").read_text(encoding="utf-8")
    pins = README.with_name("constraints.txt").read_text()
    (tested,) = re.findall(r"^torch==(.+)$", pins, re.MULTILINE)
    project = tomllib.loads(README.with_name("pyproject.toml").read_text())["project"]
    (least,) = (need[7:] for need in project["dependencies"] if need.startswith("torch>="))
    minor = tested.rpartition(".")[0]
    assert f"pip install uv && uv pip install torch=={tested} --torch-backend cpu" in text
    assert f"Any torch from {least} on should do: the tests run on {minor} and" in text
    assert f"with the oldest of all packages, on {least} (`make lowest`)" in text
    assert {tested} == {*re.findall(r"torch==([\d.]+)", text)}
    assert "`pip wheel . --no-deps` builds a wheel" in text
    assert f"Python ≥ {project['requires-python'].removeprefix('>=')}" in text
    named = re.findall(r"\.\[([\w,]+)\]'|the extra `(\w+)`|--extra (\w+)", text)
    extras = {extra for some in named for one in some for extra in one.split(",") if extra}
    assert {"prepare", "report", "serve", "index"} <= extras <= {*project["optional-dependencies"]}


def test_the_plan_that_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [b for b in blocks(DOCS / "service.md", "text") if b.startswith("$ sce plan")]
    command, _, shown = block.partition("\n")
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()[2:]) == 0
    out = " ".join(re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).split())
    for part in shown.split("..."):
        assert " ".join(part.split()) in out


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, on a small log, for one epoch; but for what needs other libraries."""
    monkeypatch.chdir(tmp_path)
    places = [(user, step) for user in range(60) for step in range(12)]  # one user after another
    steps = [
        (user, (7 * user + step) % 60, 10**9 + 900 * user + 60 * step) for user, step in places
    ]
    frame = pl.DataFrame(steps, schema=["user_id", "item_id", "timestamp"], orient="row")
    frame.write_csv("clicks.csv")
    names: dict[str, object] = {"frame": frame}
    for block in blocks(page, "python"):
        needs = re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)
        if all(find_spec(need) for need in needs):
            exec(re.sub(r"epochs=\d+", "epochs=1", block), names)
    if "states" in names:
        assert names["states"].grad.isfinite().all()  # type: ignore[attr-defined]
    if "recommended" in names:
        assert names["recommended"].to_frame().height  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def from_rows() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "from_rows.py"))


def test_tables_and_numbers_are_those_of_the_rows(from_rows: dict[str, Any]) -> None:
    """If this fails: python docs/from_rows.py."""
    rewritten = from_rows["rewritten"]
    with_tables = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        stale = re.sub(r"(?<=<!-- rows: )(\w+) -->\n\n", r"\g<0>9", text)
        with_tables += stale != text
        assert rewritten(page.name, stale) == text, page.name
    assert with_tables > 3


def test_a_changed_or_typed_number_row_or_sentence_is_noticed(
    from_rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_right, read = from_rows["put_right"], from_rows["read"]
    untraced = sys.modules["claims"].untraced
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    stale = text.replace("occur in 1.6 M events", "occur in\n2.6 M events")
    assert put_right("results.md", stale) == stale.replace("2.6 M", "1.6 M") != stale
    with pytest.raises(LookupError, match=r"results.md does not have: occur in 1.6 M events"):
        put_right("results.md", text.replace("occur in", "are in"))
    for page in PAGES:
        if page.name != "notebook.md":
            found = untraced(page.name, page.read_text(encoding="utf-8"))
            assert found == NOT_MEASURED.get(page.stem, []), page.name
    assert untraced("results.md", "It takes 1,234 MiB and 0.77 of it.") == ["1,234 MiB", "0.77"]
    monkeypatch.setitem(read("benchmarks/results/scale.jsonl")[0], "events", 7_700_000)
    assert "occur in 7.7 M events" in put_right("results.md", text)


def test_the_figure_is_that_of_the_rows() -> None:
    """If this fails: python benchmarks/plot_losses.py."""
    figure = (DOCS / "figures" / "losses.svg").read_text(encoding="utf-8")
    assert plot_losses.digest(plot_losses.rows_shown()) in figure


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_map_names_every_module() -> None:
    """A package, a module or both: what a newcomer looks for is on the map."""
    text = (DOCS / "house.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "sce"
    modules = [path for path in source.rglob("*.py") if not path.name.startswith("__")]
    outside = {"kernels", "cli"}  # named by what they do
    missing = [
        path.name
        for path in modules
        if not outside & {*path.relative_to(source).parts} and path.name not in text
    ]
    assert missing == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_notebook_runs_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    size, *code = ("".join(cell["source"]) for cell in cells)
    assert size.startswith("USERS, FILMS, EPOCHS = ")
    names: dict[str, Any] = {"USERS": 60, "FILMS": 100, "EPOCHS": 1}
    exec("\n".join(code), names)
    assert list(names["top"].columns)[-1] == "title"
    assert "part 2" in capsys.readouterr().out


def test_the_version_to_cite_is_this_one() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_a_sweep_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(DOCS / "service.md", "toml")
    (tmp_path / "two.toml").write_text(block)
    data = make_cycle(tmp_path / "data").path
    places = ["--data", str(data), "--out", str(tmp_path / "two"), "--dry-run"]
    assert main(["sweep", str(tmp_path / "two.toml"), *places]) == 0
    *runs, total = capsys.readouterr().out.splitlines()
    assert total == "6 runs"
    expected = {("data", loss, f"seed={seed}") for loss in ("sce", "ce") for seed in range(3)}
    assert {tuple(run.split()[1:]) for run in runs} == expected
