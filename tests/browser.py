"""A headless browser, driven over the DevTools protocol with the standard library.

Tests marked with `needs_browser` are skipped where there is none; SCE_BROWSER=none hides one.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if os.environ.get("SCE_BROWSER") != "none" and (found := shutil.which(name))
    ),
    None,
)


def needs_browser(test: Any) -> Any:
    """Mark a test that needs a browser; it says that it is skipped where there is none."""
    missing = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome found")
    return pytest.mark.browser(pytest.mark.timeout(120)(missing(test)))


# How far every text stands out from what is behind it, and the class of its element.
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
    e => !['STYLE', 'title'].includes(e.tagName)
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

    def open(self, page: Path | str, *, width: int = 1280, dark: bool = False) -> None:
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
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("Page.loadEventFired")
        # What scrolling animates begins with a frame.
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.call("Runtime.evaluate", expression=drawn, awaitPromise=True)

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
