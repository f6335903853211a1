import itertools
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from sce.report.frame import (
    SeedGroup,
    best,
    datasets_of,
    describe,
    front,
    group_by,
    group_seeds,
    name_group,
    show_change,
    unconverged,
    varied,
)
from tests.experiments.made_rows import NEVER, make_row


def rows_of(*settings: dict[str, Any], **options: Any) -> list[SeedGroup]:
    count = itertools.count()
    rows = [make_row(f"{next(count)}", {"loss.name": "sce", **one}, **options) for one in settings]
    return group_seeds(rows)


def test_seeds_are_put_together_and_nothing_else() -> None:
    rows = [
        make_row(f"{data}{size}{seed}", {"loss.name": "sce", "loss.bucket_size_y": size},
                 data=data, seed=seed, test=0.1 + 0.01 * seed)
        for data in ("a", "b") for size in (4, 8) for seed in (2, 0, 1)
    ]  # fmt: skip
    failed = make_row("x", {"loss.name": "sce", "loss.bucket_size_y": 4}, seed=3) | NEVER
    found = group_seeds([*rows, failed | {"status": "failed"}])
    assert [(s.dataset, s.value("loss.bucket_size_y")) for s in found] == [
        ("a", 4), ("a", 8), ("b", 4), ("b", 8),
    ]  # fmt: skip
    assert [row["seed"] for row in found[0].rows] == [0, 1, 2]
    assert found[0].mean("test.ndcg@10") == pytest.approx(0.11)
    assert found[0].spread("test.ndcg@10") == pytest.approx(statistics.stdev([0.1, 0.11, 0.12]))


@pytest.mark.parametrize(
    ("name", "values"),
    [("save_minutes", [1.0, 5.0]), ("evaluation_batch_size", [64, 512]),
     ("device", ["cuda:0", "cuda:1"])],
)  # fmt: skip
def test_what_changes_no_result_keeps_only_runs_of_one_seed_apart(
    name: str, values: list[Any]
) -> None:
    rows = [
        make_row(f"{n}", {"loss.name": "sce", f"training.{name}": value}, seed=n)
        for n, value in enumerate(values)
    ]
    (one,) = group_seeds(rows)
    assert len(one.rows) == 2
    again = make_row("2", {"loss.name": "sce", f"training.{name}": values[1]}, seed=0)
    first, second = group_seeds([*rows, again])
    assert ([len(first.rows), len(second.rows)], varied([first, second])) == (
        [1, 2], [f"training.{name}"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("best", "epochs", "settings", "converged"),
    [(2, 2, {}, False), (1, 2, {}, False), (1, 10, {}, True), (2, 3, {}, True),
     (1, 3, {"patience": 3}, True), (1, 9, {"patience": 0}, False),
     (5, 45, {"evaluate_every": 5}, False), (5, 50, {"evaluate_every": 5}, True)],
)  # fmt: skip
def test_best_at_the_last_or_at_the_first_of_few_is_not_converged(
    best: int, epochs: int, settings: dict[str, int], converged: bool
) -> None:
    given = {f"training.{name}": value for name, value in settings.items()}
    (one,) = rows_of(given, best_epoch=best, epochs=epochs)
    assert unconverged(one) == (not converged)


def test_one_seed_has_no_spread_and_what_is_missing_is_none() -> None:
    (one,) = rows_of({})
    assert one.spread("test.ndcg@10") is None
    assert one.mean("test.luck@3") is None
    assert one.mean("components_mib.weights") is None
    assert (one.mean("memory"), one.mean("time"), one.value("items")) == (500.0, 30.0, 3_416)


def test_validation_chooses_not_test() -> None:
    rows = [
        make_row("a", {"loss.name": "sce", "loss.alpha": 1.0}, validation=0.2, test=0.1),
        make_row("b", {"loss.name": "sce", "loss.alpha": 2.0}, validation=0.1, test=0.9),
    ]
    chosen = best(group_seeds(rows))
    assert chosen is not None
    assert chosen.value("loss.alpha") == 1.0
    assert best([]) is None


def test_a_setting_that_lost_seeds_does_not_win_on_the_others() -> None:
    steady = [make_row(f"s{n}", {"loss.name": "sce"}, seed=n, validation=0.1) for n in range(3)]
    lucky = make_row("l", {"loss.name": "sce", "loss.alpha": 9.0}, validation=0.9, memory=1.0)
    found = group_seeds([*steady, lucky])
    chosen = best(found)
    assert chosen is not None
    assert len(chosen.rows) == 3
    assert front(found, "memory") == [chosen]


def test_steps_and_trainings_are_not_seeds_of_one_thing() -> None:
    whole = make_row("a", {"loss.name": "sce"})
    few = make_row("b", {"loss.name": "sce"}, seed=1, measure="steps", steps=20)
    more = make_row("c", {"loss.name": "sce"}, seed=2, measure="steps", steps=40)
    assert [len(one.rows) for one in group_seeds([whole, few, more])] == [1, 1, 1]


numbers = st.integers(1, 8)


@examples(max_examples=50, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=12))
def test_the_front_is_what_nothing_as_cheap_beats(points: list[tuple[int, int]]) -> None:
    rows = [
        make_row(str(n), {"loss.name": "sce", "loss.alpha": n}, memory=cost, validation=score / 10)
        for n, (cost, score) in enumerate(points)
    ]
    found = {(s.mean("memory"), round(s.score * 10)) for s in front(group_seeds(rows), "memory")}
    # Those that no other point is at least as good as in both, and better in one.
    naive = {
        (cost, score)
        for cost, score in points
        if not any((c <= cost and s >= score) and (c < cost or s > score) for c, s in points)
    }
    assert found == naive


def test_groups_are_in_the_order_of_the_paper() -> None:
    settings = rows_of(*({"loss.name": name} for name in ("sce", "bce", "ce", "gbce", "ce-")))
    found = [name for (name,) in group_by(settings, ["loss.name"])]
    assert found == ["bce", "gbce", "ce-", "ce", "sce"]
    numbered = rows_of(*({"loss.alpha": alpha} for alpha in (16, 2.0, 4)))
    assert list(group_by(numbered, ["loss.alpha"])) == [(2.0,), (4,), (16,)]


def test_names() -> None:
    assert name_group(["loss.alpha", "loss.beta"], (2.0, 16)) == "alpha 2, beta 16"
    assert name_group(["loss.n_negatives"], (None,)) == "n_negatives –"
    by = ["loss.name", "training.row_wise"]
    groups = [("bce", False), ("sce", False), ("sce", True)]
    assert [name_group(by, group, groups) for group in groups] == [
        "BCE",
        "SCE, without row_wise",
        "SCE, with row_wise",
    ]
    (plain, _) = rows_of({"loss.mix": False}, {"loss.mix": True})
    assert describe(plain, ["loss.mix"]) == "SCE, without mix"
    settings = rows_of({"loss.alpha": 1.0}, {"loss.alpha": 2.5}, {"loss.name": "ce"})
    assert varied(settings) == ["loss.alpha"]
    assert [describe(one, varied(settings)) for one in settings] == [
        "SCE, alpha 1", "SCE, alpha 2.5", "CE",
    ]  # fmt: skip


def test_what_differs_between_datasets_only_is_not_varied() -> None:
    rows = [
        make_row("a", {"loss.name": "sce", "model.dropout": 0.3}, data="a", items=9),
        make_row("b", {"loss.name": "sce", "model.dropout": 0.6}, data="b", items=5),
    ]
    settings = group_seeds(rows)
    assert varied(settings) == []
    assert datasets_of(settings) == ["b", "a"]


def test_changes() -> None:
    assert show_change(0.0) == "+0%"
    assert show_change(-0.937) == "−93.7%"
