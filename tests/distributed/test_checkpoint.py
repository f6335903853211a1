import re
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sce import RowwiseAdagrad
from sce.data import storage
from sce.distributed import RankError, Ranks, ShardedTable, load_sharded, save_sharded
from sce.distributed.checkpoint import read_whole, whole_rows
from sce.errors import InputError
from tests.attack.elastic import Fault, count_moments
from tests.attack.faulty import sample
from tests.attack.test_kills import tell
from tests.distributed.pool import KILLED, Run, start_pool

N_ITEMS, PART = 29, 8
WEIGHT = torch.arange(6.0).view(2, 3).T
SIZES = (1, 2, 3, 4)


def whole(step: int) -> tuple[Tensor, Tensor]:
    """Return the rows and accumulators of all ranks after a step."""
    rows = torch.arange(N_ITEMS * 3.0).view(N_ITEMS, 3) + step
    return rows, torch.arange(N_ITEMS) * 0.5 + step


def sharded(ranks: Ranks, step: int) -> tuple[ShardedTable, RowwiseAdagrad]:
    table = ShardedTable(N_ITEMS, 3, ranks)
    optimizer = RowwiseAdagrad([table.shard])
    rows, sums = whole(step)
    table.shard.data = rows[ranks.rank :: ranks.size].clone()
    optimizer.state[table.shard]["sum"] = sums[ranks.rank :: ranks.size].clone()
    return table, optimizer


def save(ranks: Ranks, directory: Path, step: int) -> None:
    table, optimizer = sharded(ranks, step)
    rest, progress = {"weight": WEIGHT}, {"epoch": step}
    more = {"best": -table.shard.detach()}
    save_sharded(directory, step, table, optimizer, rest, progress, more=more, part_items=PART)


def load(ranks: Ranks, directory: Path) -> int:
    """Load, look at everything, and return the step."""
    table, optimizer = sharded(ranks, 0)
    more: dict[str, Tensor] = {}
    rest, progress = load_sharded(directory, table, optimizer, more=more)
    assert torch.equal(more["best"], -table.shard)
    assert torch.equal(rest["weight"], WEIGHT)
    step: int = progress["epoch"]
    rows, sums = whole(step)
    assert torch.equal(table.shard, rows[ranks.rank :: ranks.size])
    assert torch.equal(optimizer.state[table.shard]["sum"], sums[ranks.rank :: ranks.size])
    return step


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_bytes_are_the_same_for_any_number_of_ranks_and_load_by_any(
    tmp_path: Path, on_ranks: Run
) -> None:
    for size in SIZES:
        on_ranks(size, save, tmp_path / str(size), 1)
        on_ranks(size, save, tmp_path / str(size), 2)
        on_ranks(size, save, tmp_path / str(size), 2)  # once more
    files = content(tmp_path / "1")
    parts = [f"state-2/table-{part:06}.safetensors" for part in range(4)]
    others = ["latest.json", "state-2/rest.safetensors", "state-2/state.json"]
    assert sorted(files) == [*others, *parts]
    for size in SIZES:
        assert content(tmp_path / str(size)) == files
        assert on_ranks(size, load, tmp_path / "3") == [2] * size


def test_one_process_reads_the_whole_table(tmp_path: Path, on_ranks: Run) -> None:
    on_ranks(3, save, tmp_path, 2)
    rows, rest, progress = read_whole(tmp_path)
    assert torch.equal(rows, whole(2)[0])
    assert torch.equal(rest["weight"], WEIGHT)
    assert progress == {"epoch": 2}


def streamed(ranks: Ranks, to_all: bool) -> Tensor:
    table, _ = sharded(ranks, 1)
    return torch.cat([*whole_rows(table, table.shard.detach(), to_all=to_all, at_once=5)])


def test_rows_come_in_the_order_of_ids(on_ranks: Run) -> None:
    expected, _ = whole(1)
    for size in SIZES:
        first, *others = on_ranks(size, streamed, False)
        assert torch.equal(first, expected)
        assert all(len(rows) == 0 for rows in others)
        assert all(torch.equal(rows, expected) for rows in on_ranks(size, streamed, True))


def outcome(ranks: Ranks, work: Any, *arguments: Any) -> Any:
    try:
        return work(ranks, *arguments)
    except (InputError, RankError) as error:
        return f"{type(error).__name__}: {error}"


def of_another_shape(ranks: Ranks, directory: Path) -> None:
    table = ShardedTable(N_ITEMS + 1, 3, ranks)
    load_sharded(directory, table, RowwiseAdagrad([table.shard]))


def test_what_does_not_fit_is_refused_by_all(tmp_path: Path, on_ranks: Run) -> None:
    assert "has no checkpoint" in on_ranks(2, outcome, load, tmp_path)[1]
    on_ranks(1, save, tmp_path, 1)
    for said in on_ranks(3, outcome, of_another_shape, tmp_path):
        assert "is of a table [29, 3], and this one is [30, 3]" in said
    file = tmp_path / "state-1" / "table-000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for said in on_ranks(3, outcome, load, tmp_path):
        assert said.startswith("InputError: rank 1: ")
        assert said.endswith("table-000001.safetensors is half-written or altered")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": -1}, "a step is not negative, and a file has items; got -1"),
        ({"rest": {"a": 1}}, "a checkpoint has tensors; a is a int"),
        ({"progress": {"a": {1}}}, "progress is kept as JSON, and cannot be"),
        ({"more": {"b": torch.ones(3)}}, "b must have the 29 rows of the shard"),
        ({"optimizer": None}, "optimizer must be Optimizer; got None"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    table, optimizer = sharded(Ranks(), 1)
    given: Any = {"step": 1, "table": table, "optimizer": optimizer, "rest": {}}
    with pytest.raises(InputError, match=said):
        save_sharded(tmp_path, **given | changed)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_of_another_kind_is_refused(kind: Any, tmp_path: Path) -> None:
    save(Ranks(), tmp_path, 1)
    table, _ = sharded(Ranks(), 1)
    with pytest.raises(InputError, match=f"RowwiseAdagrad of its shard; got {kind.__name__}"):
        load_sharded(str(tmp_path), table, kind([table.shard]))


def save_to_a_full_disk(ranks: Ranks, directory: Path, victim: int) -> Any:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == victim:
            patch.setattr(Path, "write_bytes", refuse)
        return outcome(ranks, save, directory, 2)


def test_a_full_disk_is_told_to_all_and_leaves_the_old(tmp_path: Path, on_ranks: Run) -> None:
    on_ranks(3, save, tmp_path, 1)
    before = content(tmp_path)
    for victim in (0, 2):
        for said in on_ranks(3, save_to_a_full_disk, tmp_path, victim):
            assert re.match(rf"InputError: rank {victim}: cannot write .*: no space left", said)
        assert content(tmp_path) == before


def test_what_a_killed_save_moved_aside_is_put_back(tmp_path: Path, on_ranks: Run) -> None:
    on_ranks(2, save, tmp_path, 1)
    (tmp_path / "state-1").rename(tmp_path / ".state-1.replaced-01234567")
    assert on_ranks(2, load, tmp_path) == [1, 1]


def save_at_risk(
    ranks: Ranks, directory: Path, step: int, fault: Fault, *, exchange: bool = True
) -> Any:
    """Save; at some moment a rank is hurt. Returns the moments, or the complaint."""
    if not exchange:  # a file system that cannot exchange two names
        storage._exchange = lambda *_: False
    if fault.act == "limit" and fault.rank == ranks.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (fault.when,))
    count = count_moments(directory, fault if fault.rank == ranks.rank else Fault())
    return outcome(ranks, save, directory, step) or count()


def test_a_rank_that_may_write_small_files_alone(tmp_path: Path, on_ranks: Run) -> None:
    on_ranks(2, save, tmp_path / "saved", 1)
    before = content(tmp_path / "saved")
    with start_pool(tmp_path / "meeting", 2) as run:
        said = run(2, save_at_risk, tmp_path / "saved", 2, Fault(1, 100, "limit"))
    for each in said:
        assert re.match(r"InputError: rank 1: cannot write .*: File too large", each)
    assert content(tmp_path / "saved") == before


@pytest.mark.parametrize(("step", "exchange"), [(2, True), (1, True), (1, False)])
def test_a_killed_save_leaves_the_old_or_the_new(
    tmp_path: Path, on_ranks: Run, step: int, exchange: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(2, save, tmp_path / "counted", 1)
    way = partial(save_at_risk, exchange=exchange)
    with start_pool(tmp_path / "meeting", 2) as run:
        first, second = run(2, way, tmp_path / "counted", step, Fault())
    steps = []
    chosen = [(0, when) for when in sample(first, 2)]
    for victim, when in [*chosen, *((1, when) for when in sample(second, 1))]:
        directory = tmp_path / f"{victim} {when}"
        on_ranks(2, save, directory, 1)
        with start_pool(tmp_path / f"meeting {victim} {when}", 2) as run:
            said = run(2, way, directory, step, Fault(victim, when))
        assert said[victim] == KILLED
        assert "RankError" in str(said[1 - victim]) or isinstance(said[1 - victim], int)
        steps.append(on_ranks(1, load, directory)[0])
        on_ranks(2, save, directory, 3)  # leftovers go
        assert {path.name for path in directory.iterdir()} == {"latest.json", "state-3"}
    assert set(steps) <= {1, step}
    ended = f"{steps.count(1)} left the old" if step > 1 else "the same step again"
    tell(capsys, f"a rank killed in a sharded save, {ended}", len(steps))
