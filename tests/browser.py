"""A headless Chromium for tests, driven by the DevTools protocol over pipes."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time

import pytest

PROGRAMS = "chromium", "google-chrome", "google-chrome-stable"
COMMAND = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
"""The protocol is spoken over these file descriptors."""
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, "")}
SECONDS = 60


class Tab:
    """A browser's process with one tab."""

    def __init__(self, program, folder):
        self._process = subprocess.Popen(
            ["sh", "-c", COMMAND, program, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("w"),
        )
        self._rest, self._count, self._session = b"", 0, {}
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self):
        """End the browser."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b'{"id": 0, "method": "Browser.close"}\0')
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method, **params):
        """The result of a method of the protocol; events go to `events`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self):
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready = select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]
            piece = os.read(pipe, 1 << 16) if ready else b""
            assert piece, "the browser says nothing; see its log"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """The value of an expression of JavaScript, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script):
        """The value of the expression, once it is true."""
        deadline = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.02)
        return value

    def open(self, url):
        """Load a page."""
        self._load("Page.navigate", url=url)

    def reload(self):
        """Load the page anew."""
        self._load("Page.reload")

    def _load(self, method, **params):
        """Forget the events before, and wait for that of the new page."""
        self.events.clear()
        self.call(method, **params)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def requests(self):
        """URLs that were asked for since the page was opened, its own first."""
        self.run("0")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def problems(self):
        """Errors and warnings on the console since the page was opened, exceptions and violations
        of its policy."""
        self.run("0")
        wrong = []
        for event in self.events:
            kind, found = event["method"], event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                wrong.append(found["exceptionDetails"])
            elif kind == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
                wrong.append(found["entry"]["text"])
            elif kind == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
                wrong.append(found["args"])
        return wrong

    def contrast(self, selector):
        """The ratio of WCAG 2.2, 1.4.3, of an element's text and what is behind it."""
        colors = self.run(
            "(() => { let at = document.querySelector(" + json.dumps(selector) + ");"
            "const ink = getComputedStyle(at).color; const clear = 'rgba(0, 0, 0, 0)';"
            "while (getComputedStyle(at).backgroundColor == clear) at = at.parentElement;"
            "return [ink, getComputedStyle(at).backgroundColor]"
            ".map((color) => color.match(/\\d+/g).map(Number)); })()"
        )
        low, high = sorted(map(_luminance, colors))
        return (high + 0.05) / (low + 0.05)

    def text(self, selector):
        """The text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, text):
        """Put text where the keyboard's focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key):
        """Press a key and let it go."""
        code, text = KEYS[key]
        options = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def click(self, selector):
        """Click the middle of an element."""
        x, y = self.run(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView(); const box = element.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def _luminance(color):
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def installed():
    """The program of a browser; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(PROGRAMS)} (apt-get install chromium)")
    return program


@contextlib.contextmanager
def browsing(folder):
    """A tab; skips the test where no browser is installed."""
    program = installed()
    tab = Tab(program, folder)
    try:
        yield tab
    finally:
        tab.close()
