import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sce.report.frame import SeedGroup, group_seeds
from sce.report.pairs import RESAMPLES, Pair, chosen, make_pairs, relative_interval
from sce.training.run import write_ranks
from tests.experiments.made_rows import make_row, metrics


def ranks(users: int, share: float, seed: int) -> NDArray[np.int32]:
    random = np.random.default_rng(seed)
    found = random.integers(1, 51, users)
    return np.where(random.random(users) < share, found, 0).astype(np.int32)


def test_it_is_that_of_users_drawn_one_by_one() -> None:
    ours, theirs = [ranks(300, 0.9, s) for s in (1, 2)], [ranks(300, 0.6, s) for s in (3, 4)]
    table = np.zeros(51)
    table[1:11] = 1 / np.log2(np.arange(2, 12))
    gains = [np.mean([table[one] for one in side], axis=0) for side in (ours, theirs)]
    random = np.random.default_rng(0)
    draws = random.integers(0, 300, (20 * RESAMPLES, 300))
    changes = gains[0][draws].mean(1) / gains[1][draws].mean(1) - 1
    expected = np.percentile(changes, [2.5, 97.5])
    found = relative_interval(ours, theirs)
    assert isinstance(found, tuple)
    assert np.allclose(found, expected, atol=0.1 * (expected[1] - expected[0]))
    assert relative_interval(ours, theirs) == found


def test_pairs_of_the_same_users_are_sharper_than_two_samples() -> None:
    ours = ranks(4000, 0.5, 1)
    theirs = np.where(ours == 1, 2, ours).astype(np.int32)
    found = relative_interval([ours], [theirs])
    assert isinstance(found, tuple)
    assert 0 < found[0] < found[1] < 0.15


def test_nothing_to_compare_with() -> None:
    none = np.zeros(900, np.int32)
    assert relative_interval([ranks(900, 1.0, 0)], [none]) == (
        "0 of them have a hit with the other, too few"
    )


def test_an_interval_rests_on_twenty_users_that_differ() -> None:
    theirs = np.full(900, 2, np.int32)
    for count, known in ((19, False), (20, True)):
        ours = np.where(np.arange(900) < count, 1, theirs).astype(np.int32)
        found = relative_interval([ours], [theirs])
        assert (found == f"NDCG@10 differs for {count} of them, fewer than 20") is not known
        assert isinstance(found, tuple) is known


def test_a_million_users() -> None:
    found = relative_interval([ranks(10**6, 0.5, 1)], [ranks(10**6, 0.4, 2)])
    assert isinstance(found, tuple)
    assert 0.2 < found[0] < found[1] < 0.3


def row(model: str, loss: str, test: float, seed: int = 0, **changes: Any) -> dict[str, Any]:
    settings = {"model.name": model, "loss.name": loss, **changes.pop("settings", {})}
    return make_row(f"{model} {loss} {seed}", settings, test=test, seed=seed, **changes)


def test_only_seeds_that_both_have_are_compared() -> None:
    ours = SeedGroup((row("sasrec", "sce", 0.3, 0), row("sasrec", "sce", 0.1, 2)))
    theirs = SeedGroup(tuple(row("sasrec", "ce", 0.2, seed) for seed in (2, 1, 0)))
    pair = Pair.of(ours, theirs)
    assert pair is not None
    assert [one["seed"] for one in pair.theirs.rows] == [0, 2]
    assert pair.ratio("test.ndcg@10") == pytest.approx(1.0)
    assert pair.changes() == pytest.approx([math.log(1.5), math.log(0.5)])
    assert pair.ratio("by_popularity.test.rare.ndcg@10") is None
    assert pair.changes("by_popularity.test.rare.ndcg@10") == []
    assert Pair.of(ours, SeedGroup((row("sasrec", "ce", 0.2, 7),))) is None


def test_a_sampler_of_ones_own_is_a_setting() -> None:
    own = {"loss.negatives": {"name": "mine.Near", "k": 3}}
    groups = group_seeds([row("sasrec", "ce-", 0.2, settings=own), row("sasrec", "ce", 0.1)])
    (found,) = make_pairs(groups)
    assert found["setting"]["loss.negatives"] == 'mine.Near {"k": 3}'
    assert found["test"] == pytest.approx(2)


def test_validation_chooses_what_a_setting_leaves_open() -> None:
    rows = [
        row("sasrec", "sce", test, validation=validation, settings={"loss.alpha": validation})
        for test, validation in [(0.9, 0.1), (0.3, 0.2)]
    ]
    ((_, one),) = chosen(group_seeds(rows))["ml1m"].items()
    assert one.mean("test.ndcg@10") == pytest.approx(0.3)


def test_each_setting_stands_against_exact_ce_and_the_default() -> None:
    apart: dict[str, Any] = {
        "by_popularity": {"test": {"popular": metrics(0.4), "rare": metrics(0.1)}}
    }
    half: dict[str, Any] = {
        "by_popularity": {"test": {"popular": metrics(0.2), "rare": metrics(0.2)}}
    }
    rows = [
        row("sasrec", "ce", 0.2, **half), row("sasrec", "sce", 0.3, **apart),
        row("ligr", "ce", 0.1), row("ligr", "sce", 0.4),
        row("sasrec", "ce-", 0.5, settings={"loss.negatives": "uniform", "loss.cut": False}),
        row("sasrec", "ce", 0.2, data="other"),
    ]  # fmt: skip
    found = {
        tuple(side[name] for side in (one["setting"], one["against"])
              for name in ("model.name", "loss.name")): one
        for one in make_pairs(group_seeds(rows))
    }  # fmt: skip
    ratios = {pair: round(one["test"], 6) for pair, one in found.items()}
    assert ratios == {
        ("sasrec", "ce", "sasrec", "sce"): 0.666667, ("sasrec", "sce", "sasrec", "ce"): 1.5,
        ("ligr", "ce", "sasrec", "sce"): 0.333333, ("ligr", "sce", "ligr", "ce"): 4.0,
        ("ligr", "sce", "sasrec", "sce"): 1.333333, ("sasrec", "ce-", "sasrec", "ce"): 2.5,
        ("sasrec", "ce-", "sasrec", "sce"): 1.666667,
    }  # fmt: skip
    one = found["sasrec", "sce", "sasrec", "ce"]
    assert (one["popular"], one["rare"]) == pytest.approx((2.0, 0.5))
    assert (one["interval"], one["no_interval"]) == (None, "the ranks are not stored")
    assert one["runs"] == ["sasrec sce 0"]
    assert found["ligr", "sce", "ligr", "ce"]["rare"] is None


def test_a_pair_has_its_interval_where_ranks_are_stored(tmp_path: Path) -> None:
    rows = []
    for loss, share in [("ce", 0.5), ("sce", 0.8)]:
        place = tmp_path / loss
        place.mkdir()
        stored: dict[str, Any] = {
            f"{split}_ranks": write_ranks(place, ranks(900, share, seed), split)
            for seed, split in enumerate(("test", "validation"))
        }
        rows.append(row("sasrec", loss, share, directory=str(place), **stored))
    _, one = make_pairs(group_seeds(rows))
    for seed, name in enumerate(("interval", "validation_interval")):
        change = relative_interval([ranks(900, 0.8, seed)], [ranks(900, 0.5, seed)])
        assert isinstance(change, tuple)
        assert one[name] == [1 + end for end in change]
    rows[0]["validation_ranks"] = write_ranks(tmp_path / "ce", ranks(800, 0.5, 1), "validation")
    _, one = make_pairs(group_seeds(rows))  # of another sample
    assert (one["interval"] is None, one["validation_interval"]) == (False, None)
    assert one["no_interval"] is None
