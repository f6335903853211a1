import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sce.serving.ranking import Codes, Floats, top_k


def expected(state: Floats, table: Floats, k: int, hidden: Codes) -> tuple[list[int], list[float]]:
    """Every item scored by itself, all of them sorted."""
    scores = [np.float32((row.astype(np.float64) * state).sum() + 0.0) for row in table]
    left = sorted({*range(len(table))} - {*hidden.tolist()}, key=lambda n: (-scores[n], n))[:k]
    return left, [float(scores[n]) for n in left]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_is_the_sorted_catalogue(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    items, rows, dim = (data.draw(st.integers(1, most)) for most in (300, 5, 9))
    states, table = (random.standard_normal((n, dim)).astype(np.float32) for n in (rows, items))
    if data.draw(st.booleans()):  # ties
        states, table = states.round(), table[random.integers(0, 1 + items // 4, items)].round()
    depths = random.integers(1, items + 1, rows)
    number = data.draw(st.integers(0, 2 * items))
    hidden = random.integers(0, items, number), random.integers(0, rows, number)
    norm = float(np.linalg.norm(table, axis=1).max())
    found = top_k(
        states, table, depths, hidden, norm, chunk_size=data.draw(st.sampled_from([32, 64, 4096]))
    )
    for row, (codes, scores) in enumerate(found):
        own = hidden[0][hidden[1] == row]
        assert (codes.tolist(), scores.tolist()) == expected(states[row], table, depths[row], own)


@pytest.mark.parametrize("chunk_size", [32, 4096])
def test_equal_items_without_end_are_ranked_by_index(chunk_size: int) -> None:
    table, states = np.ones((20_000, 4), np.float32), np.ones((2, 4), np.float32)
    hidden = np.array([1, 0]), np.array([0, 1])
    found = top_k(states, table, np.array([3, 2]), hidden, 2.0, chunk_size=chunk_size)
    assert [codes.tolist() for codes, _ in found] == [[0, 2, 3], [1, 2]]


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    random = np.random.default_rng(0)
    table = random.standard_normal((5000, 48)).astype(np.float32)
    states = random.standard_normal((7, 48)).astype(np.float32)
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    together = top_k(states, table, np.full(7, 9), none, 20.0)
    for row, (codes, scores) in enumerate(together):
        ((alone, same),) = top_k(states[row : row + 1], table, np.array([9]), none, 20.0)
        assert codes.tolist() == alone.tolist()
        assert scores.tobytes() == same.tobytes()


def test_scores_closer_than_the_error_of_a_product_are_told_apart() -> None:
    random = np.random.default_rng(0)
    states = random.standard_normal((16, 48)).astype(np.float32)
    table = (1 + 1e-6 * random.standard_normal((3000, 48))).astype(np.float32)
    none, norm = np.empty(0, np.int64), float(np.linalg.norm(table, axis=1).max())
    found = top_k(states, table, np.full(16, 9), (none, none), norm)
    for state, (codes, scores) in zip(states, found, strict=True):
        assert (codes.tolist(), scores.tolist()) == expected(state, table, 9, none)
