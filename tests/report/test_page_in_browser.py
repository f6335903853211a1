"""The page as a browser shows it: driven over the DevTools protocol, with the standard library."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sce.data.vocabulary import Vocabulary
from sce.report.page import make_page
from tests.tiny_run import make_dataset, make_run, write_epochs, write_result

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
if BROWSER is None:
    pytest.skip("no chromium or google-chrome on PATH", allow_module_level=True)
pytestmark = pytest.mark.timeout(120)
EVIL = "</script><script>window.pwned = 1</script><img src=http://example.com/x onerror=pwn()>"
FIGURES = 8


class Browser:
    """A headless browser with one tab; everything it says is kept in `events`."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        # The browser reads commands from descriptor 3 and answers on 4.
        theirs_in, self._commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))

        def arrange() -> None:
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=arrange,
            start_new_session=True,
        )
        for fd in (theirs_in, theirs_out, high_in, high_out):
            os.close(fd)
        self.events: list[dict[str, Any]] = []
        self._unread, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has gone"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Everything that a developer would see in red, or yellow, in the console."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


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


CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const channel = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const luminance = c => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll('body *')].filter(
    e => !['SCRIPT', 'desc'].includes(e.tagName)
      && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
  );
  return texts.map(e => {
    const style = getComputedStyle(e);
    const front = parse(e.closest('svg') ? style.fill : style.color);
    const [a, b] = [luminance(front), luminance(ground(e))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className.baseVal ?? e.className];
  });
})()
"""


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
