"""The page as a browser shows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sce.data.vocabulary import Vocabulary
from sce.report.page import make_page
from tests.browser import CONTRAST, Browser
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result

pytestmark = pytest.mark.timeout(120)
EVIL = "</script><script>window.pwned = 1</script><img src=http://example.com/x onerror=pwn()>"
FIGURES = 8


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    items = Vocabulary.from_strings([EVIL, *(f"item {n} " + "long" * 20 for n in range(9))])
    users = Vocabulary.from_strings([f"user {n}" for n in range(12)])
    run = make_run(folder / "run", make_dataset(folder / "data", items, users))
    write_epochs(run, count=30)
    write_result(run, best_epoch=29, epochs=30)
    path = folder / "page.html"
    path.write_text(make_page(run), encoding="utf-8")
    return path


def test_the_page_loads_without_a_word_in_the_console(browser: Browser, page: Path) -> None:
    browser.open(page)
    # The figures answer to the pointer only when the script has run to its end.
    assert browser.evaluate("document.querySelectorAll('.figure > .box').length") == FIGURES
    assert browser.complaints() == []


def test_a_complaint_would_be_heard(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('x'); nothing.here</script><img src='none.png'>")
    browser.open(path)
    assert len(browser.complaints()) >= 2
    assert len(browser.requests()) == 2


def test_nothing_is_requested(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0


def test_ids_do_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("document.body.innerText.includes('window.pwned = 1')")
    assert browser.evaluate("typeof window.pwned") == "undefined"
    assert browser.evaluate("document.querySelectorAll('script, img').length") == 1


SIZES = """
[...document.querySelectorAll('svg.chart')].map(svg => {
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll('path.line, rect.bar')].map(e => e.getBBox());
  const texts = [...svg.querySelectorAll('text')].map(e => e.getBoundingClientRect());
  return {
    width: box.width, height: box.height,
    drawn: Math.max(...drawn.map(b => b.width + b.height)),
    outside: texts.filter(t => t.left < box.left - 1 || t.right > box.right + 1).length,
  };
})
"""


@pytest.mark.parametrize("width", [400, 768, 1280])
def test_the_figures_are_there_at_every_width(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    found = browser.evaluate(SIZES)
    assert len(found) == FIGURES
    for figure in found:
        assert 300 <= figure["width"] <= width
        assert figure["height"] > 150
        assert figure["drawn"] > 100
        assert figure["outside"] == 0
    page_width = browser.evaluate("document.documentElement.scrollWidth")
    assert page_width <= width  # wide tables scroll by themselves


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    found = browser.evaluate(CONTRAST)
    assert len(found) > 100
    assert [name for contrast, name in found if contrast < 4.5] == []


def test_the_pointer_and_the_keys_show_values(browser: Browser, page: Path) -> None:
    browser.open(page)
    x, y = browser.evaluate(
        "(b => [b.left + b.width / 2, b.top + b.height / 2])"
        "(document.querySelector('svg.chart').getBoundingClientRect())"
    )
    box = "document.querySelector('.figure > .box:not([hidden])')"
    assert browser.evaluate(f"{box} === null")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.evaluate(f"{box}.innerText").startswith("epoch 1")  # of 30, so between 10 and 19
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(f"{box} === null")
    browser.evaluate("document.querySelectorAll('svg.chart')[2].focus()")
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert browser.evaluate(f"{box}.innerText") == "k 5\nmodel 0.128\npopularity 0.041"
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert browser.evaluate(f"{box} === null")
    assert browser.complaints() == []


def test_paper_shows_what_was_folded(browser: Browser, page: Path) -> None:
    browser.open(page)
    folded = "document.querySelectorAll('details:not([open])').length"
    assert browser.evaluate(folded) > 0
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000
    assert browser.evaluate(folded) == 0
