# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, spoken to in its own protocol: open a page, evaluate a script there, take a screenshot."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.own_processes import SLOW

WAIT_S = 40.0 * SLOW
_LOOK_S = 0.05
_OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
    "--disable-dev-shm-usage",
]  # fmt: skip


class Page:
    """One tab. ``errors`` are the uncaught errors and the refused loads of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json(timeout=WAIT_S)
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        if told["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(told["params"]["exceptionDetails"]))
        elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.errors.append(told["params"]["entry"]["text"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def text(self) -> str:
        return str(await self.evaluate("document.body ? document.body.innerText : ''"))

    async def shows(self, *texts: str) -> str:
        """Wait until the page has all these texts. Returns all of its text."""
        ends = asyncio.get_running_loop().time() + WAIT_S
        while True:
            shown = await self.text()
            if all(text in shown for text in texts):
                return shown
            assert asyncio.get_running_loop().time() < ends, f"{texts} should come: {shown}"
            await asyncio.sleep(_LOOK_S)

    async def resize(self, width: int, height: int, dark: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    async def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def unnamed(self) -> list[str]:
        """Elements that can be used, or that mean something, and that a screen reader can't name."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        roles = {"button", "link", "image", "img", "region", "table", "columnheader", "rowheader"}
        return [
            node["role"]["value"]
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value")
        ]


KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27}


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Page]:
    """A browser of its own, which knows nothing of others."""
    process = _start(profile)
    try:
        async with aiohttp.ClientSession() as session:
            port = await _port(profile, process)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                url = next(each["webSocketDebuggerUrl"] for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Accessibility"):
                    await page.call(f"{domain}.enable")
                yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(profile: Path) -> subprocess.Popen[bytes]:
    profile.mkdir()
    with (profile / "log").open("w") as log:
        command = ["chromium", *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


async def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Chromium writes it once it listens."""
    ends = asyncio.get_running_loop().time() + WAIT_S
    told = profile / "DevToolsActivePort"
    while not told.exists() or not told.read_text():
        assert process.poll() is None, (profile / "log").read_text()
        assert asyncio.get_running_loop().time() < ends, (profile / "log").read_text()
        await asyncio.sleep(_LOOK_S)
    return int(told.read_text().splitlines()[0])
