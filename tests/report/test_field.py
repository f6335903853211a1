import math

import numpy as np
import pytest

from sce.report.field import LEAST_LOGS, make_field, name_setting, spread_over_logs, stand
from sce.report.frame import Group, SeedGroup
from tests.experiments.made_rows import make_row, metrics

CE: Group = ("sasrec", "ce", None, None)
SCE: Group = ("sasrec", "sce", None, None)
UNIFORM: Group = ("sasrec", "ce-", "uniform", None)


def group(*tests: float, rare: float | None = None) -> SeedGroup:
    apart = None if rare is None else {"test": {"rare": metrics(rare)}}
    rows = (
        make_row("", {}, test=test, seed=seed, by_popularity=apart, epochs=10)
        for seed, test in enumerate(tests)
    )
    return SeedGroup(tuple(rows))


def test_the_spread_is_that_of_drawing_logs_and_then_seeds() -> None:
    random = np.random.default_rng(0)
    changes = [random.normal(0.1, 0.2, size) for size in (1, 3, 3, 2, 5)]
    logs = random.integers(5, size=(20_000, 4))  # one fewer than there are
    drawn = np.zeros(logs.shape)
    for log, seeds in enumerate(changes):
        again = random.choice(seeds, (*logs.shape, len(seeds))).mean(2)
        drawn = np.where(logs == log, again, drawn)
    student = 2.776  # of four degrees of freedom
    found = spread_over_logs([seeds.tolist() for seeds in changes])
    assert found == pytest.approx(student * drawn.mean(1).std(), rel=0.02)


def test_a_difference_larger_than_the_spread() -> None:
    logs = {
        f"log {n}": {
            CE: group(0.10, 0.11, rare=0.02),
            SCE: group(0.12 + 0.002 * n, 0.132, rare=0.03),
            UNIFORM: group(0.05 if n % 2 else 0.2),
        }
        for n in range(LEAST_LOGS)
    }
    ours, other, reference = (
        next(one for one in stand(logs) if one.setting == name) for name in (SCE, UNIFORM, CE)
    )
    # Each log counts as the mean of its seeds, whatever these are.
    changes = [(math.log(1.2 + 0.02 * n) + math.log(1.2)) / 2 for n in range(5)]
    assert ours.ratio == pytest.approx(math.exp(sum(changes) / 5))
    assert ours.part("rare") == pytest.approx((1.5, LEAST_LOGS))
    assert ours.part("popular") is None
    assert ours.verdict == "better"
    assert ours.interval is not None
    assert 1 < ours.interval[0] < ours.ratio < ours.interval[1]
    assert other.verdict == "within the spread"
    assert other.ratio == pytest.approx((0.05**2 * 0.2**3) ** 0.2 / math.sqrt(0.10 * 0.11))
    assert (reference.ratio, reference.interval, reference.verdict) == (1.0, None, "")
    assert ours.places == [(2, 3), (1, 3), (2, 3), (1, 3), (2, 3)]


def test_seeds_without_a_hit_count() -> None:
    logs = {
        f"log {n}": {CE: group(0.1, 0.1, rare=0.02), SCE: group(0.12, 0.0, rare=0.03)}
        for n in range(5)
    }
    logs["log 0"] = {CE: group(0.1, 0.1, rare=0.02), SCE: group(0.0, 0.0, rare=0.0)}
    ours = next(one for one in stand(logs) if one.setting == SCE)
    assert (len(ours.pairs), ours.verdict) == (5, "worse")
    assert ours.places == 5 * [(2, 2)]
    assert 0 < ours.ratio < 0.2
    assert ours.part("rare") == pytest.approx((1.5, 4))  # of a log without hits nothing is said


def test_a_few_logs_give_no_verdict_and_come_last() -> None:
    logs = {f"log {n}": {CE: group(0.1), UNIFORM: group(0.09 - 0.001 * n)} for n in range(5)}
    logs["log 0"][SCE] = group(0.2)
    heads, rows = make_field(logs)
    assert heads[:2] + heads[4:8] == [
        "backbone", "loss", "mean rank", "ratio", "95 %", "against SASRec CE",
    ]  # fmt: skip
    assert [row[1:6] + row[7:8] for row in rows] == [
        ["CE", "5", "1", "1.2 of 2.2", "1.000", ""],
        ["CE⁻, uniform", "5", "1", "2.2 of 2.2", "0.880", "worse"],
        ["SCE", "1", "1", "1.0 of 3.0", "2.000", "too few logs"],
    ]
    assert rows[0][-2:] == ["500 MiB", "3 s"]
    assert make_field({"log": {SCE: group(0.2)}})[1] == []  # nothing to compare with


def test_settings_in_words() -> None:
    assert name_setting(("ligr", "ce-", "mixed", True)) == ("LiGR", "CCE⁻, mixed")
    assert name_setting(("mine.Model", "gbce", "uniform", None)) == ("mine.Model", "gBCE")
