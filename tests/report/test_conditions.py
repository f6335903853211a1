from typing import Any

import pytest

from sce.experiments.store import Row
from sce.report.frame import comparable, group_seeds, is_resident
from tests.experiments.made_rows import CPU, GPU, make_row


def rows_of(*measured: tuple[str, int, dict[str, Any], float], data: str = "ml1m") -> list[Row]:
    """Of loss, seed, where it ran and MiB."""
    return [
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, memory=memory, seconds=memory,
                 test=memory / 1000, components_mib={"loss": memory}, tokens_per_second=memory,
                 data=data, **where)
        for loss, seed, where, memory in measured
    ]  # fmt: skip


def test_memory_and_time_are_of_one_device_and_quality_of_all() -> None:
    rows = rows_of(
        ("ce", 0, CPU, 416.0), ("ce", 1, GPU, 50.0), ("ce", 2, GPU, 60.0), ("sce", 0, GPU, 20.0)
    )
    kept, told = comparable(rows)
    ce, sce = group_seeds(kept)
    for name in ("memory", "time", "speed", "components_mib.loss"):
        assert (ce.mean(name), sce.mean(name)) == (55.0, 20.0)
    assert ce.spread("memory") == pytest.approx(50**0.5)
    assert ce.mean("test.ndcg@10") == pytest.approx(0.526 / 3)
    assert rows[0]["memory_mib"]["training"] == 416.0  # what was given is as it was
    assert told == [
        "Memory and time on ml1m are those measured on NVIDIA H200 (GPU memory allocated); those "
        "of 1 run on cpu, 2 threads (resident memory of the process) are left out."
    ]
    assert comparable(kept) == (kept, [])


def test_each_dataset_has_the_device_of_most_of_its_runs_and_of_two_as_common_the_gpu() -> None:
    kept, told = comparable(
        rows_of(("ce", 0, GPU, 50.0), ("sce", 0, CPU, 400.0))
        + rows_of(("ce", 0, CPU, 416.0), ("sce", 0, CPU, 400.0), ("sce", 1, GPU, 5.0), data="b")
    )
    found = [one.mean("memory") for one in group_seeds(kept)]
    assert found == [50.0, None, 416.0, 400.0]
    assert [is_resident(kept[:2]), is_resident(kept)] == [False, True]
    assert [one.split()[4] for one in told] == ["ml1m", "b"]


def test_two_ways_of_measuring_on_one_device_are_two() -> None:
    since = {**CPU, "memory_measured": "highest resident memory since the process began"}
    rows = rows_of(("ce", 0, CPU, 400.0), ("ce", 1, since, 500.0), ("sce", 0, CPU, 300.0))
    assert group_seeds(comparable(rows)[0])[0].mean("memory") == 400.0


def test_rows_that_do_not_say_where_they_ran() -> None:
    old = make_row("a", {"loss.name": "ce"}, device=None, memory_measured=None)
    assert comparable([old]) == ([old], [])
    assert comparable([]) == ([], [])
