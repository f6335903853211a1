import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.serving.catalogue import Source, known_of
from tests.serving.tiny_export import ITEM_IDS, listed, write_export
from tests.tiny_run import make_dataset


def test_a_catalogue_does_not_need_its_files_any_more(tmp_path: Path) -> None:
    path = write_export(tmp_path / "export", titles=listed(["x"] * 40))
    source = Source(path)
    catalogue = source.load()
    before = catalogue.similar(101, 5)
    for file in path.iterdir():
        os.truncate(file, 0)
    assert catalogue.similar(101, 5) == before
    assert catalogue.find("x", 1) == [{"item": 100, "title": "x"}]
    with pytest.raises(InputError, match="half-written or altered"):
        source.load()


def test_users_are_those_of_the_right_dataset(tmp_path: Path) -> None:
    people = Vocabulary.from_integers(range(6))
    dataset = make_dataset(tmp_path / "data", ITEM_IDS, people)
    path = write_export(tmp_path / "export")
    with pytest.raises(InputError, match=r"data is not the dataset that what is served.*--force"):
        Source(path, data=dataset.path).load()
    with pytest.raises(InputError, match="does not exist"):
        Source(path, data=tmp_path / "nowhere").load()
    write_export(path, dataset=dataset.content_hash)
    assert Source(path).load().users is None
    source = Source(path, data=dataset.path)
    users = source.load().users
    assert users is not None
    codes = dataset.histories(np.array([2, 4]))
    assert [one["history"] for one in known_of(users, [4, 99, "2"], times=False)] == [
        ITEM_IDS.decode(codes[1]),
        [],
        ITEM_IDS.decode(codes[0]),
    ]
    before = source.state()
    os.utime(dataset.path / "dataset.json", (1, 1))
    assert source.state() != before


def test_the_state_changes_with_any_file(tmp_path: Path) -> None:
    titles = tmp_path / "titles.csv"
    source = Source(write_export(tmp_path / "export"), (titles,))
    assert source.state()[1] is None
    titles.write_text("item_id,title\n101,x\n")
    states = [source.state()]
    assert states == [source.state()]
    titles.write_text("item_id,title\n101,xy\n")
    states.append(source.state())
    write_export(source.path, seed=1)
    states.append(source.state())
    assert len({*map(str, states)}) == 3


def test_of_a_run_its_weights_count(tmp_path: Path) -> None:
    source = Source(tmp_path)
    (tmp_path / "run.json").touch()
    assert source.state()[0] is None  # no epoch is complete
    (tmp_path / "best.safetensors").touch()
    before = source.state()
    (tmp_path / "metrics.jsonl").touch()
    assert source.state() == before
    (tmp_path / "best.safetensors").write_text("x")
    assert source.state()[0] not in (None, before[0])


def test_a_run_is_exported_by_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, exporter = tmp_path / "run", tmp_path / "exporter"
    run.mkdir()
    dataset = make_dataset(tmp_path / "data", ITEM_IDS, Vocabulary.from_integers([7, 8, 9]))
    trained = {"path": str(dataset.path), "content_hash": dataset.content_hash}
    (run / "run.json").write_text(json.dumps({"dataset": trained}))
    export = write_export(tmp_path / "export", dataset=dataset.content_hash)

    def exports(*lines: str) -> None:
        exporter.write_text("\n".join(["#!/bin/sh", f'echo "$@" > {tmp_path}/asked', *lines]))

    exports(f'cp -r {export} "$6"')
    exporter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(exporter))
    source = Source(run)
    assert source.is_run
    loaded = source.load()
    assert loaded.similar(101, 1)
    assert loaded.users is not None
    (known,) = known_of(loaded.users, [8], times=False)
    assert known == {"history": ITEM_IDS.decode(dataset.test[0]), "times": None}
    *asked, out = (tmp_path / "asked").read_text().split()
    assert asked == ["-m", "sce", "export", str(run), "--out"]
    assert not Path(out).parent.exists()
    (run / "run.json").write_text(json.dumps({"dataset": trained | {"content_hash": "other"}}))
    assert source.load().users is None  # another dataset lies there now
    exports("echo warning >&2; echo 'sce: error: no weights' >&2; exit 2")
    with pytest.raises(InputError, match=r"^no weights$"):
        source.load()
    (tmp_path / "asked").unlink()
    with pytest.raises(InputError, match="data is not the dataset that what is served"):
        Source(run, data=dataset.path).load()
    assert not (tmp_path / "asked").exists()  # nothing was exported in vain
