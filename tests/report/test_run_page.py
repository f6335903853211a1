import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sce.data.prepared import write_prepared
from sce.data.vocabulary import Vocabulary
from sce.errors import InputError
from sce.recommend import Recommender, Request
from sce.report.record import Sample, draw_samples
from sce.report.run_page import make_page
from sce.training.run import Run
from sce.training.run_start import note_divergence
from tests.tiny_run import lay_out, make_dataset, make_run, metrics, write_epochs, write_result

EVIL = "</script><script>alert('pwned')</script><img src=x onerror=alert(1)>"
ITEMS = Vocabulary.from_strings([EVIL, '"&<>', *(f"item {n}" for n in range(38))])
USERS = Vocabulary.from_strings([f"<b>{n:02d}</b>" for n in range(12)])


class Outline(HTMLParser):
    """What a page is made of; an element that is not closed in its place is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        if not {"script", "style"} & set(self._open):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, USERS))


def finished(run: Run, **changes: Any) -> Outline:
    write_epochs(run)
    write_result(run, **changes)
    return Outline(make_page(run))


def test_a_finished_run_has_everything(run: Run) -> None:
    page = finished(run, users={"validation": 300, "test": 1509})
    assert "of 40 items; measured on 1,509 test users; the weights" in page.words
    assert page.words.startswith("run: a training run of sce Training run run 0.1423 test NDCG@10")
    assert "3.1× popularity (0.0459)" in page.words
    assert "trained with SCE on a catalogue of 40 items" in page.words
    assert "epoch 3 of 4; training stopped because validation no longer improved." in page.words
    assert page.headings == [
        "Learning",
        "Training loss",
        "Validation NDCG@10",
        "Quality",
        "NDCG@k on test events",
        "COV@k on test events",
        "Memory and time",
        "Time per epoch",
        "Training speed",
        "Buckets",
        "States picked once",
        "Correct items in their buckets",
        "Sample recommendations",
        "Settings and data",
    ]
    assert page.tags.count("svg") == 8
    for text in ("451 MiB", "302 MiB", "7.5 s", "1.25 s", "361,000", "best: 0.0600 at epoch 3"):
        assert text in page.words
    assert "not ended" not in page.words


def test_what_was_carried_over_is_told(run: Run) -> None:
    write_epochs(run, 2)
    start = {"run": "runs/old", "identity": "x", "epoch": 7, "optimizer": "carried over"}
    start |= {"carried": 38, "new": 2, "from_neighbours": 1, "unseen": 5}
    page = Outline(make_page(replace(run, config=run.config | {"start": start}))).words
    assert "going on from runs/old (epoch 7): 38 items carried over (5 of them without" in page
    assert "an event to train on), 2 new (1 from the mean of known items near them, 1" in page
    assert "from that of all); optimizer state" in page
    assert "start.unseen 5" in page


def test_the_metrics_stand_beside_popularity(run: Run) -> None:
    page = finished(run)
    model, popular = metrics(0.1423), metrics(0.0459)
    row = "10 " + " ".join(
        f"{model[f'{name}@10']:.4f} {popular[f'{name}@10']:.4f}"
        for name in ("ndcg", "hr", "mrr", "cov")
    )
    assert row in page.words
    assert page.words.count("k NDCG HR MRR COV model popularity") == 2  # test, and validation


def test_popular_and_rare_targets_are_told_apart_where_they_were_measured(run: Run) -> None:
    assert "rare targets" not in finished(run).words  # of an older sce
    parts = {"popular": {"users": 1200, **metrics(0.2)}, "rare": {"users": 309, **metrics(0.1)}}
    page = finished(run, by_popularity={"validation": {}, "test": parts | {"rare": {"users": 0}}})
    assert "targets users NDCG@10 HR@10 MRR@10 popular 1,200 0.2000" in page.words
    assert "rare 0 – – –" in page.words


def test_settings_and_dataset(run: Run) -> None:
    words = finished(run).words
    assert "model.dim 8" in words
    assert "loss.name sce" in words
    assert f"Trained on {run.dataset.path} , content {run.dataset.content_hash[:12]}" in words
    assert "a catalogue of 40 items; split leave-one-out." in words
    assert "step users items interactions density read 12 40" in words
    assert "setting value model.name sasrec model.dim 8" in words


def test_every_column_of_every_table_has_a_heading(run: Run) -> None:
    finished(run)
    page = make_page(run)
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    assert len(tables) == 5
    for table in tables:
        parts = re.search(r"<thead>(.*)</thead>\s*<tbody><tr.*?>(.*?)</tr>", table, re.DOTALL)
        assert parts is not None
        head, body = parts.groups()
        assert not re.search(r"<th[^>]*></th>", head)
        single = re.sub(r"<th[^>]*colspan[^>]*>.*?</th>", "", head)
        assert single.count("<th") == len(re.findall(r"<t[hd]", body))


def test_ids_are_shown_and_never_executed(run: Run) -> None:
    write_epochs(run)
    page = make_page(run)
    outline = Outline(page)
    assert EVIL in outline.words
    assert "<b>01</b>" in outline.words
    assert outline.tags.count("script") == 0
    assert "img" not in outline.tags
    assert "<img" not in page


def test_nothing_comes_from_elsewhere(run: Run) -> None:
    write_epochs(run)
    page = make_page(run)
    outline = Outline(page)
    assert outline.addresses == []
    assert not {"link", "iframe", "object", "embed", "base", "form"} & set(outline.tags)
    assert "default-src 'none'" in page
    # The name of a format, not a place: nothing is fetched from it.
    known = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= known
    assert "url(" not in page
    assert "@import" not in page


@pytest.mark.parametrize("loss", ["ce", "gbce", "ce-"])
def test_a_run_without_buckets_has_no_bucket_figures(tmp_path: Path, loss: str) -> None:
    run = make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, USERS), loss=loss)
    write_epochs(run, buckets=None)
    write_result(run)
    page = Outline(make_page(run))
    assert "Buckets" not in page.headings
    assert page.tags.count("svg") == 6
    assert {"ce": "CE", "gbce": "gBCE", "ce-": "CE⁻"}[loss] in page.words


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", ITEMS, USERS)
    run = make_run(tmp_path / "young", dataset, weights=False)
    page = Outline(make_page(run))
    assert "No evaluation yet" in page.words
    assert "has not ended: it is still going, or it was interrupted (no epoch" in page.words
    assert "There are no recommendations to show" in page.words
    assert "no weights yet" in page.words
    assert page.tags.count("svg") == 0
    assert "model.dim 8" in page.words


def test_a_run_that_diverged(run: Run) -> None:
    write_epochs(run, count=2)
    note_divergence(run, epoch=3, step=7)
    page = Outline(make_page(run))
    assert "diverged at step 7 of epoch 3: try a lower" in page.words
    assert "has not ended" not in page.words
    write_result(run)  # it was resumed, and got over it
    assert "diverged at" not in Outline(make_page(run)).words


def test_a_run_under_way(run: Run) -> None:
    write_epochs(run, count=2)
    with run.metrics_file.open("a") as file:
        file.write('{"epoch": 3, "lo')  # being written
    page = Outline(make_page(run))
    assert "(2 epochs complete)" in page.words
    assert "0.0200 validation NDCG@10" in page.words
    assert "test NDCG" not in page.words
    assert "popularity" not in page.words
    assert page.tags.count("svg") == 8


def test_a_run_without_evaluations(run: Run) -> None:
    write_epochs(run, validation=None, best=False)
    page = Outline(make_page(run))
    assert "No evaluation yet" in page.words
    assert "Quality" not in page.headings
    assert "Training loss" in page.headings


def test_not_every_epoch_need_be_evaluated(run: Run) -> None:
    records = write_epochs(run, count=6)
    for record in records[::2]:
        record |= {"validation": None, "best": False}
        record["seconds"] |= {"evaluation": 0.0}
        record["memory_mib"] |= {"evaluation": None}
    run.write_metrics(records)
    page = Outline(make_page(run))
    assert "best: 0.0800 at epoch 4" in page.words
    assert page.tags.count("svg") == 8


def test_a_dataset_without_test_users(tmp_path: Path) -> None:
    nobody = write_prepared(
        tmp_path / "data",
        train=lay_out([[0, 1], [2, 3]], [0, 1]),
        test=lay_out([], []),
        user_ids=Vocabulary.from_strings("ab"),
        item_ids=ITEMS,
        settings={},
        counts={},
    )
    page = Outline(make_page(make_run(tmp_path / "run", nobody)))
    assert "no test users" in page.words


def test_samples_show_titles(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, USERS))
    dataset = run.load_dataset()
    texts = [f"<b>Title {n}" if n else "" for n in range(dataset.n_items)]
    titles = Vocabulary.from_sorted_text("".join(texts).encode(), np.array([*map(len, texts)]))
    recommender = Recommender.load(run, "cpu")
    plain, _ = draw_samples(recommender, dataset)
    named, _ = draw_samples(replace(recommender, titles=titles), dataset)
    for one, other in zip(plain, named, strict=True):
        assert (one.items, one.target) == (other.items, other.target)
        for item in (*one.items, *one.history, one.target):
            code = int(dataset.item_ids.lookup([item])[0])
            assert one.title(item) == str(item)
            assert other.title(item) == (texts[code] or str(item))
    page = make_page(run, titles=titles)
    assert page.count("&lt;b&gt;Title ") > 10
    assert "<b>Title" not in page


def test_worse_than_popularity_is_not_hidden(run: Run) -> None:
    write_epochs(run)
    write_result(run, test=metrics(0.02))
    assert '<span class="factor worse">0.436× popularity (0.0459)</span>' in make_page(run)


def test_few_users_cannot_tell_from_popularity(run: Run) -> None:
    words = finished(run, users={"test": 100}).words
    assert "too few users to tell from popularity (0.0459)" in words
    assert "×" not in words.partition("trained with")[0]


def test_popularity_may_be_unknown(run: Run) -> None:
    page = finished(run, popularity=None)
    assert "0.1423 test NDCG@10 SASRec" in page.words
    assert "k NDCG HR MRR COV model model" in page.words


def test_the_dataset_may_be_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, USERS))
    (tmp_path / "data").rename(tmp_path / "moved")
    page = finished(run)
    assert page.words.count("which is not there; if the dataset was moved") == 2
    assert page.tags.count("svg") == 8
    there = Outline(make_page(run, data=tmp_path / "moved"))
    assert "12 40" in there.words
    make_dataset(tmp_path / "other", ITEMS, Vocabulary.from_strings("abcdefg"))
    with pytest.raises(InputError, match="is not the dataset that"):
        make_page(run, data=tmp_path / "other")


def test_another_dataset_in_its_place_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, USERS))
    (tmp_path / "data").rename(tmp_path / "moved")
    make_dataset(tmp_path / "data", ITEMS, Vocabulary.from_strings("abcdefg"))
    assert "is not the dataset that" in Outline(make_page(run)).words


def test_numbers_that_are_none(run: Run) -> None:
    write_epochs(run, memory_mib={"training": None}, tokens_per_second=None, seconds=None)
    write_result(run, memory_mib=None, tokens_per_second=None, seconds=None, device=None)
    page = Outline(make_page(run))
    assert "Memory and time" not in page.headings
    assert "nan" not in page.words.lower().split()


def test_samples_are_hits_and_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_dataset(tmp_path / "data", ITEMS, 90))
    page = make_page(run)
    assert re.search(r"Of 60 test users at equal distances, \d+ had what came next among", page)
    assert page.count('class="verdict hit"') == page.count('class="verdict"') == 3


def test_samples_have_hits_however_late_they_come(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", ITEMS, 90)
    targets = [str(dataset.item_ids[int(dataset.test[row][-1])]) for row in range(60)]
    found = [
        SimpleNamespace(items=[one], scores=np.zeros(1)) for one in 56 * ["none"] + targets[56:]
    ]
    made: Any = SimpleNamespace(
        n_items=len(ITEMS), titles=None, model=None, recommend=lambda *_, k: found
    )
    samples, told = draw_samples(made, dataset)
    assert [one.is_hit for one in samples] == 3 * [True] + 3 * [False]
    assert "Of 60 test users at equal distances, 4 had what came next" in told


def test_samples_are_asked_for_with_times_where_the_model_uses_them(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", ITEMS, USERS)
    test = replace(dataset.test, times=np.arange(len(dataset.test.items), dtype=np.int32))
    asked: list[Request] = []

    def recommend(given: list[Request], k: int) -> list[Any]:
        asked[:] = given
        return [SimpleNamespace(items=["none"], scores=np.zeros(1)) for _ in given]

    for uses in (False, True):
        model = SimpleNamespace(uses_times=uses)
        made: Any = SimpleNamespace(n_items=9, titles=None, model=model, recommend=recommend)
        draw_samples(made, replace(dataset, test=test))
        for row, one in enumerate(asked):
            times = range(test.offsets[row], test.offsets[row + 1] - 1)
            assert one.history == dataset.item_ids.decode(test[row])[:-1]
            assert one.times == ([*times] if uses else None)


def test_what_preparing_found_about_the_order_is_kept(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", ITEMS, USERS)
    found = {"by": "time", "ties": "keep", "found": {"tied": 0.5}, "warning": "42% ascend"}
    dataset = write_prepared(
        tmp_path / "b", train=data.train, test=data.test, user_ids=data.user_ids,
        item_ids=data.item_ids, settings={}, counts={"order": found},
    )  # fmt: skip
    page = make_page(make_run(tmp_path / "run", dataset))
    assert "Order of events: by time, ties keep. Beware: 42% ascend." in page


def test_a_best_epoch_that_was_the_last_is_said(run: Run) -> None:
    assert "longer training may do better" not in finished(run).words
    assert "longer training may do better" in finished(run, best_epoch=4).words


@pytest.mark.parametrize(
    ("items", "verdict"),
    [("dcb", "hit at rank 1"), ("bcefghijklmd", "found at rank 12"), ("bc", "not in the first 2")],
)
def test_samples_say_the_rank_of_the_held_out_item(items: str, verdict: str) -> None:
    sample = Sample("u", list("xyzxyz"), "d", list(items), [1.0] * len(items))
    assert sample.verdict == verdict
    assert Sample("u", ["d"], "d", ["b"], [1.0]).verdict == "had before, so left out"


def test_the_page_is_small(run: Run) -> None:
    write_epochs(run, count=60)
    write_result(run)
    assert len(make_page(run).encode()) < 500_000
