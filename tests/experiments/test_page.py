from datetime import datetime
from pathlib import Path

import pytest

from sce.experiments.comparison import Comparison
from sce.experiments.markdown import make_markdown
from sce.experiments.page import make_files, make_page
from sce.experiments.place import Sweep
from sce.experiments.rows import Row
from sce.experiments.views import DEFAULT_VIEWS, View
from tests.experiments.made_rows import main_rows, make_row

WRITTEN = datetime(2026, 1, 2, 3, 4)


def comparison(rows: list[Row], *views: View, measure: str = "training") -> Comparison:
    keys = tuple(row["key"] for row in rows)
    return Comparison(Sweep("main", "Mine & yours", keys, views, measure), rows)


@pytest.fixture
def whole() -> Comparison:
    return comparison(list(main_rows()), *DEFAULT_VIEWS)


def test_the_page_says_what_came_out(whole: Comparison) -> None:
    page = make_page([whole], written=WRITTEN)
    assert "<h1>Mine &amp; yours</h1>" in page
    assert "253 runs on 3 datasets; of these, 1 out of memory." in page
    assert "ml1m: NDCG@10 of SCE (" in page
    assert "ml1m, CE, batch_size 4,096, seed 0 (ffffffffffff)" in page
    assert page.count('class="figure"') == 6
    assert "Popularity reaches NDCG@10 0.0051 on ml1m, 0.0051 on beauty" in page
    assert "memory ran out (3 &lt;GiB&gt;)" in page
    assert "Every run had the device to itself." in page
    assert "Measured on a GPU." in page
    assert "on 2026-01-02 at 03:04" in page


def test_times_beside_others_are_marked(whole: Comparison) -> None:
    rows = [row | {"at_once": 14} for row in whole.rows]
    page = make_page([comparison(rows, *DEFAULT_VIEWS)], written=WRITTEN)
    assert "Up to 14 runs shared the device" in page


def test_the_tile_says_what_the_table_does() -> None:
    """CE is better on test events, CE⁻ on validation events: the rival is CE⁻ everywhere."""
    rows = [
        make_row(loss, {"loss.name": loss}, validation=validation, test=test)
        for loss, validation, test in (("ce", 0.1, 0.08), ("ce-", 0.2, 0.05), ("sce", 0.1, 0.06))
    ]
    page = make_page([comparison(rows, View("table"))], written=WRITTEN)
    assert "over CE⁻ (0.0500), the best other by validation" in page
    assert "<dd>+20%</dd>" in page
    assert "<td><em>+20%</em></td>" in page


def test_steps_make_no_table_of_quality() -> None:
    steps = make_row("a", {"loss.name": "ce"}, test=None, validation=None, measure="steps")
    page = make_page([comparison([steps], *DEFAULT_VIEWS, measure="steps")], written=WRITTEN)
    assert "NDCG@5" not in page
    assert "No run of this sweep has measured what its figures show." in page


def test_a_sweep_without_a_finished_run() -> None:
    failed = list(main_rows(1))[-1]
    page = make_page([comparison([failed], *DEFAULT_VIEWS)], written=WRITTEN)
    assert "No run of this sweep has finished yet." in page


def test_markdown_of_trainings_and_of_steps(whole: Comparison) -> None:
    text = make_markdown([whole])
    assert text.startswith("## Mine & yours\n\n253 runs on 3 datasets")
    assert "| ml1m | NDCG@1 |" in text
    assert "Chosen by validation NDCG@10: ml1m: BCE" in text
    assert "- ml1m, CE, batch_size 4,096, seed 0 (ffffffffffff): out of memory" in text
    steps = [
        make_row("a", {"loss.name": "ce"}, test=None, validation=None, memory=2048.0,
                 measure="steps")
    ]  # fmt: skip
    table = make_markdown([comparison(steps, View("components"), measure="steps")])
    assert "| loss | ml1m |\n| --- | --- |\n| CE | 2 GiB |" in table


def test_figures_as_files(whole: Comparison, tmp_path: Path) -> None:
    found = make_files([whole])
    assert len(found) == 6
    assert "main-globo-test-ndcg-10-against-training-time.svg" in found
    assert all(text.startswith("<svg") for text in found.values())
