"""A headless Chromium that opens local pages, through its DevTools protocol over two pipes."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 300
"""After which a browser that hangs is killed, which fails its test."""


@contextmanager
def chromium(profile: Path) -> Iterator["Page"]:
    """A page that is closed with its browser. Skips the test where there is no Chromium.

    profile: an empty folder for what the browser keeps.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium: apt-get install chromium")
    from_test, to_browser = os.pipe()
    from_browser, to_test = os.pipe()
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-extensions", f"--user-data-dir={profile}",
        "--remote-debugging-pipe", "about:blank",
    ]  # fmt: skip
    # Chromium reads commands from file 3 and writes answers to file 4.
    words = ["bash", "-c", f'exec "$@" 3<&{from_test} 4>&{to_test}', "bash", program, *options]
    with open(profile / "log", "wb") as log:
        process = subprocess.Popen(words, pass_fds=(from_test, to_test), stdout=log, stderr=log)
    os.close(from_test)
    os.close(to_test)
    guard = threading.Timer(LIMIT_SECONDS, process.kill)
    guard.start()
    with open(to_browser, "wb", buffering=0) as commands, open(from_browser, "rb") as answers:
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
            process.wait()
            guard.cancel()


class Page:
    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._num_sent, self._session = 0, None
        self.errors: list[Any] = []
        """What the browser's console shows as an error since the last `open`, and requests that were refused."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.requests: list[str] = []

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Loads a page in a window of this width in CSS pixels; `scheme` is light or dark."""
        self.errors, self.requests = [], []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, JSON-able."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def move_pointer(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._num_sent:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (character := self._answers.read(1)) != b"\0":
            assert character, "the browser has ended"
            text += character
        message = json.loads(text)
        match message:
            case {"method": "Runtime.exceptionThrown", "params": found}:
                self.errors.append(found)
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error" | "warning"} as found}:
                self.errors.append(found)
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning"} as found}}:
                self.errors.append(found)
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requests.append(url)
        return message
