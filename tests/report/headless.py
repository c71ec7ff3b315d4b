"""A headless Chromium, driven through a pipe: no driver and no package is needed, only the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")


def find() -> str | None:
    """The browser of this machine, or None; ``BILEVEL_CHROMIUM`` names another one."""
    return os.environ.get("BILEVEL_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser."""

    def __init__(self, executable: str) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += [
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={self.folder.name}",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", executable, *options],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._number, self._session = b"", 0, None
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser has ended"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        method, content = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.messages.append(str(content["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(content["exceptionDetails"]))
        elif method == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.messages.append(str(content["entry"]))
        return message

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """Load a file in a window of some size."""
        self.messages.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for_load()

    def reload(self) -> None:
        """Load the page again."""
        self.call("Page.reload")
        self.wait_for_load()

    def wait_for_load(self) -> None:
        """Until a page is there."""
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what the window shows, or the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()
