"""Both pages as a browser shows them."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from sce.data.vocabulary import Vocabulary
from sce.experiments.figure_spec import FigureSpec
from sce.experiments.store import Sweep
from sce.report import compare_page, run_page
from sce.report.comparison import Comparison
from tests.browser import CONTRAST, Browser, needs_browser
from tests.experiments.made_rows import main_rows, make_row
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result

EVIL = "</script><script>window.pwned = 1</script><img src=http://example.com/x onerror=pwn()>"
VIEWS = (
    FigureSpec("table"),
    FigureSpec("pareto", x="memory"),
    FigureSpec("pareto", x="time"),
    FigureSpec("line", x="loss.bucket_size_y", log="x", losses=("sce", "ce")),
    FigureSpec("epochs", y="picked_once", losses=("sce",)),
    FigureSpec("components"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["run", "compare"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    if request.param == "run":
        items = Vocabulary.from_strings([EVIL, *(f"item {n} " + "long" * 20 for n in range(9))])
        users = Vocabulary.from_strings([f"user {n}" for n in range(12)])
        run = make_run(folder / "run", make_dataset(folder / "data", items, users))
        write_epochs(run, count=30)
        write_result(run, best_epoch=29, epochs=30)
        text = run_page.make_page(run)
    else:
        parts = {"weights": 10.0, "optimizer": 20.0, "activations": 30.0, "loss": 400.0}
        rows = [*main_rows(2), make_row("m", {"loss.name": "ce"}, data="made", test=None,
                                        components_mib=parts, history={})]  # fmt: skip
        sweep = Sweep("main", EVIL, tuple(row["key"] for row in rows), VIEWS)
        text = compare_page.make_page([Comparison(sweep, rows)], written=datetime(2026, 1, 2))
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@needs_browser
def test_it_loads_without_a_complaint_or_a_request(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.body.innerText.includes('window.pwned = 1')")
    assert browser.evaluate("document.querySelectorAll('img, script').length") == 0


@needs_browser
def test_a_complaint_would_be_heard(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('x'); nothing.here</script><img src='none.png'>")
    browser.open(path)
    assert len(browser.complaints()) >= 2
    assert len(browser.requests()) == 2


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_leaves_the_page_at_any_width(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("""
      [...document.querySelectorAll('svg.chart')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
          const t = text.getBoundingClientRect();
          return t.left < box.left - 8 || t.right > box.right + 8;
        }).map(text => text.textContent);
      })
    """) == []  # fmt: skip


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    found = browser.evaluate(CONTRAST)
    assert len(found) > 100
    assert [name for contrast, name in found if contrast < 4.5] == []


@needs_browser
def test_keys_reach_every_table_that_scrolls(browser: Browser, page: Path) -> None:
    browser.open(page, width=360)
    assert browser.evaluate(
        "[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0 && e.ariaLabel)"
    )


@needs_browser
def test_tables_that_scroll_say_so_on_a_telephone(browser: Browser, page: Path) -> None:
    browser.open(page, width=360)
    found = browser.evaluate("""
      [...document.querySelectorAll('.scroll')].filter(e => !e.closest('details')).map(e => {
        const words = getComputedStyle(e, '::before');
        const says = words.content.includes('scroll for more') && parseFloat(words.height) > 0;
        return [e.scrollWidth > e.clientWidth, says];
      })
    """)
    assert [True, True] in found
    assert all(scrolls == says for scrolls, says in found)
