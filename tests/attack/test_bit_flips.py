"""A flipped bit in any file is reported in a sentence with exit 2, or changes no result."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from tests.cycle_data import make_cycle

pytestmark = pytest.mark.timeout(3600)

Capture = pytest.CaptureFixture[str]


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
