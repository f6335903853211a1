"""The linear map from content vectors to rows."""

import numpy as np
import pytest

from sce.data.new_items import LEAST_VECTORS, fit_map, with_ones


def test_the_error_is_that_of_items_that_were_not_learned_from() -> None:
    random = np.random.default_rng(1)
    content, rows = random.normal(size=(2, 400, 30))
    assert fit_map(content, rows)[1] > 0.95  # there is nothing to learn
    noisy = content @ random.normal(size=(30, 30)) / np.sqrt(30) + rows
    assert 0.4 < fit_map(content, noisy)[1] < 0.75
    few, _ = fit_map(content[:LEAST_VECTORS], noisy[:LEAST_VECTORS])  # fewer than dimensions
    assert np.isfinite(few).all()
    assert fit_map(np.zeros((30, 4)), rows[:30])[1] == pytest.approx(1.0)


def test_ridge_is_that_of_the_textbook() -> None:
    random = np.random.default_rng(2)
    content, rows = random.normal(3.0, size=(60, 5)), random.normal(size=(60, 2))
    learned = with_ones(content) @ fit_map(content, rows)[0]
    centred = content - content.mean(0)
    candidates = []
    for exponent in range(-4, 4):
        ridge = 10.0**exponent * 60 * centred.var(0).mean() * np.eye(5)
        slope = np.linalg.solve(centred.T @ centred + ridge, centred.T @ (rows - rows.mean(0)))
        candidates.append(centred @ slope + rows.mean(0))
    assert any(np.allclose(learned, one) for one in candidates)
