from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sce.data.prepared import PreparedDataset, write_prepared
from sce.data.vocabulary import Vocabulary
from sce.recommend import Recommender
from sce.report.samples import DEPTH, Sample, draw_samples, show_samples
from tests.tiny_run import lay_out, make_dataset


class Descending:
    """Ranks the items by their number, the highest first, for everybody."""

    catalogue = torch.arange(100.0)[:, None]

    def __call__(self, histories: Tensor) -> Tensor:
        return torch.ones(*histories.shape, 1)


ITEMS = Vocabulary.from_integers(range(1000, 1100))


def dataset_of(path: Path, *sequences: list[int]) -> PreparedDataset:
    users = Vocabulary.from_strings(f"user {n}" for n in range(len(sequences)))
    test = lay_out(sequences, range(len(sequences)))
    empty = lay_out([[0]], [0])
    return write_prepared(
        path, train=empty, test=test, user_ids=users, item_ids=ITEMS, settings={}, counts={}
    )


def test_where_the_held_out_item_stands(tmp_path: Path) -> None:
    hit = [*range(20), 98]
    found, missed, repeated = [99, 1, 2, 89], [5, 6, 7], [99, 8, 99]
    dataset = dataset_of(tmp_path / "data", hit, found, missed, repeated)
    recommender = Recommender(Descending(), ITEMS)
    samples = draw_samples(recommender, dataset)
    assert [sample.user for sample in samples] == ["user 0", "user 1", "user 2", "user 3"]
    assert [sample.rank for sample in samples] == [2, 10, None, None]
    assert [sample.target for sample in samples] == [1098, 1089, 1007, 1099]
    assert [sample.events for sample in samples] == [20, 3, 2, 2]
    assert [sample.seen_before for sample in samples] == [False, False, False, True]
    assert samples[0].tail == [1015, 1016, 1017, 1018, 1019]
    assert samples[3].tail == [1099, 1008]
    page = show_samples(samples)
    for text in ("hit at rank 2", "found at rank 10", f"not in the first {DEPTH}", "had before"):
        assert page.count(text) == 1
    assert '<li class="hit"><span class="rank">2</span><span class="id">1098</span>' in page
    assert "Last 5 of 20 events" in page


def test_users_are_taken_at_equal_distances(tmp_path: Path) -> None:
    users = Vocabulary.from_integers(range(300))
    dataset = make_dataset(tmp_path / "data", ITEMS, users)
    samples = draw_samples(Recommender(Descending(), ITEMS), dataset, count=3)
    rows = [dataset.test.users.tolist().index(sample.user) for sample in samples]
    assert rows == [0, round((len(dataset.test) - 1) / 2), len(dataset.test) - 1]


def test_one_user_is_enough(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "data", [1, 2, 3])
    [sample] = draw_samples(Recommender(Descending(), ITEMS), dataset)
    assert isinstance(sample, Sample)
    assert "1 test user at" in show_samples([sample])
    assert np.all(np.diff(sample.best.scores) < 0)


def test_why_there_are_none() -> None:
    assert "because &lt;reasons&gt;" in show_samples("because <reasons>")
