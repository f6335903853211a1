"""Measured rows: kept as JSON lines with machine, versions and commit, and printed as a table."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser_of(about: str | None, name: str | None = None, **usual: Any) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help; with a name, also for where its rows go.

    Options that need no word more are named with what they usually are: a list takes several.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=style)
    if name is not None:
        parser.add_argument("--out", type=Path, help=f"default: results/{name}.jsonl")
    for option, default in usual.items():
        nargs, one = ("+", default[0]) if isinstance(default, list) else (None, default)
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(flag, type=type(one), nargs=nargs, default=default)
    return parser


def provenance(*packages: str) -> dict[str, Any]:
    """Say where a row was measured: processor or GPU, versions, and the commit of the code."""
    found: dict[str, Any] = {"machine": _processor(), "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["commit"] = commit()
    return found


def _processor() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()}, {os.cpu_count()} cores"


def commit() -> str | None:
    """Return the commit, with a plus sign when the working tree differs in more than results.

    Where the code was copied without its history, or with another, the variable COMMIT says it.
    """
    if said := os.environ.get("COMMIT"):
        return said
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def keep(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    to: Path | None = None,
    beside: Sequence[str] | None = None,
) -> Path:
    """Replace the rows of `results/NAME.jsonl` by these.

    With `beside`, only those that agree with a new one in these fields: the others stay.
    """
    path = to or RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if beside is not None:
        new = {tuple(row.get(field) for field in beside) for row in rows}
        old = kept(name, to=to)
        stay = [row for row in old if tuple(row.get(field) for field in beside) not in new]
        rows = [*stay, *rows]
    new_path = path.with_name(f"{path.name}.new")
    new_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new_path.replace(path)
    return path


def kept(name: str, *, to: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of `results/NAME.jsonl`; none when there is no such file yet."""
    path = to or RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Lay rows out as a Markdown table."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    lines = (columns, ["---"] * len(columns), *cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
