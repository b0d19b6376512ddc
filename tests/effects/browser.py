"""A headless Chromium, driven over a pipe: the DevTools protocol needs no library for
that.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
ANSWER_SECONDS = 60.0  # seconds for one answer, on a machine that has other things to do


def found() -> str | None:
    """Where Chromium is, if it is here."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser. What the page logs, throws or may not load is in
    `complaints`.
    """

    def __init__(self, inward: int, outward: int) -> None:
        self.inward, self.outward, self.left = inward, outward, b""
        self.number, self.session = 0, ""
        self.complaints: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are noted."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.outward, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self.left:
            ready, _, _ = select.select(
                [self.inward], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, "the browser does not answer"
            data = os.read(self.inward, 1 << 20)
            assert data, "the browser has gone"
            self.left += data
        line, _, self.left = self.left.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(params)[:500])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")

    def open(
        self, path: Path, state: str = "", *, wide: int = 1280, tall: int = 800
    ) -> None:
        """Open a page and wait until it is drawn; `state` is the part after `#`."""
        self.complaints.clear()
        self.requested.clear()
        size = {"width": wide, "height": tall, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")
        self.call(
            "Page.navigate", url=path.resolve().as_uri() + (f"#{state}" if state else "")
        )
        self.wait(
            "['drawn', 'failed'].some((is) => is in (document.documentElement?.dataset "
            "?? {}))"
        )

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"this never came true: {expression}"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        common = {"key": key, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        """Move the mouse, or press, release or turn its wheel, at a place of
        the window.
        """
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def dark(self, on: bool) -> None:
        """Prefer a dark or a light scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser that lives as long as the context; `profile` is an empty folder."""
    name = found()
    assert name is not None
    to_read, to_write, from_read, from_write = *os.pipe(), *os.pipe()
    # The protocol wants descriptors 3 and 4. Both are moved up first, so that neither is
    # lost.
    code = (
        "import os,sys,fcntl as f\nr,w=(f.fcntl(int(a),f.F_DUPFD,50) for a in "
        "sys.argv[1:3])\n"
    )
    code += "os.dup2(r,3);os.dup2(w,4)\nos.execv(sys.argv[3],sys.argv[3:])"
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(to_read), str(from_write), name, *flags],
        pass_fds=(to_read, from_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(from_read, to_write)
    finally:
        os.close(to_write)  # it ends when it cannot be commanded any more
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        os.close(from_read)
