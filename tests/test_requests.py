import warnings
from typing import Any

import numpy as np
import pytest
import torch

from sce.data.vocabulary import Vocabulary
from sce.errors import InputError, InputWarning
from sce.models.sasrec import SASRec
from sce.recommend import Id, Recommender, Request
from tests.tiny_run import MODEL

NAMES = [f"item {n:02d}" for n in range(40)]


@pytest.fixture(scope="module")
def recommender() -> Recommender:
    return Recommender(SASRec(40, MODEL, seed=1), Vocabulary.from_strings(NAMES))


def left(recommender: Recommender, history: list[str], *without: str) -> list[Any]:
    [found] = recommender.recommend([history], k=40)
    return [item for item in found.items if item not in without]


@pytest.mark.parametrize("kind", [list, set, tuple, np.array, iter])
def test_only_what_is_allowed_and_not_blocked(recommender: Recommender, kind: Any) -> None:
    history = NAMES[:2]
    allow, block = kind(NAMES[1:9] * 2), kind([NAMES[3]])
    [found] = recommender.recommend([history], k=40, allow=allow, block=block)
    assert found.items == left(recommender, history, NAMES[3], *NAMES[9:])
    assert found.asked == 40


def test_nothing_is_allowed_or_everything_is_blocked(recommender: Recommender) -> None:
    every: list[dict[str, list[Id]]] = [{"allow": []}, {"block": [*NAMES]}, {"allow": [*NAMES[:2]]}]
    for options in every:
        [found] = recommender.recommend(
            [NAMES[:2]], allow=options.get("allow"), block=options.get("block")
        )
        assert (found.items, len(found.scores), found.known) == ([], 0, 2)


def test_unknown_ids_are_skipped_with_a_warning_but_not_all(recommender: Recommender) -> None:
    given: list[Id] = [NAMES[5], "plum", "pear", 7, "fig"]
    with pytest.warns(
        InputWarning, match=r"skipped 4 of 5 items of allow, .* \(plum, pear, 7 \.{3}"
    ):
        [found] = recommender.recommend([NAMES[:2]], allow=given)
    assert found.items == [NAMES[5]]
    with pytest.warns(InputWarning, match="skipped 1 of 1 item of block"):
        assert len(recommender.recommend([NAMES[:2]], block=["plum"])[0]) == 10
    with pytest.raises(InputError, match="none of 2 items of allow is in the catalogue"):
        recommender.recommend([NAMES[:2]], allow=["plum", "pear"])


def test_requests_have_wishes_of_their_own(recommender: Recommender) -> None:
    history = NAMES[:2]
    requests: list[Any] = [
        history,
        Request(history, k=2),
        Request(history, k=40, keep_seen=True),
        Request(history, k=40, allow=[NAMES[1], NAMES[4], NAMES[7], "plum"], block=["pear"]),
        Request(history, k=40, allow=[NAMES[30]]),
        Request(history, k=40, block={NAMES[4]}),
        Request(history, allow=[]),
        Request([]),
    ]
    among: dict[str, Any] = {"allow": NAMES[:20], "block": [NAMES[7]]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = recommender.recommend(requests, k=5, **among)
    every = left(recommender, history, NAMES[7], *NAMES[20:])
    assert [one.items for one in found[:2]] == [every[:5], every[:2]]
    assert set(found[2].items) == {*NAMES[:20]} - {NAMES[7]}
    assert found[3].items == [NAMES[4]]
    assert found[3].unlisted == ("plum", "pear")
    assert found[5].items == [item for item in every if item != NAMES[4]]
    assert [len(found[n]) for n in (4, 6, 7)] == [0, 0, 0]
    assert [one.asked for one in found] == [5, 2, 40, 40, 40, 40, 5, 5]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(NAMES[:1], k=41), "only 40 items"),
        (Request(NAMES[:1], k=0), "k must be at least 1"),
        (Request(NAMES[:1], k=True), "k must be a whole number"),
        (Request(NAMES[:1], keep_seen=1), "keep_seen must be True or False"),  # type: ignore[arg-type]
        (Request(NAMES[:1], allow="ab"), r"history 1 \(.*: allow must be a list of ids; got 'ab'"),
        (Request(NAMES[:1], block=[1.5]), r"history 1 .*: block: .*got 1\.5"),  # type: ignore[list-item]
    ],
)
def test_what_is_no_request(recommender: Recommender, request_: Request, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recommender.recommend([NAMES[:1], request_])


def test_similar_items(recommender: Recommender) -> None:
    vectors = recommender.model.catalogue.detach()
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    for options, out in (
        ({}, []),
        ({"allow": NAMES[:9]}, NAMES[9:]),
        ({"block": NAMES[5:]}, NAMES[5:]),
    ):
        found = recommender.similar([NAMES[3], NAMES[4]], k=6, **options)
        for code, one in zip((3, 4), found, strict=True):
            cosines = unit @ unit[code]
            cosines[[NAMES.index(item) for item in {*out, NAMES[code]}]] = -torch.inf
            best = cosines.topk(min(6, 39 - len({*out} - {NAMES[code]})))
            assert one.items == [NAMES[n] for n in best.indices]
            np.testing.assert_allclose(one.scores, best.values, rtol=1e-5)
    frame = recommender.similar([NAMES[3]], k=2).to_frame()
    assert frame.columns == ["item_id", "similar_id", "score", "rank"]
    assert frame["item_id"].to_list() == [NAMES[3]] * 2


def test_similar_to_an_item_that_is_not_there(recommender: Recommender) -> None:
    with pytest.raises(InputError, match=r"no item 'itm 07' .*closest are item 07, "):
        recommender.similar(["itm 07"])
    with pytest.raises(InputError, match="must be a list of ids"):
        recommender.similar("item 07")


def test_what_a_request_allows_may_be_blocked_for_all(recommender: Recommender) -> None:
    allowed = Request(NAMES[:1], allow=NAMES[5:9])
    [found] = recommender.recommend([allowed], block=[NAMES[6]])
    assert sorted(found.items) == [NAMES[5], NAMES[7], NAMES[8]]


def test_similar_items_of_more_than_a_batch(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [recommender.similar([name], k=3)[0].items for name in NAMES[:5]]
    monkeypatch.setattr("sce.recommend.BATCH_SIZE", 2)
    assert [one.items for one in recommender.similar(NAMES[:5], k=3)] == alone
