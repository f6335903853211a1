import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sce.data.prepared import PreparedDataset
from sce.data.synthetic import generate
from sce.errors import InputError
from sce.experiments.datasets import Synthetic, open_dataset, synthesize
from tests.cycle_data import make_cycle

MADE = Synthetic(items=400, users=30, mean_events=8, min_events=4, test_users=12)


def test_a_synthetic_dataset_is_the_log_left_one_out(tmp_path: Path) -> None:
    synthesize("made", MADE, tmp_path / "made")
    found = PreparedDataset.load(tmp_path / "made", verify=True)
    (block,) = generate(MADE)
    log = [block.items[block.users == user].tolist() for user in range(30)]
    assert found.n_items == 400  # whether they occur or not
    assert list(found.item_ids.decode(np.arange(400))) == list(range(400))
    assert [found.test[n].tolist() for n in range(len(found.test))] == log[:12]
    trained = [found.train[n].tolist() for n in range(len(found.train))]
    assert trained == [one[:-2] for one in log[:12]] + log[12:]


def test_without_test_users_and_with_all_of_them(tmp_path: Path) -> None:
    none = Synthetic(items=400, users=9, test_users=0)
    synthesize("a", none, tmp_path / "a")
    assert len(PreparedDataset.load(tmp_path / "a").test) == 0
    synthesize("b", Synthetic(items=400, users=9), tmp_path / "b")
    whole = PreparedDataset.load(tmp_path / "b")
    assert len(whole.test) == len(whole.train) == 9


def test_it_is_made_once(tmp_path: Path) -> None:
    first = synthesize("made", MADE, tmp_path / "made")
    before = (tmp_path / "made" / "train_items.npy").stat().st_mtime_ns
    again = synthesize("made", MADE, tmp_path / "made")
    assert again.content_hash == first.content_hash
    assert (tmp_path / "made" / "train_items.npy").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="was generated with"):
        synthesize("made", Synthetic(items=401, users=30), tmp_path / "made")


@pytest.mark.parametrize(
    "wrong",
    [{"items": 199}, {"users": 0}, {"test_users": 31}, {"min_events": 2}, {"mean_events": 3.0}],
)
def test_what_cannot_be_generated(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Synthetic(**(vars(MADE) | wrong))


def test_the_name_of_a_dataset(tmp_path: Path) -> None:
    made = make_cycle(tmp_path / "my data" / "cycle")
    assert open_dataset(str(made.path)).name == "cycle"
    named = open_dataset(f"ring={made.path}")
    assert (named.name, named.content_hash) == ("ring", made.content_hash)
    with pytest.raises(InputError, match="one word"):
        open_dataset(f"my ring={made.path}")
    with pytest.raises(InputError, match="does not exist"):
        open_dataset(str(tmp_path / "none"))


def test_polars_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['polars'] = None; from pathlib import Path;"
        "import sce.cli.sweep;"
        "from sce.experiments.datasets import Synthetic, synthesize;"
        f"synthesize('x', Synthetic(items=300, users=5), Path({str(tmp_path / 'x')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
