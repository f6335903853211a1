"""The page of a comparison as a browser shows it."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from sce.experiments.comparison import Comparison
from sce.experiments.page import make_page
from sce.experiments.place import Sweep
from sce.experiments.views import View
from tests.browser import CONTRAST, Browser
from tests.experiments.made_rows import main_rows, make_row

pytestmark = pytest.mark.timeout(120)
VIEWS = (
    View("table"),
    View("pareto", x="memory"),
    View("pareto", x="time"),
    View("line", x="loss.bucket_size_y", log="x", losses=("sce", "ce")),
    View("epochs", y="picked_once", losses=("sce",)),
    View("components"),
)
FIGURES = 13
FIRST = "document.querySelectorAll('.figure')[0]"
BOX = "document.querySelector('.figure > .box:not([hidden])')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"weights": 10.0, "optimizer": 20.0, "activations": 30.0, "loss": 400.0}
    rows = [*main_rows(2), make_row("m", {"loss.name": "ce"}, data="made", components_mib=parts,
                                    test=None, history={})]  # fmt: skip
    keys = tuple(row["key"] for row in rows)
    path = tmp_path_factory.mktemp("page") / "compare.html"
    made = make_page(
        [Comparison(Sweep("main", "</script><img src=x>", keys, VIEWS), rows)],
        written=datetime(2026, 1, 2),
    )
    path.write_text(made, encoding="utf-8")
    return path


def test_it_loads_without_a_word_and_without_a_request(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('.figure > .box').length") == FIGURES
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('img, script').length") == 1


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_leaves_the_page_at_any_width(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = browser.evaluate("""
      [...document.querySelectorAll('svg.chart')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
          const t = text.getBoundingClientRect();
          return t.left < box.left - 1 || t.right > box.right + 1 || t.bottom > box.bottom + 1;
        }).map(text => text.textContent);
      })
    """)
    assert outside == []


def test_the_whole_table_is_seen_on_a_desk(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    assert browser.evaluate(
        "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.scroll'))"
    )


def test_on_a_telephone_numbers_are_seen_and_names_stay(browser: Browser, page: Path) -> None:
    browser.open(page, width=390)
    seen = """(region => {
      const frame = region.getBoundingClientRect();
      const row = region.querySelector('tbody tr:nth-child(3)');
      const name = row.querySelector('th').getBoundingClientRect();
      const cells = [...row.querySelectorAll('td')].map(cell => cell.getBoundingClientRect());
      const inside = cells.filter(cell =>
        cell.right <= frame.right + 1 && cell.left >= name.right - 1);
      return [name.left >= frame.left - 1, inside.length,
              getComputedStyle(region).backgroundImage !== 'none'];
    })(document.querySelector('.scroll'))"""
    names, numbers, hint = browser.evaluate(seen)
    assert names
    assert numbers >= 1
    assert hint
    browser.evaluate("document.querySelector('.scroll').scrollLeft = 200")
    names, numbers, _ = browser.evaluate(seen)
    assert names
    assert numbers >= 1


def test_headings_break_between_words_only(browser: Browser, page: Path) -> None:
    browser.open(page, width=400)
    torn = browser.evaluate("""
      [...document.querySelectorAll('.scroll th')].filter(cell => cell.firstChild).filter(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        const lines = new Set([...range.getClientRects()].map(line => Math.round(line.top)));
        return lines.size > cell.textContent.split(/[ -]/).length;
      }).map(cell => cell.textContent)
    """)
    assert torn == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    found = browser.evaluate(CONTRAST)
    assert len(found) > 200
    assert [name for contrast, name in found if contrast < 4.5] == []


def move_to_point(browser: Browser, index: int) -> list[str]:
    """Put the pointer on a point of the first figure; return its label."""
    x, y, label = browser.evaluate(f"""
      (() => {{
        const svg = {FIRST}.querySelector('svg.chart');
        svg.scrollIntoView({{block: 'center'}});
        const point = JSON.parse(svg.dataset.points)[{index}];
        const box = svg.getBoundingClientRect();
        const scale = box.width / svg.viewBox.baseVal.width;
        return [box.left + point.x * scale, box.top + point.y * scale, point.label];
      }})()
    """)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    return [str(label)]


def test_a_point_tells_its_setting_and_numbers(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate(f"{BOX} === null")
    (label,) = move_to_point(browser, 3)
    text = browser.evaluate(f"{BOX}.innerText")
    assert text.startswith(label)
    assert "test NDCG@10" in text
    assert "±" in text
    assert "MiB" in text or "GiB" in text
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(f"{BOX} === null")
    assert browser.complaints() == []


def test_a_click_on_a_name_hides_its_curve_in_all_figures_beside(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    shown = """[...document.querySelectorAll('.figure')].slice(0, 4).map(figure =>
      [...figure.querySelectorAll('.curve')].filter(
        curve => getComputedStyle(curve).display !== 'none').length)"""
    assert browser.evaluate(shown) == [6, 6, 6, 6]
    button = f"{FIRST}.querySelector('button[data-name=\"SCE\"]')"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(shown) == [5, 5, 5, 6]  # the fourth is another view
    assert browser.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"
    last = browser.evaluate(
        f"JSON.parse({FIRST}.querySelector('svg.chart').dataset.points)"
        ".findIndex(point => point.label.startsWith('SCE'))"
    )
    move_to_point(browser, last)
    assert not browser.evaluate(f"({BOX}?.innerText ?? '').startsWith('SCE')")
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(shown) == [6, 6, 6, 6]


def test_the_keys_walk_from_point_to_point(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate(f"{FIRST}.querySelector('svg.chart').focus()")
    for _ in range(3):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    label = browser.evaluate(
        f"JSON.parse({FIRST}.querySelector('svg.chart').dataset.points)[2].label"
    )
    assert browser.evaluate(f"{BOX}.innerText").startswith(label)
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert browser.evaluate(f"{BOX} === null")
