"""Headless Chromium, told what to do over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

LOADED = "document.readyState == 'complete' || new Promise(done => addEventListener('load', () => done(true)))"


class Browser:
    """One tab. `complaints` are what its console has said since the page was opened: errors and warnings."""

    def __init__(self, folder: Path):
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        script = f'exec "$@" 3<&{there} 4>&{back}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *options, f"--user-data-dir={folder}"],
            pass_fds=(there, back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._buffer, self._number, self._session, self.complaints = b"", 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters):
        """Return the answer; what else comes meanwhile is noted if it is a complaint."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": parameters, **self._session})
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message)
                return message["result"]
            self._note(message)

    def open(self, page: Path, *, width: int = 1600, dark: bool = False):
        """Open the file, and return when its scripts have run."""
        self.complaints = []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 700
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.value(LOADED)

    def value(self, expression: str):
        """Return what JavaScript's expression gives, or its promise."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def click(self, element: str):
        """Click on what JavaScript's expression gives, with the mouse."""
        middle = f"(box => [box.x + box.width / 2, box.y + box.height / 2])(({element}).getBoundingClientRect())"
        x, y = self.value(f"({element}).scrollIntoView({{block: 'center', behavior: 'instant'}}), {middle}")
        for event in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)

    def clipboard(self) -> str:
        """Return the text that was copied."""
        self.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
        return self.value("navigator.clipboard.readText()")

    def screenshot(self, to: Path):
        """Write the whole page as PNG."""
        clip = self.call("Page.getLayoutMetrics")["cssContentSize"] | {"scale": 1}
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        to.write_bytes(base64.b64decode(picture["data"]))

    def _send(self, message):
        os.write(self._out, json.dumps(message).encode() + b"\0")

    def _receive(self):
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"]["exception"].get("description"))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and parameters["request"]["url"].startswith(("http", "ws")):
            self.complaints.append(parameters["request"]["url"])
