"""Records that were edited and given a right checksum: one sentence, or an answer."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sce.data.storage import CHECKSUM, json_checksum
from sce.errors import InputError
from tests.attack.test_bit_flips import Capture, commanded
from tests.cycle_data import TINY_SWEEP, make_cycle, train

pytestmark = pytest.mark.timeout(3600)

SWEEP = ["sweep", "tiny.toml", "--data", "data", "--out", "sweep"]
MISSING = "missing"
VALUES: list[Any] = [
    None,
    [1],
    {},
    10**400,
    -1,
    float("nan"),
    float("inf"),
    "\x1b[31m",
    "",
    0,
    1.5,
    10**12,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a dataset, a run and a sweep file."""
    made = tmp_path_factory.mktemp("forged")
    train(make_cycle(made / "data"), out=made / "run")
    (made / "tiny.toml").write_text(TINY_SWEEP)
    return made


def paths(content: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all members, at any depth."""
    pairs = enumerate(content) if isinstance(content, list) else content.items()
    for key, value in pairs:
        if key != CHECKSUM:
            yield (*above, key)
        if isinstance(value, dict | list):
            yield from paths(value, (*above, key))


def replaced(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> str:
    """The record with one member replaced, or without it, and its checksum."""
    forged = copy.deepcopy(content)
    inner = forged
    for key in path[:-1]:
        inner = inner[key]
    if value == MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    forged.pop(CHECKSUM)
    return json.dumps(forged | {CHECKSUM: json_checksum(forged)}, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    ("file", "command", "default"),
    [
        ("data/dataset.json", ["plan", "--data", "data", "--memory", "1GB"], 20),
        ("run/run.json", ["evaluate", "run"], 20),
        ("run/result.json", ["report", "run"], 3),
        ("run/metrics.jsonl", ["report", "run"], 3),
        ("run/metrics.jsonl", ["compare", "run"], 2),
        ("sweep/rows.jsonl", [*SWEEP, "--dry-run"], 20),
        ("sweep/rows.jsonl", ["compare", "sweep"], 3),
    ],
    ids=lambda one: one if isinstance(one, str) else one[0] if isinstance(one, list) else "",
)
def test_a_forged_record(
    file: str,
    command: list[str],
    default: int,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(place)
    if not Path(file).exists():
        commanded(capsys, SWEEP)
    whole = Path(file).read_text()
    first = json.loads(whole if file.endswith(".json") else whole.partition("\n")[0])
    rest = "" if file.endswith(".json") else whole.partition("\n")[2]
    every = [(path, value) for path in paths(first) for value in (*VALUES, MISSING)]
    chosen = random.Random(0).sample(every, int(os.environ.get("SCE_ATTACK", default)))
    refused = 0
    for path, value in chosen:
        Path(file).write_text(replaced(first, path, value) + rest)
        try:
            commanded(capsys, command)
        except InputError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{path} is {value!r}") from error
    Path(file).write_text(whole)
    with capsys.disabled():
        print(f"\n{file} forged: {len(chosen)} cases, {refused} refused", end=" ")
    assert refused > 0 or default < 9


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_files_that_are_none(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(place)
    files = ["data/dataset.json", "data/train_items.npy", "run/run.json", "run/items_values.npy"]
    for file in map(Path, [*files, "run/best.safetensors"]):
        kept = file.rename(place / "kept")
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        else:
            file.mkdir()
        with pytest.raises(InputError, match=r"is not a|cannot be read|half-written"):
            commanded(capsys, ["evaluate", "run"])
        file.rmdir() if kind == "directory" else file.unlink()
        kept.rename(file)
