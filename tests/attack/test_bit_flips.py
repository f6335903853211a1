"""A flipped bit in any file is reported in a sentence with exit 2, or changes no result."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sce.cli import main
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from tests.cycle_data import TINY_SWEEP, make_cycle

pytestmark = pytest.mark.timeout(3600)

Capture = pytest.CaptureFixture[str]
SMALL = ["--model.dim", "8", "--model.blocks", "1", "--model.max-length", "6", "--epochs", "2"]


# What differs each time: durations, peaks, dates.
_TIMES = re.compile(r"[\d.,]+ (s|ms|min|users/s|[MG]iB)\b|[\d-]+ at [\d:]+")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flips")
    make_cycle(made / "data")
    return made


def flips(place: Path, default: int) -> Iterator[str]:
    """Flip one bit after the other, in every file in turn; put each right again."""
    chance = random.Random(0)
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    for case in range(max(len(files), int(os.environ.get("SCE_ATTACK", default)))):
        file = files[case % len(files)]
        whole = file.read_bytes()
        bit = chance.randrange(8 * len(whole))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        yield f"bit {bit} of {file.relative_to(place)}"
        file.write_bytes(whole)


def attack(place: Path, use: Callable[[], str], default: int, what: str, capsys: Capture) -> None:
    """Compare what `use` gives with what it gave before, for each bit that is flipped."""
    expected, found, cases, wrong = use(), 0, 0, []
    for case in flips(place, default):
        cases += 1
        try:
            if use() != expected:
                wrong.append(case)
        except InputError:
            found += 1
    with capsys.disabled():
        print(f"\nbits flipped in {what}: {cases} cases, {found} reported", end=" ")
    assert not wrong


def test_a_dataset(place: Path, capsys: Capture) -> None:
    def use() -> str:
        loaded = PreparedDataset.load(place / "data")
        arrays = [*vars(loaded.train).values(), *vars(loaded.test).values()]
        arrays += [*loaded.user_ids.arrays().values(), *loaded.item_ids.arrays().values()]
        kept = [loaded.settings, loaded.counts, loaded.content_hash]
        return repr([*kept, *(array.tolist() for array in arrays)])

    attack(place / "data", use, 300, "a dataset", capsys)


def commanded(capsys: Capture, *commands: list[str]) -> str:
    """Output of commands; InputError, after a single line, for exit 2."""
    output = ""
    for command in commands:
        capsys.readouterr()
        code = main(command)
        printed = capsys.readouterr()
        if code == 2:
            assert printed.err.splitlines()[-1].startswith("sce: error: "), printed.err
            raise InputError(printed.err)
        assert code == 0, printed.err
        output += printed.out
    return _TIMES.sub("", output)


def test_a_run(place: Path, capsys: Capture) -> None:
    data, run, page = place / "data", place / "run", place / "page.html"
    train = ["train", str(data), "--device", "cpu", *SMALL]
    assert main([*train, "--out", str(run)]) == 0
    histories = place / "histories.jsonl"
    known = PreparedDataset.load(data).item_ids.decode([0, 1])
    histories.write_text(json.dumps({"user_id": "me", "history": known}) + "\n")

    def use() -> str:
        shutil.rmtree(place / "resumed", ignore_errors=True)
        shutil.copytree(run, place / "resumed")
        return commanded(
            capsys,
            ["evaluate", str(run)],
            ["recommend", str(run), "--histories", str(histories), "-k", "3"],
            ["report", str(run), "--out", str(page)],
            [*train, "--out", str(place / "resumed"), "--resume"],
        ) + _TIMES.sub("", page.read_text(encoding="utf-8"))

    attack(run, use, 7, "a run", capsys)


def test_a_sweep(place: Path, capsys: Capture) -> None:
    sweep, file, page = place / "sweep", place / "tiny.toml", place / "compare.html"
    file.write_text(TINY_SWEEP)
    again = ["sweep", str(file), "--data", str(place / "data"), "--out", str(sweep)]
    assert main(again) == 0

    def use() -> str:
        compare = ["compare", str(sweep), "--out", str(page)]
        return commanded(capsys, compare) + _TIMES.sub("", page.read_text(encoding="utf-8"))

    attack(sweep, use, 12, "a sweep", capsys)
    shutil.rmtree(sweep)
