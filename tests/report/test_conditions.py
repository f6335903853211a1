from typing import Any

import pytest

from sce.report.frame import SeedGroup, comparable, group_seeds, is_resident, left_out
from tests.experiments.made_rows import CPU, GPU, make_row


def settings_of(*measured: tuple[str, int, dict[str, Any], float]) -> list[SeedGroup]:
    """Of loss, seed, where it ran and MiB."""
    return group_seeds(
        make_row(f"{loss}{seed}", {"loss.name": loss}, seed=seed, memory=memory, seconds=memory,
                 test=memory / 1000, components_mib={"loss": memory}, tokens_per_second=memory,
                 **where)
        for loss, seed, where, memory in measured
    )  # fmt: skip


def test_memory_and_time_are_of_one_device_and_quality_of_all() -> None:
    found = settings_of(
        ("ce", 0, CPU, 416.0), ("ce", 1, GPU, 50.0), ("ce", 2, GPU, 60.0), ("sce", 0, GPU, 20.0)
    )
    ce, sce = comparable(found)
    for name in ("memory", "time", "speed", "components_mib.loss"):
        assert (ce.mean(name), sce.mean(name)) == (55.0, 20.0)
    assert ce.spread("memory") == pytest.approx(50**0.5)
    assert ce.mean("test.ndcg@10") == pytest.approx(0.526 / 3)
    assert len(ce.rows) == 3
    assert found[0].mean("memory") == pytest.approx(526 / 3)  # what was given is as it was


def test_the_device_that_most_settings_have_is_taken() -> None:
    found = settings_of(
        ("ce", 0, CPU, 416.0), ("sce", 0, CPU, 400.0),
        ("sce", 1, GPU, 50.0), ("sce", 2, GPU, 50.0), ("sce", 3, GPU, 50.0),
    )  # fmt: skip
    assert [one.mean("memory") for one in comparable(found)] == [416.0, 400.0]
    assert is_resident(comparable(found))


def test_of_two_as_common_it_is_the_gpu() -> None:
    found = settings_of(("ce", 0, GPU, 50.0), ("sce", 0, CPU, 400.0))
    ce, sce = comparable(found)
    assert (ce.mean("memory"), sce.mean("memory")) == (50.0, None)
    assert sce.mean("test.ndcg@10") == 0.4
    assert is_resident(found)
    assert not is_resident([ce, sce])


def test_two_ways_of_measuring_on_one_device_are_two() -> None:
    since = {**CPU, "memory_measured": "highest resident memory since the process began"}
    found = settings_of(("ce", 0, CPU, 400.0), ("ce", 1, since, 500.0), ("sce", 0, CPU, 300.0))
    assert comparable(found)[0].mean("memory") == 400.0


def test_what_is_left_out_is_said() -> None:
    found = settings_of(("ce", 0, CPU, 416.0), ("ce", 1, GPU, 50.0), ("sce", 0, GPU, 20.0))
    assert list(left_out(found)) == [
        "Memory and time are those measured on NVIDIA H200 (GPU memory allocated); those of 1 run "
        "on cpu, 2 threads (resident memory of the process) are left out."
    ]
    assert list(left_out(comparable(found))) == []
    assert list(left_out(found[1:])) == []
    assert comparable(comparable(found)) == comparable(found)


def test_rows_that_do_not_say_where_they_ran() -> None:
    old = make_row("a", {"loss.name": "ce"}, device=None, memory_measured=None)
    (found,) = comparable(group_seeds([old]))
    assert found.mean("memory") == 500.0
    assert comparable([]) == []
