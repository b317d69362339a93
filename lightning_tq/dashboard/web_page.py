# SPDX-License-Identifier: Apache-2.0
"""The dashboard's web server: one page, and the numbers that it asks for every second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from lightning_tq.dashboard.history import QueueHistory
from lightning_tq.queue_report import QueueSnapshot, make_report, take_snapshot
from transfer_queue import Observer
from transfer_queue.errors import ConfigError, TransferQueueError

try:
    from aiohttp import web
except ImportError:
    raise ConfigError(
        "the dashboard needs the package aiohttp: install lightning-tq with its extra 'dashboard' (docs/start.md)."
    ) from None

DEFAULT_PORT = 8766
_EVERY_S = 1.0
_LOCAL = ("127.0.0.1", "localhost", "::1")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """Looks at the queue once a second, and serves what it saw until it is cancelled."""

    def __init__(self, observer: Observer, address: str, host: str, with_token: bool, name: str) -> None:
        """
        Args:
            name: That of the run, for title and head.
            host: Where to listen.
            with_token: Readers need the token of the URL. Without, every user of this host can read the page.
        Raises:
            ConfigError: other hosts would need no token.
        """
        if not with_token and host not in _LOCAL:
            raise ConfigError(f"a dashboard at {host} is for other hosts: omit --no-token, or --host.")
        self._observer, self._address, self._host, self._name = observer, address, host, name
        self._token = secrets.token_urlsafe(16) if with_token else None
        self._history = QueueHistory()
        self._report: dict[str, Any] | None = None
        self._page = files("lightning_tq.dashboard").joinpath("page.html").read_text()
        self._policy = _policy(self._page)

    async def run(self, port: int | None, ready: Callable[[str], None]) -> None:
        """Serve for ever. ``ready`` is called with the URL.

        Args:
            port: None: the default one, or a free one if that is in use. 0: a free one.
        Raises:
            OSError: it can't listen there.
        """
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/", self._show)
        app.router.add_get("/state", self._state)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            ready(self._url(await self._listen(runner, port)))
            await self._follow()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner, port: int | None) -> int:
        try:
            await web.TCPSite(runner, self._host, DEFAULT_PORT if port is None else port).start()
        except OSError:
            if port is not None:
                raise
            await web.TCPSite(runner, self._host, 0).start()
        return int(runner.addresses[0][1])

    def _url(self, port: int) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        # Behind "#", so that it is in no request, log or "Referer": the page sends it in a header.
        return f"http://{host}:{port}/" + ("" if self._token is None else f"#token={self._token}")

    async def _follow(self) -> None:
        before: QueueSnapshot | None = None
        while True:
            try:
                now = await take_snapshot(self._observer)
                self._report = {**make_report(self._address, now, before), "taken_at": now.taken_at}
                self._history.add(self._report, time.time())
                before = now
            except TransferQueueError as error:
                self._history.unreachable(f"The queue does not answer: {error}", time.time())
            except Exception as error:  # a server of another version; the page must outlive any answer
                self._history.unreachable(f"The queue's answer can't be shown: {error!r}", time.time())
            await asyncio.sleep(_EVERY_S)

    # ---- answers ----

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer requests with the token only, and with nothing that another site could use."""
        if self._token is None:
            name = request.host.rpartition(":")[0] or request.host
            if name.strip("[]") not in _LOCAL:  # a foreign name that leads here, by which a foreign page could read
                raise web.HTTPForbidden(text="Open this page as http://127.0.0.1 or http://localhost.")
        elif request.path != "/":  # the page itself tells nothing
            given = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                raise web.HTTPForbidden(text="Open the whole address that was printed, with #token=…")
        answer = await handler(request)
        answer.headers["Content-Security-Policy"] = self._policy
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["Cache-Control"] = "no-store"
        return answer

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self._page, content_type="text/html")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """What the page shows, with the points of its charts after number ``after``."""
        after = request.query.get("after", "0")[:15]  # int() raises for thousands of digits
        return web.json_response(
            {
                "now": time.time(),
                "address": self._address,
                "name": self._name,
                "bottleneck": self._history.bottleneck,
                "report": self._report,
                "points": self._history.since(int(after) if after.isdecimal() else 0),
                "problems": self._history.problems,
                "events": list(self._history.events)[::-1],
            }
        )


def _policy(page: str) -> str:
    """Nothing but the page's own script and style, and its own numbers."""
    allowed = {
        tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL)
    }
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'sha256-{allowed['script']}'; "
        f"style-src 'sha256-{allowed['style']}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
