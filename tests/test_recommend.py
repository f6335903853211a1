import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sce import recommend
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.evaluation.evaluate import evaluate
from sce.models.sasrec import SASRec
from sce.recommend import Id, Recommended, Recommender, Request
from sce.training.checkpoint import write_tensors
from sce.training.run import Run
from sce.training.run_start import start_run
from tests.tiny_run import MODEL, make_dataset, make_run

NAMES = [f'"item", {n:02d}' for n in range(40)]  # csv must quote them
ITEMS = Vocabulary.from_strings(NAMES)
USERS = Vocabulary.from_integers(range(100, 130))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", ITEMS, USERS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, dataset: PreparedDataset) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", dataset, ended=True)


@pytest.fixture(scope="module")
def recommender(run: Run) -> Recommender:
    return Recommender.load(run.path, device="cpu")


@torch.no_grad()
def expected(history: list[int], k: int, keep_seen: bool = False) -> list[tuple[str, float]]:
    """One user at a time, every item scored and sorted."""
    model = SASRec(len(NAMES), MODEL, seed=1).eval()
    state = model(torch.tensor([history[-MODEL.max_length :]]))[0, -1]
    scores = (model.catalogue @ state).tolist()
    left = [n for n in range(len(NAMES)) if keep_seen or n not in history]
    left.sort(key=lambda n: (-scores[n], n))
    return [(NAMES[n], scores[n]) for n in left[:k]]


def assert_same(found: Recommended, wanted: list[tuple[str, float]]) -> None:
    assert found.items == [item for item, _ in wanted]
    np.testing.assert_allclose(found.scores, [score for _, score in wanted], rtol=1e-4, atol=1e-5)
    assert found.ranks.tolist() == list(range(1, len(wanted) + 1))


def test_in_a_notebook_they_are_short(recommender: Recommender) -> None:
    assert repr(recommender) == "Recommender(SASRec, 40 items, on cpu)"
    found = recommender.recommend([NAMES[:2]] * 50, k=4)
    first = ", ".join(map(repr, found[0].items[:3]))
    assert repr(found[0]) == f"Recommended(4 items: {first} ...)"
    assert repr(found).splitlines() == [
        "Recommendations for 50 users", *[f"  {found[0]}"] * 3, "  ...",
    ]  # fmt: skip
    (few,) = recommender.recommend([NAMES[:2]], k=1)
    assert repr(few) == f"Recommended(1 item: {few.items[0]!r})"
    (none,) = recommender.recommend([NAMES[:2]], k=1, allow=NAMES[:1])
    assert repr(none) == "Recommended(0 items)"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=12), max_size=20),
    st.integers(1, len(NAMES)),
    st.booleans(),
    st.integers(1, 7),
)
def test_as_one_user_at_a_time(
    recommender: Recommender, histories: list[list[int]], k: int, keep_seen: bool, batch_size: int
) -> None:
    named = [[NAMES[n] for n in history] for history in histories]
    found = recommender.recommend(named, k, keep_seen=keep_seen, batch_size=batch_size)
    assert len(found) == len(histories)
    for one, history in zip(found, histories, strict=True):
        assert_same(one, expected(history, k, keep_seen))
        assert one.known == len(history)
        assert one.unknown == ()


def test_all_that_was_seen_is_left_out_also_what_the_model_does_not_read(
    recommender: Recommender,
) -> None:
    history = NAMES[:20]  # the model reads the last six
    [found] = recommender.recommend([history], k=40)
    assert sorted(found.items) == NAMES[20:]
    [kept] = recommender.recommend([history], k=40, keep_seen=True)
    assert sorted(kept.items) == NAMES


def test_unknown_items_are_skipped_and_named(recommender: Recommender) -> None:
    given: list[Id] = ["plum", NAMES[3], 7, NAMES[5], "plum"]
    found, nothing, empty = recommender.recommend([given, ["plum", "pear"], []], k=3)
    assert_same(found, expected([3, 5], 3))
    assert found.known == 2
    assert found.unknown == ("plum", 7, "plum")
    assert (nothing.known, nothing.unknown) == (0, ("plum", "pear"))
    assert (empty.known, empty.unknown) == (0, ())


def test_who_has_no_known_item_gets_the_popular_ones(
    recommender: Recommender, dataset: PreparedDataset
) -> None:
    counts = np.bincount(dataset.train.items, minlength=len(NAMES)).tolist()
    best = sorted(range(len(NAMES)), key=lambda n: (-counts[n], n))[:4]
    with pytest.warns(UserWarning, match="most popular items are recommended for 2 of 3 users"):
        *others, found = recommender.recommend([["plum"], [], NAMES[:1]], k=4)
    for one in others:
        assert one.items == [NAMES[n] for n in best]
        assert one.scores.tolist() == [counts[n] for n in best]
        assert one.source == "popular"
    assert found.source == "model"
    allowed = NAMES[10:20]
    best = [n for n in sorted(range(10, 20), key=lambda n: (-counts[n], n)) if n not in (11, 12)]
    wishes = Request([], k=3, allow=[*allowed, NAMES[30]], block=[NAMES[11]])
    [found] = recommender.stream([wishes], 9, allow=allowed, block=[NAMES[12]])
    assert found.items == [NAMES[n] for n in best[:3]]
    [found] = recommender.stream([[]], 9, allow=allowed, block=[NAMES[12], NAMES[11]])
    assert found.items == [NAMES[n] for n in best]
    nobody = replace(recommender, popularity=None)
    with pytest.warns(UserWarning, match="nothing is recommended for 1 of 1 user"):
        [nothing] = nobody.recommend([["plum"]], k=4)
    assert len(nothing.scores) == len(nothing.ranks) == len(nothing) == 0
    of_log = dict(nobody.stream_users(dataset, [100, 99], k=4))
    assert [*map(len, of_log.values())] == [4, 0]


def test_titles_stand_beside_the_items(recommender: Recommender) -> None:
    texts = [name.upper() if n % 2 else "" for n, name in enumerate(NAMES)]
    titles = Vocabulary.from_sorted_text("".join(texts).encode(), np.array([*map(len, texts)]))
    named = replace(recommender, titles=titles)
    both = named.recommend([NAMES[:3], NAMES[4:6]], k=9)
    for one in both:
        assert one.titles == [texts[NAMES.index(str(item))] or item for item in one.items]
    assert both.to_frame()["title"].to_list() == [
        title for one in both for title in one.titles or ()
    ]
    assert recommender.recommend([NAMES[:3]])[0].titles is None


def test_numbers_may_come_as_text_and_arrays(dataset: PreparedDataset, tmp_path: Path) -> None:
    items = Vocabulary.from_integers(range(50, 90))
    model = SASRec(40, MODEL, seed=1)
    recommender = Recommender(model, items)
    given: list[Any] = [[51, 52], ["51", "52"], np.array([51, 52]), (np.int32(51), np.int64(52))]
    found = recommender.recommend(given, k=5)
    assert {tuple(one.items) for one in found} == {tuple(found[0].items)}
    assert {type(item) for one in found for item in one.items} == {int}
    assert not model.training


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ([["a"], [1.5]], r"history 1 .*1\.5 \(float\)"),
        ([["a", None]], "NoneType"),
        ([[True]], "bool"),
        (["item 01"], "must be a list of ids; got 'item 01'"),
        ([3], "must be a list of ids; got 3"),
    ],
)
def test_what_is_no_history_is_refused(
    recommender: Recommender, histories: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        recommender.recommend(histories)


@pytest.mark.parametrize("k", [41, 0, -1])
def test_k_must_fit_the_catalogue(
    recommender: Recommender, dataset: PreparedDataset, k: int
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: recommender.recommend([], k),
        lambda: recommender.stream([], k),  # at once, not at the first result
        lambda: recommender.stream_users(dataset, k=k),
    ]
    for call in calls:
        with pytest.raises(InputError, match="k is 41.* only 40 items" if k > 0 else "at least 1"):
            call()


def test_a_batch_needs_a_history(recommender: Recommender) -> None:
    with pytest.raises(InputError, match="batch_size"):
        recommender.recommend([NAMES[:2]], batch_size=0)


# --- users of the dataset


def whole_history(dataset: PreparedDataset, code: int) -> list[int]:
    for sequences in (dataset.test, dataset.train):
        if code in sequences.users:
            return list(map(int, sequences[sequences.users.tolist().index(code)]))
    raise AssertionError


def test_one_alone_and_in_a_batch_get_the_same_bits() -> None:
    ids, model = Vocabulary.from_integers(range(2000)), SASRec(2000, dim=48, max_length=20)
    generator = np.random.default_rng(0)
    histories = [generator.integers(2000, size=n % 30 + 1) for n in range(90)]
    found = [
        Recommender(model, ids).recommend(histories, k=20, batch_size=size) for size in (90, 7, 1)
    ]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one.items == two.items
            assert one.scores.tobytes() == two.scores.tobytes()


@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_every_user_after_all_that_is_known(
    recommender: Recommender, dataset: PreparedDataset, batch_size: int
) -> None:
    found = dict(recommender.stream_users(dataset, k=7, batch_size=batch_size))
    assert list(found) == USERS.decode(range(len(USERS)))
    for code, one in enumerate(found.values()):
        history = whole_history(dataset, code)
        assert_same(one, expected(history, 7))
        assert one.known == len(history)


def test_some_users_in_their_order(recommender: Recommender, dataset: PreparedDataset) -> None:
    chosen: list[Id] = [129, 5, "101", 100]
    found = dict(recommender.stream_users(dataset, chosen, k=4, keep_seen=True))
    assert list(found) == chosen
    assert_same(found["101"], expected(whole_history(dataset, 1), 4, keep_seen=True))
    assert found[5].items == []
    assert found[5].known == 0


def test_another_dataset_is_refused(recommender: Recommender, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", ITEMS, Vocabulary.from_integers(range(30)))
    with pytest.raises(InputError, match="other is not the dataset that the run was trained on"):
        dict(recommender.stream_users(other))


# --- memory


class Ranks:
    """A model that remembers how many histories it was given at once."""

    max_length = 4
    catalogue = torch.eye(40)[:, :3]

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, histories: Tensor) -> Tensor:
        self.largest = max(self.largest, len(histories))
        return torch.ones(*histories.shape, 3)


def test_histories_are_taken_as_they_are_needed() -> None:
    model, taken = Ranks(), 0

    def histories() -> Any:
        nonlocal taken
        for n in range(10**9):  # a list of them would never end
            taken += 1
            yield [NAMES[n % 40]] * (n % 5)

    stream = Recommender(model, ITEMS).stream(histories(), k=2, batch_size=10)
    for _ in range(200):
        next(stream)
    assert model.largest <= 4096 / 4  # positions at once, of four events each
    assert taken <= 200 + 10 * recommend.BATCHES_TOGETHER


@pytest.mark.parametrize(("seconds", "batches"), [(1.0, [1, 8, 8, 3]), (2.0, [1] * 20)])
def test_slow_batches_come_one_at_a_time(
    seconds: float, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed can be kept after each then; quick ones are put together by length."""
    clock = 0.0
    monkeypatch.setattr(recommend, "monotonic", lambda: clock)
    sizes = []
    for window in recommend._windows(range(60), batch_size=3):
        sizes.append(len(window) // 3)
        clock += seconds * sizes[-1]
    assert sizes == batches


# --- loading


def test_the_model_and_the_ids_must_fit() -> None:
    with pytest.raises(InputError, match="ranks 40 items, but there are 3 item ids"):
        Recommender(SASRec(40, MODEL), Vocabulary.from_strings("abc"))


def test_loading_takes_an_open_run_too(run: Run) -> None:
    assert Recommender.load(run).n_items == 40


class OwnModel(nn.Module):
    def __init__(self, items: int = len(NAMES), dim: int = 4) -> None:
        super().__init__()
        self.catalogue = nn.Parameter(torch.randn(items, dim))

    def forward(self, histories: Tensor) -> Tensor:
        return self.catalogue[histories.clamp(min=0)]


@pytest.fixture
def own_run(dataset: PreparedDataset, tmp_path: Path) -> tuple[Run, OwnModel]:
    model = OwnModel()
    config: dict[str, Any] = {"model": {}, "loss": {"name": "mine"}}
    run = start_run(tmp_path / "own", dataset, config=config, derived={}, model="mine.OwnModel")
    write_tensors(run.best_weights, model.state_dict(), {"run": run.identity})
    return run, model


def test_a_model_of_ones_own_is_given_its_weights(
    own_run: tuple[Run, OwnModel], dataset: PreparedDataset
) -> None:
    run, trained = own_run
    given = OwnModel()
    recommender = Recommender.load(run, "cpu", model=given)
    assert recommender.model is given
    assert torch.equal(given.catalogue, trained.catalogue)
    assert not given.training
    scores = (trained.catalogue @ trained.catalogue[3]).detach()
    scores[3] = -torch.inf
    (found,) = recommender.recommend([[NAMES[3]]], k=5)
    assert found.items == [NAMES[i] for i in scores.topk(5).indices]
    assert evaluate(given, dataset).users == len(dataset.test)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OwnModel(dim=5), r"(?s)not as it was trained in .* catalogue: .*\[40, 4\].*\[40, 5\]"),
        (nn.Linear(2, 2), "has a `catalogue` of item vectors; got Linear"),
        (OwnModel, "has a `catalogue` of item vectors; got <class"),
        (None, r"mine.OwnModel, .*Recommender.load\('.*own', model=OwnModel\(...\)\)"),
    ],
)
def test_a_model_of_ones_own_must_be_the_one_that_was_trained(
    own_run: tuple[Run, OwnModel], model: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Recommender.load(own_run[0], "cpu", model=model)


def test_a_model_of_ones_own_without_weights_or_with_altered_ones(
    own_run: tuple[Run, OwnModel],
) -> None:
    run, model = own_run
    run.best_weights.write_bytes(run.best_weights.read_bytes()[:-3])
    with pytest.raises(InputError, match="half-written or altered"):
        Recommender.load(run, "cpu", model=model)
    run.best_weights.unlink()
    with pytest.raises(InputError, match="has no weights yet"):
        Recommender.load(run, "cpu", model=model)


def test_a_run_that_is_missing_young_or_altered(dataset: PreparedDataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        Recommender.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no weights yet"):
        Recommender.load(make_run(tmp_path / "young", dataset, weights=False))
    made = make_run(tmp_path / "altered", dataset)
    name = sorted(json.loads((made.path / "run.json").read_text())["files"])[0]
    with (made.path / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="altered"):
        Recommender.load(made.path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_recommends_the_same(
    run: Run, recommender: Recommender, dataset: PreparedDataset
) -> None:
    on_gpu = dict(Recommender.load(run, device="cuda").stream_users(dataset, k=7, batch_size=4))
    on_cpu = dict(recommender.stream_users(dataset, k=7))
    assert list(on_gpu) == list(on_cpu)
    for one, other in zip(on_gpu.values(), on_cpu.values(), strict=True):
        assert one.items == other.items
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(run: Run) -> None:
    with pytest.raises(InputError, match="cuda was asked for"):
        Recommender.load(run, device="cuda")


def test_every_user_of_more_than_are_decoded_at_once(
    recommender: Recommender, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend, "_IDS_AT_ONCE", 7)
    found = [user for user, _ in recommender.stream_users(dataset, k=1)]
    assert found == USERS.decode(range(len(USERS)))
