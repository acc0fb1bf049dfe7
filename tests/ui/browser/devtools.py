"""A headless Chromium that is driven by the DevTools protocol, through pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def chromium() -> str | None:
    """The path of the browser; None if there is none."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    return os.environ.get("CHROMIUM") or next(filter(None, found), None)


class Tab:
    """A page in the browser. `problems` are its console errors, exceptions and failed requests."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, os.fdopen(from_browser, "rb")
        self._number, self._session, self._left = 0, None, b""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = json.loads(self._read())
            self._note(found)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]

    def _read(self) -> bytes:
        while b"\0" not in self._left:
            piece = os.read(self._from.fileno(), 2**20)
            assert piece, "the browser has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.problems.append(json.dumps(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(given["entry"]))

    def show(self, url: str, width: int = 1440, height: int = 1100, dark: bool = False) -> None:
        """Opens a page, and waits until it has drawn tasks."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        self.call("Page.navigate", url=url)
        self.wait("document.querySelectorAll('#tasks li').length > 0")
        self.wait("document.querySelector('#held-chart').children.length > 0")
        self.wait("document.getElementById('notice').hidden")

    def value(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def press(self, key: str, times: int = 1) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else None)
        for _ in range(times):
            given = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, 0)}
            down = given | ({"text": text} if text else {})
            self.call("Input.dispatchKeyEvent", type="keyDown", **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", **given)
        self.settle()

    def settle(self) -> None:
        """Waits until what has been asked for is drawn."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.value(f"new Promise((done) => {frames})")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        self.settle()
        time.sleep(0.4)
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser process."""
    command = [chromium(), "--headless=new", "--remote-debugging-pipe", "--disable-gpu"]
    command += ["--no-first-run", f"--user-data-dir={profile}", "--hide-scrollbars"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    read_commands, write_commands = os.pipe()
    read_results, write_results = os.pipe()
    ends = f'exec 3<&{read_commands} 4>&{write_results}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", ends, "chromium", *command],
        pass_fds=(read_commands, write_results),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_results)
    try:
        yield Tab(write_commands, read_results)
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(write_commands)
