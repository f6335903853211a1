"""The model of a step over ranks, against figures that were computed by hand."""

import json

import pytest

from sce.cli import main
from sce.distributed.plan import plan_ranks
from sce.errors import InputError
from sce.planning import Job


@pytest.mark.parametrize(
    ("items", "ranks", "candidates", "pass_ms", "selecting_ms", "megabytes"),
    [
        (10**8, 8, 79, 10.4, 7, 53),
        (10**8, 64, 27, 10.4, 11, 64),
        (10**9, 8, 79, 104, 21, 53),
        (10**9, 64, 27, 104, 34, 64),
    ],
)
def test_a_rank_of_320_buckets_of_256_items(
    items: int, ranks: int, candidates: int, pass_ms: float, selecting_ms: float, megabytes: float
) -> None:
    found = plan_ranks(Job(items), ranks)
    assert found.sizes == {"n_buckets": 320, "bucket_size_y": 256}
    assert found.candidates == candidates
    assert found.pass_ms == pytest.approx(pass_ms, rel=0.05)
    assert found.selecting_ms == pytest.approx(selecting_ms, rel=0.07)
    sent = sum(size for name, size in found.sends.items() if "model" not in name)
    assert sent / 1e6 == pytest.approx(megabytes, rel=0.05)
    assert found.sending_ms(50e9) > 9 * found.sending_ms(450e9) * 0.99
    assert found.holds["shard"] == 4 * 65 * items / ranks


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--items", "1e9", "--gpus", "64"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "64 GPUs, the catalogue shared by rows; modelled, not measured" in printed
    assert "15,625,000 items" in printed
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modelled_rank"]["rows"] == 15_625_000


def test_more_ranks_than_items() -> None:
    with pytest.raises(InputError, match="between 1 and the number of items; got 9"):
        plan_ranks(Job(8), 9)
