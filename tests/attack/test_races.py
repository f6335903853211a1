"""Commands at the same time."""

import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sce.data.prepared import PreparedDataset
from tests.data.test_prepared import sequences_of, write


def test_what_is_loaded_while_it_is_being_replaced_belongs_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_one(item: int) -> None:
        sequences = sequences_of([[item] * 4], [item])
        write(tmp_path / "data", force=True, train=sequences, settings={"item": item})

    seconds = 2 if "SCE_ATTACK" not in os.environ else 60
    write_one(0)
    if not (child := os.fork()):
        with suppress(BaseException):
            for count in itertools.count(1):
                write_one(count % 3)
        os._exit(1)
    try:
        until, loads, seen = time.monotonic() + seconds, 0, set()
        while time.monotonic() < until:
            loaded = PreparedDataset.load(tmp_path / "data", verify=loads % 2 == 0)
            item = loaded.settings["item"]
            assert loaded.train.items.tolist() == [item] * 4
            assert loaded.train.users.tolist() == [item]
            seen.add(item)
            loads += 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with capsys.disabled():
        print(f"\nloaded while it was being replaced: {loads} cases", end=" ")
    assert seen == {0, 1, 2}
