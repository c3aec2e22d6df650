"""A headless Chromium that tests operate as a user would, by the DevTools protocol over two pipes; no package is needed.

Messages are JSON texts that end with a zero byte: https://chromedevtools.github.io/devtools-protocol and, for the pipes,
Chromium's switch --remote-debugging-pipe: it reads from descriptor 3 and writes to descriptor 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# fmt: off
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe", "--window-size=1400,1000",
)
# fmt: on
PATIENCE_S = 40
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowDown": (40, ""), "ArrowUp": (38, ""), "End": (35, ""), "Home": (36, "")}


class Browser:
    """A browser with one page at a time. `problems`: errors in the page's console and uncaught exceptions; `asked`: the
    addresses that the page requested; `dialogs`: the texts of its dialogs.
    """

    def __init__(self, folder: Path):
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        self.number, self.rest, self.session = 0, b"", ""
        to_child, self.writes = os.pipe()
        self.reads, from_child = os.pipe()
        start = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
        line = ["bash", "-c", start, CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        env = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        self.process = subprocess.Popen(
            line, pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        os.close(to_child)
        os.close(from_child)
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in pages if t["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.writes)
        os.close(self.reads)

    # ---- the protocol

    def send(self, method: str, **params) -> dict:
        """Sends a DevTools command and returns its result. Raises RuntimeError if the browser refuses it, TimeoutError without
        an answer.
        """
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {PATIENCE_S} s")
            data = os.read(self.reads, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self.rest += data
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str([a.get("value") for a in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    # ---- actions of a user

    def open(self, path: Path, theme: str = "light", width: int = 1400, height: int = 1000) -> None:
        """Loads a file in the color scheme `theme`, in a window of this size, and waits until its scripts have run."""
        self.problems, self.asked, self.dialogs = [], [], []
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def evaluate(self, expression: str):
        """Returns the value of a JavaScript expression in the page. Raises AssertionError if it throws."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} does not come true: {self.problems}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Clicks in the middle of the first element that the CSS selector matches."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center', "
            "behavior: 'instant'}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Presses a key: a name in KEYS, or a character."""
        code, text = KEYS.get(key, (ord(key.upper()[0]), key))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def picture(self, path: Path, full: bool = False) -> None:
        """Writes a PNG of the window, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))
