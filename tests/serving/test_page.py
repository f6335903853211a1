"""The page at /, in a real browser, through the real server, on a run that was trained."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.serving.page import PAGE, POLICY
from tests.browser import CONTRAST, Browser, needs_browser
from tests.cycle_data import make_cycle, train
from tests.serving.running import Server, serving
from tests.serving.tiny_export import listed, write_export

FRUITS = ["Apple", "Banana", "Cherry", "Damson", "Elder", "Fig", "Grape", "Hazel", "Iris"]
FRUITS += ["Juniper", "Kiwi", "Lime"]


def test_the_page_asks_nobody_else_for_anything() -> None:
    assert "http" not in PAGE.replace("http://www.w3.org/2000/svg", "")
    assert POLICY.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in POLICY


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a run in which every item is followed by the next; one has no title."""
    place = tmp_path_factory.mktemp("page")
    train(make_cycle(place / "data"), out=place / "run", epochs=12)
    titles = place / "titles.csv"
    named = [f"{100 + n},{fruit}" for n, fruit in enumerate(FRUITS) if fruit != "Fig"]
    titles.write_text("\n".join(["item_id,title", *named]))
    with serving(place / "run", "--titles", str(titles), torch=True) as server:
        assert "exporting" in server.log.read_text()
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_users_of_the_run_are_asked_for_by_their_ids(trained: Server) -> None:
    dataset = PreparedDataset.load(trained.log.parent / "data")
    (events,) = dataset.histories(np.array([3]))
    _, by_user = trained.ask("/recommend", {"user": "user003", "k": 3})
    _, by_history = trained.ask("/recommend", {"history": (100 + events).tolist(), "k": 3})
    assert by_user == by_history
    assert by_user["source"] == "model"
    _, nobody = trained.ask("/recommend", {"user": "nobody", "k": 3})
    _, empty = trained.ask("/recommend", {"history": [], "k": 3})
    assert nobody["source"] == "popular"
    assert nobody["items"] == empty["items"]
    assert len(nobody["items"]) == 3


class Page:
    """What a person does on the page."""

    def __init__(
        self, browser: Browser, url: str, *, width: int = 1280, dark: bool = False
    ) -> None:
        self.browser = browser
        browser.open(url, width=width, dark=dark)
        self.wait_for("document.querySelector('#results li')")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + 20
        while not self.browser.evaluate(f"!!({condition})"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def names(self, where: str) -> list[str]:
        """The names in a list, as they are seen."""
        rows = f"[...document.querySelectorAll('#{where} li')]"
        first = "row => row.querySelector('.pick span, button span').textContent"
        found: list[str] = self.browser.evaluate(f"{rows}.map({first})")
        return found

    def click(self, selector: str) -> None:
        self.browser.evaluate(f"document.querySelector({selector!r}).click()")

    def press(self, key: str) -> None:
        text = {"text": {"Enter": "\r"}.get(key, key)} if len(key) == 1 or key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def type(self, text: str) -> None:
        self.browser.call("Input.insertText", text=text)

    def top(self, first: str) -> list[str]:
        """The top ten, once this one is the first of them."""
        picked = f"document.querySelector('#top .pick span')?.textContent === {first!r}"
        self.wait_for(picked)
        return self.names("top")


@needs_browser
def test_a_history_is_built_and_the_top_ten_follow(trained: Server, browser: Browser) -> None:
    page = Page(browser, trained.url)
    assert page.names("results") == [*FRUITS[:5], "105", *FRUITS[6:]]  # without a title, the id
    popular = trained.ask("/recommend", {"history": []})[1]["items"]
    assert page.top(popular[0].get("title", "105")) == [one.get("title", "105") for one in popular]
    marked = "!document.getElementById('popular').hidden"
    assert browser.evaluate(marked)
    page.browser.call("Input.dispatchKeyEvent", type="keyDown", key="/", text="/")
    page.type("CHER")
    page.wait_for("document.querySelectorAll('#results li').length === 1")
    page.press("Enter")
    page.wait_for(f"!({marked})")
    assert len(page.top("Damson")) == 10
    page.press("Escape")
    page.wait_for("document.querySelectorAll('#results li').length === 12")
    moving = "document.getAnimations().some(one => one.effect.target.closest('#top'))"
    page.click("#top .pick")  # Damson
    page.wait_for(moving)
    assert len(page.top("Elder")) == 10
    assert "Damson" not in page.names("top")
    assert page.names("history") == ["Cherry", "Damson"]
    page.wait_for("document.getElementById('latency').textContent.includes('ms · server')")
    marks = "[...document.querySelectorAll('#top .move')].map(one => one.textContent)"
    assert any(mark.startswith(("▲", "▼")) for mark in browser.evaluate(marks))
    page.click("#top .not")  # Elder
    page.wait_for("!document.querySelector('#top').textContent.includes('Elder')")
    second = page.names("top")[0]
    page.click("#top .only")
    page.wait_for("document.querySelectorAll('#top li').length === 1")
    assert (page.names("allow"), page.names("block")) == ([second], ["Elder"])
    page.click("#top .like")
    page.wait_for("document.querySelectorAll('#alike li').length === 10")
    page.click("#allow button")
    page.click("#block button")
    assert len(page.top("Elder")) == 10
    page.click("#keep")
    page.wait_for("document.querySelector('#top').textContent.includes('Damson')")
    page.click("#clear")
    page.wait_for(marked)
    assert browser.complaints() == []
    assert all(url.startswith((trained.url, "data:")) for url in browser.requests())


@needs_browser
def test_all_of_it_can_be_done_with_keys(trained: Server, browser: Browser) -> None:
    page = Page(browser, trained.url)
    for key in ("/", "ArrowDown", "ArrowDown", "Enter"):
        page.press(key)
    page.top("Cherry")
    focused = "document.activeElement.querySelector('span')?.textContent"
    assert browser.evaluate(focused) == "Banana"
    browser.evaluate("document.querySelector('#top .pick').focus()")
    page.press("Enter")
    page.top("Damson")
    assert browser.evaluate(focused) == "Damson"  # the row in the place of the one that went
    page.press("b")
    page.wait_for("!document.querySelector('#top').textContent.includes('Damson')")
    page.press("s")
    page.wait_for("document.querySelector('#alike li')")
    page.press("a")
    page.wait_for("document.querySelectorAll('#top li').length === 1")
    browser.evaluate("document.querySelector('#history button').focus()")
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#history li').length === 1")
    assert page.names("history") == ["Cherry"]
    assert browser.evaluate("document.activeElement.closest('#history') !== null")
    assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_it_can_be_read_everywhere(
    width: int, dark: bool, trained: Server, browser: Browser
) -> None:
    page = Page(browser, trained.url, width=width, dark=dark)
    page.click("#results .pick")
    page.top("Banana")
    page.click("#top .not")
    page.click("#results li:last-child .only")
    page.click("#top .like")
    page.wait_for("document.querySelector('#alike li') && !document.getAnimations().length")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    faint = [found for found in browser.evaluate(CONTRAST) if found[0] < 4.5]
    assert faint == []


@needs_browser
def test_without_titles_and_with_a_token(tmp_path: Path, browser: Browser) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-token\n")
    path = write_export(tmp_path / "export")
    with serving(path, "--token-file", str(token)) as server:
        browser.open(server.url)
        for given in ("wrong", "a-long-token"):
            deadline = time.monotonic() + 20
            while browser.evaluate("document.getElementById('door').hidden"):
                assert time.monotonic() < deadline
            asking = f"document.getElementById('token').value = {given!r}"
            browser.evaluate(f"{asking}; document.querySelector('#door button').click()")
        page = Page(browser, server.url)  # kept for the tab
        assert page.names("results")[:2] == ["100", "101"]
        page.wait_for("!document.getElementById('hint').hidden")  # what is popular is not known
        page.click("#results .pick")
        page.wait_for("document.querySelectorAll('#top li').length === 10")
        server.end()
        page.click("#top .pick")
        page.wait_for("document.getElementById('error').textContent.includes('does not answer')")


@needs_browser
def test_ids_that_javascript_would_round_stay_apart(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = Vocabulary.from_integers(range(2**60, 2**60 + 40))
    monkeypatch.setattr("tests.serving.tiny_export.ITEM_IDS", ids)
    with serving(write_export(tmp_path / "export")) as server:
        page = Page(browser, server.url)
        first = page.names("results")
        assert first[:2] == [str(2**60), str(2**60 + 1)]
        page.click("#results .pick")
        page.wait_for("document.querySelectorAll('#top li').length === 10")
        best = server.ask("/recommend", {"history": [2**60]})[1]["items"]
        assert page.names("top") == [str(one["item"]) for one in best]


@needs_browser
def test_a_title_is_text_and_nothing_else(tmp_path: Path, browser: Browser) -> None:
    title = "<img src=x onerror=alert(1)><b>bold</b>"
    titles = listed([title, *[""] * 39])
    with serving(write_export(tmp_path / "export", titles=titles)) as server:
        page = Page(browser, server.url)
        assert page.names("results")[0] == title
        assert browser.evaluate("document.querySelector('img, b') === null")
        assert browser.complaints() == []
