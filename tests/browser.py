"""Control a headless Chromium through its DevTools protocol, to test a page as a reader sees it."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 120
AXE = """axe.run().then(found => JSON.stringify(
  found.violations.map(one => [one.id, one.nodes.map(node => node.html.slice(0, 120))])))"""


class Browser:
    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, timeout=PATIENCE, suppress_origin=True)
        self.number = 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = self._next()
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def open(self, page: Path) -> None:
        self.visit(page.resolve().as_uri())

    def visit(self, address: str) -> None:
        self.complaints.clear()
        self.do("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def ask(self, expression: str) -> Any:
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        place = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = self.ask(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int, text: str = "") -> None:
        key_facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.do("Input.dispatchKeyEvent", type="keyDown", text=text, **key_facts)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key_facts)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def media(self, kind: str = "", scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", media=kind, features=features)

    def faults(self) -> list[tuple[str, list[str]]]:
        self.ask(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8") + "; 0")
        found = self.do("Runtime.evaluate", expression=AXE, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return [(name, places) for name, places in json.loads(found["result"]["value"])]

    def pdf(self) -> bytes:
        return base64.b64decode(self.do("Page.printToPDF", printBackground=False)["data"])

    def picture(self) -> bytes:
        return base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        message = json.loads(self.socket.recv())
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))
        return message


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Browser(_tab(folder / "DevToolsActivePort", process))
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def _tab(told: Path, process: subprocess.Popen) -> str:
    deadline = time.monotonic() + PATIENCE
    while not (told.exists() and told.read_text().count("\n") >= 1):
        assert process.poll() is None and time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    port, path = told.read_text().split("\n")[:2]
    socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=PATIENCE, suppress_origin=True)
    socket.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
    while (message := json.loads(socket.recv())).get("id") != 1:
        pass
    return f"ws://127.0.0.1:{port}/devtools/page/{message['result']['targetId']}"
