"""A real browser without a window, told what to do over a pipe; needs nothing but the browser.

The DevTools protocol is JSON with a zero byte after each message, on the file descriptors 3 and 4 of the browser:
https://chromedevtools.github.io/devtools-protocol.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# What the browser does by itself would be seen as requests and would slow it down.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--remote-debugging-pipe",
]
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_browser():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def start_browser(path):
    """A browser, until the end of the block."""
    (to_read, tell), (hear, to_write) = os.pipe(), os.pipe()
    # Far from 3 and 4, so that neither is overwritten before it is in its place.
    inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in (to_read, to_write)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-S", "-c", _START, *map(str, inherited), path]
        process = subprocess.Popen(
            [*command, *FLAGS, f"--user-data-dir={directory}"],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_read, to_write, *inherited):
            os.close(fd)
        try:
            yield Browser(tell, hear)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(tell)
            os.close(hear)


class Browser:
    def __init__(self, tell, hear):
        self._tell, self._hear = tell, hear
        self._buffer = b""
        self._count = 0
        self.events = []

    def call(self, method, session=None, timeout=60, **params):
        """Does something, and returns what came of it; what happens meanwhile is kept in `events`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._tell, data) :]
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self, deadline, method):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._hear], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser says nothing about {method}")
            part = os.read(self._hear, 1 << 20)
            if not part:
                raise EOFError(f"the browser has ended during {method}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url, width=1200, height=900, scheme="light"):
        """A page that has been loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.look(width, height, scheme)
        self.events.clear()
        page.call("Page.navigate", url=url)
        deadline = time.monotonic() + 60
        while not page.evaluate("document.readyState === 'complete' && location.href !== 'about:blank'"):
            assert time.monotonic() < deadline, f"{url} is not loaded"
            time.sleep(0.02)
        return page


class Page:
    def __init__(self, browser, target, session):
        self._browser, self._target, self._session = browser, target, session

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def look(self, width=1200, height=900, scheme="light", media=""):
        """The size of the window, and whether the reader's system is light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, source):
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=source, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def press(self, key):
        """A key, as a reader presses it."""
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowDown": (40, ""), "ArrowUp": (38, "")}
        number, typed = codes.get(key, (ord(key[0].upper()), key))
        event = {"key": key, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": typed} if typed else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text):
        """Characters into what has the focus."""
        self.call("Input.insertText", text=text)

    def click(self, selector):
        """The middle of the first element of this kind that can be seen."""
        place = self.evaluate(f"""(() => {{
            const isSeen = (element) => element.checkVisibility();
            const element = [...document.querySelectorAll({json.dumps(selector)})].find(isSeen);
            if (!element) return null;
            element.scrollIntoView({{block: "center"}});
            const box = element.getClientRects()[0];
            return [box.left + box.width / 2, box.top + box.height / 2];
        }})()""")
        assert place, f"nothing like {selector} can be seen"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def screenshot(self, path, whole=False):
        """A picture of what is to be seen, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))

    @property
    def complaints(self):
        """What the browser said of the page: errors, and lines on the console."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
        return found

    @property
    def requests(self):
        """The addresses that were asked for, that of the page itself among them."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event["method"] == "Network.requestWillBeSent" and event.get("sessionId") == self._session
        ]

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)
