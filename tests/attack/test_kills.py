"""Commands killed, or refused a call, at any moment: old or new is whole, nothing is lost."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sce.data.prepared import PreparedDataset
from sce.experiments.store import read_rows
from sce.training.checkpoint import read_tensors
from sce.training.run import Run
from tests.attack.faulty import Server, sample
from tests.cycle_data import TINY_SWEEP

pytestmark = pytest.mark.timeout(3600)

PREPARE = ["prepare", "log.csv", "--split", "leave-one-out", "--out", "data"]
TRAIN = ["train", "small", "--out", "run", "--epochs", "2", "--batch-size", "16", "--device", "cpu"]
TRAIN += ["--model.dim", "8", "--model.blocks", "1", "--model.max-length", "6"]
SWEEP = ["sweep", "tiny.toml", "--data", "small", "--out", "sweep"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a directory with two logs, a dataset and a sweep file."""
    place = tmp_path_factory.mktemp("kills")
    for name, users in (("log.csv", 60), ("other.csv", 50)):
        rows = [f"{u},{(7 * u + 3 * i) % 40},{u + 50 * i}" for u in range(users) for i in range(8)]
        (place / name).write_text("\n".join(["user,item,time", *rows]))
    (place / "tiny.toml").write_text(TINY_SWEEP)
    running = Server(place)
    assert running.run([*PREPARE[:-1], "small"]).code == 0
    yield running
    running.close()


@pytest.fixture
def place(server: Server) -> Iterator[Path]:
    yield server.directory
    for name in ("data", "run", "sweep"):
        shutil.rmtree(server.directory / name, ignore_errors=True)


def tell(capsys: pytest.CaptureFixture[str], what: str, cases: int) -> None:
    with capsys.disabled():
        print(f"\n{what}: {cases} cases", end=" ")


def nothing_left(place: Path) -> None:
    assert {path.name for path in place.glob(".*")} <= {".stdout", ".stderr"}


@pytest.mark.parametrize("refuse", [False, True], ids=["killed", "disk full"])
@pytest.mark.parametrize("way", ["anew", "exchange", "fallback"])
def test_prepare(
    server: Server, place: Path, way: str, refuse: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = place / "data"
    exchange = way != "fallback"
    assert server.run(PREPARE, exchange=exchange).code == 0
    new, old = PreparedDataset.load(data).content_hash, None
    shutil.rmtree(data)
    before = [] if way == "anew" else ["--force"]
    if before:
        assert server.run(["prepare", "other.csv", *PREPARE[2:]]).code == 0
        old = PreparedDataset.load(data).content_hash
        shutil.copytree(data, place / "old", dirs_exist_ok=True)
    moments = server.run([*PREPARE, *before], exchange=exchange).moments
    chosen = sample(moments, 5)
    for when in chosen:
        shutil.rmtree(data)
        if before:
            shutil.copytree(place / "old", data)
        done = server.run([*PREPARE, *before], when=when, refuse=refuse, exchange=exchange)
        if way == "exchange" or (refuse and before):
            assert data.exists(), (when, done)
        found = None
        if data.exists() or before:  # loading puts back what was moved aside
            found = PreparedDataset.load(data).content_hash
        assert found in (old, new), when
        if refuse:
            assert (done.code, found) in ((0, new), (2, old)), (when, done)
        assert server.run([*PREPARE, "--force"], exchange=exchange).code == 0, when
        assert PreparedDataset.load(data).content_hash == new
        nothing_left(place)
    tell(capsys, f"prepare {way} {'disk full' if refuse else 'killed'}", len(chosen))


def test_prepare_exits_with_0_only_if_the_dataset_is_whole(
    server: Server, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [*(7 + number for number in sample(24, 4)), 64]
    codes = set()
    for handles in chosen:
        done = server.run(PREPARE, handles=handles)
        codes.add(done.code)
        if done.code == 0:
            PreparedDataset.load(place / "data")
            shutil.rmtree(place / "data")
        else:
            assert done.code == 2, (handles, done)
            assert not (place / "data").exists(), handles
        nothing_left(place)
    assert codes == {0, 2}
    streams = ("stdout", "stderr") if Path("/dev/full").exists() else ()
    for stream in streams:
        assert server.run([*PREPARE, "--force"], full=stream).code == 0, stream
        PreparedDataset.load(place / "data")
    tell(capsys, "prepare with few files or nowhere to print", len(chosen) + len(streams))


SYSTEM_CALLS = [
    *(("renameat2", 1, name) for name in ("TERM", "KILL")),
    *(("unlinkat", when, "KILL") for when in (1, 5)),
    *(("fsync", when, "TERM") for when in (1, 4, 11)),
]


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
def test_prepare_stopped_at_a_system_call(
    server: Server, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, command = place / "data", [*PREPARE, "--force"]
    assert server.run(command).code == 0
    new = PreparedDataset.load(data).content_hash
    chosen = sample(len(SYSTEM_CALLS), 2)
    for number in chosen:
        assert server.run(["prepare", "other.csv", *command[2:]]).code == 0
        old = PreparedDataset.load(data).content_hash
        call, when, signal = SYSTEM_CALLS[number - 1]
        inject = f"inject={call}:signal={signal}:when={when}"
        traced = ["strace", "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", inject]
        whole = [*traced, sys.executable, "-m", "sce", *command]
        done = subprocess.run(whole, cwd=place, env=server.environment, capture_output=True)
        if b"ptrace" in done.stderr.lower():
            pytest.skip("strace may not trace here")
        assert done.returncode != 0, (call, when)
        assert PreparedDataset.load(data).content_hash in (old, new)
        assert server.run(command).code == 0
        nothing_left(place)
    tell(capsys, "prepare stopped at a system call", len(chosen))


@pytest.mark.parametrize("refuse", [False, True], ids=["killed", "disk full"])
def test_train_resumes_to_the_same_bits(
    server: Server, place: Path, refuse: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    moments = server.run(TRAIN).moments
    expected, _ = read_tensors(Run.open(run).best_weights)
    result = Run.open(run).result()
    assert result is not None
    chosen = sample(moments, 3)
    for when in chosen:
        shutil.rmtree(run)
        done = server.run(TRAIN, when=when, refuse=refuse)
        assert done.code in ((0, 2) if refuse else (-9,)), (when, done)
        if done.code != 0:
            again = server.run([*TRAIN, "--resume"] if run.exists() else TRAIN)
            assert again.code == 0, (when, again)
        weights, _ = read_tensors(Run.open(run).best_weights)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), when
        again_result = Run.open(run).result()
        assert again_result is not None
        assert again_result["test"] == result["test"]
        assert len(Run.open(run).metrics()) == 2
        nothing_left(place)
    tell(capsys, f"train {'disk full' if refuse else 'killed'}", len(chosen))


def test_train_force_leaves_the_old_run_or_the_new(
    server: Server, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "run"
    assert server.run([*TRAIN, "--loss", "ce"]).code == 0
    shutil.copytree(run, place / "old-run", dirs_exist_ok=True)
    moments = server.run([*TRAIN, "--loss", "sce", "--force"]).moments
    chosen = sample(moments, 2)
    for when in chosen:
        shutil.rmtree(run)
        shutil.copytree(place / "old-run", run)
        assert server.run([*TRAIN, "--loss", "sce", "--force"], when=when).code == -9
        found = Run.open(run)
        assert found.loss in ("ce", "sce")
        if found.loss == "ce":
            assert found.result() is not None
        again = server.run([*TRAIN, "--loss", "sce", "--force"])
        assert again.code == 0, (when, again)
        assert Run.open(run).loss == "sce"
        nothing_left(place)
    tell(capsys, "train --force killed", len(chosen))


def test_a_sweep_goes_on_where_it_was(
    server: Server, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = server.run(SWEEP)
    assert first.code == 0, first
    (row,) = read_rows(place / "sweep" / "rows.jsonl")
    chosen = sample(first.moments, 1)
    for when in chosen:
        shutil.rmtree(place / "sweep")
        assert server.run(SWEEP, when=when).code == -9
        again = server.run(SWEEP)
        assert again.code == 0, (when, again)
        (found,) = read_rows(place / "sweep" / "rows.jsonl")
        assert {name: found[name] for name in ("key", "status", "test")} == {
            name: row[name] for name in ("key", "status", "test")
        }
        nothing_left(place)
    tell(capsys, "sweep killed", len(chosen))
