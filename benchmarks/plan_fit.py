"""Fit the coefficients of `sce plan` to measured moments, and say how far off its peaks are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from cells import Row
from plan_cells import job_of
from rows import show
from sce.planning import LOSSES, coefficients, formula, predict
from sce.planning.coefficients import H200, Calibration

MIB = 2**20


class Equation(NamedTuple):
    """So many bytes should come of these features; an error counts in proportion to the peak."""

    features: Mapping[str, float]
    size: float
    peak: float


def fit(rows: Sequence[Row]) -> Calibration:
    """Fit bytes per feature to the moments of the "fit" rows; judge them by the other rows."""
    equations: dict[str, list[Equation]] = {}
    lower: dict[str, list[Equation]] = {}
    used = [row for row in rows if row["part"] == "fit"]
    for row in used:
        # Logits have copies in both passes of a loss. Where it is these that make the backward pass
        # high, the forward pass is as high, and what else there is backward is not seen.
        hidden = row["moments"]["loss backward"] <= row["moments"]["forward"]
        for part, equation in _equations(row):
            is_loss = part == formula.part_of(row["loss"], "backward")
            kept = lower if hidden and is_loss else equations
            kept.setdefault(part, []).append(equation)
    equations = lower | equations  # if there is nothing better
    numbers = {
        part: _least_squares(found, formula.TERMS[part])
        for part, found in sorted(equations.items())
    }
    first = rows[0]
    source = f"fitted to {len(used)} sizes on {first['machine']} (torch {first['torch']})"
    fitted = Calibration(numbers, _workspace(used), source)
    errors = [abs(_error(row, fitted)) for row in rows if row["part"] == "held out"]
    if not errors:
        return fitted
    return replace(
        fitted,
        largest_error=round(max(errors), 4),
        mean_error=round(mean(errors), 4),
        cells=len(errors),
    )


def _error(row: Row, fitted: Calibration) -> float:
    """By how much the peak of a row is predicted too high, relatively."""
    measured: float = row["peak MiB"] * MIB
    return predict(job_of(row), row["loss"], fitted).total / measured - 1


def _equations(row: Row) -> Iterator[tuple[str, Equation]]:
    """Yield what a row says about each part of a step."""
    job, found = job_of(row), row["moments"]
    features = formula.features(job, row["loss"])
    half = "half" if job.half else "single"
    catalogue = 4 * job.items * job.dim
    others = 4 * job.parameters - catalogue  # gradients that are known exactly
    kept, peak = found["activations"], row["peak MiB"] * MIB
    loss = row["loss"]
    sizes = {
        f"activations, {half}": kept - formula.padded_states(features),
        formula.part_of(loss, "forward"): found["forward"] - kept,
        formula.part_of(loss, "backward"): found["loss backward"] - kept,
    }
    if loss == formula.ROW_WISE:
        sizes |= {
            f"{loss} model backward": found["model backward"] - kept - others,
            f"{loss} embedding": found["embedding"] - others,
            f"{loss} update": found["update"] - others,
        }
    else:
        sizes |= {
            f"model backward, {half}": found["model backward"] - kept - others - catalogue,
            f"embedding, {half}": found["embedding"] - others - 2 * catalogue,
        }
    for part, size in sizes.items():
        yield part, Equation(features, size, peak)


def _least_squares(equations: Sequence[Equation], terms: Sequence[str]) -> dict[str, float]:
    """Minimise the squared errors with no coefficient below zero, by trying which are zero."""
    matrix = np.array([[e.features[term] / e.peak for term in terms] for e in equations])
    wanted = np.array([e.size / e.peak for e in equations])
    best, least = np.zeros(len(terms)), float(wanted @ wanted)
    subsets = chain.from_iterable(combinations(range(len(terms)), n + 1) for n in range(len(terms)))
    for subset in map(list, subsets):
        scale = np.abs(matrix[:, subset]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, subset] / scale, wanted, rcond=None)[0] / scale
        error = float(((matrix[:, subset] @ found - wanted) ** 2).sum())
        # A coefficient more must be worth it.
        if (found >= 0).all() and error < least * 0.98 - 1e-9:
            best, least = np.zeros(len(terms)), error
            best[subset] = found
    return {term: float(f"{value:.4g}") for term, value in zip(terms, best, strict=True) if value}


def _workspace(rows: Sequence[Row]) -> float:
    """What libraries keep: what the measured moments and the known bytes leave of the peaks."""
    left = []
    for row in rows:
        moments = max(size for name, size in row["moments"].items() if name != "between")
        known = formula.fixed_bytes(job_of(row), row["loss"]) + moments
        left.append(row["peak MiB"] * MIB - known)
    return max(0.0, float(median(left)))


def show_calibration(fitted: Calibration) -> str:
    """Write it as `src/sce/planning/coefficients.py` holds it."""
    lines = ["H200 = Calibration(", "    coefficients={"]
    for part, numbers in fitted.coefficients.items():
        inside = ", ".join(f'"{name}": {value:.10g}' for name, value in numbers.items())
        lines.append(f'        "{part}": {{{inside}}},')
    lines += ["    },", f"    workspace={fitted.workspace / MIB:.1f} * _MIB,"]
    lines += [f'    source="{fitted.source}",']
    for name in ("largest_error", "mean_error", "cells"):
        lines.append(f"    {name}={getattr(fitted, name)!r},")
    return "\n".join([*lines, ")\n"])


def write_calibration(fitted: Calibration) -> Path:
    """Replace the numbers in `coefficients.py`."""
    path = Path(coefficients.__file__)
    before, _, _ = path.read_text().partition("\nH200 = Calibration(")
    path.write_text(f"{before}\n{show_calibration(fitted)}")
    return path


def error_table(rows: Sequence[Row], fitted: Calibration = H200) -> str:
    """Compare predicted and measured peaks, by part of the grid and loss."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for loss in (row["loss"], "all"):
            errors.setdefault((row["part"], loss), []).append(_error(row, fitted))
    table = [
        {
            "part": part,
            "loss": loss,
            "cells": len(found),
            "mean error %": 100 * mean(map(abs, found)),
            "lowest %": 100 * min(found),
            "highest %": 100 * max(found),
        }
        for part in ("fit", "held out")
        for loss in (*LOSSES, "all")
        if (found := errors.get((part, loss)))
    ]
    return show(table, list(table[0]) if table else [])
