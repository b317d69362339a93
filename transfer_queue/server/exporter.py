# SPDX-License-Identifier: Apache-2.0
"""The exporter: Prometheus metrics over HTTP. At each scrape it asks the servers, as any client does, in a thread."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from transfer_queue.errors import ConfigError, LaunchError, TransferQueueError
from transfer_queue.server.metric_families import metrics_of
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.utils.machine import host_and_port, is_any_host

if TYPE_CHECKING:
    from prometheus_client import Metric

    from transfer_queue.config import FullConfig
    from transfer_queue.storage.base import StorageManager

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
ANSWER_S = 3.0
"""Longest wait of a scrape for a server's answer; Prometheus stops waiting after 10 s."""
_BUSY_S = 1.0
"""Longest wait for a scrape at the end."""
MOST_CONNECTIONS = 16
"""At the same time; Prometheus needs one. Each has a thread and a descriptor of the server's process."""
CONNECTION_S = 15.0
"""A connection is ended after this, however slowly it asks or reads."""


class Exporter:
    """Serves ``http://<endpoint>/metrics`` from its constructor until ``close``."""

    def __init__(self, host: str, port: int, storage: Callable[[], StorageManager]) -> None:
        """
        Args:
            port: 0 takes a free one.
            storage: Makes a client of the storage, with a session of its own, at the first scrape.
        Raises:
            ConfigError: prometheus-client isn't installed.
            LaunchError: the port is in use.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise ConfigError(
                "metrics.enabled needs the package prometheus-client: "
                "install lightning-tq with its extra 'metrics' (docs/start.md)."
            ) from None
        self._make_storage = storage
        self._storage: StorageManager | None = None
        self._lock = threading.Lock()  # Prometheus and a browser may ask at the same time
        self._started = time.monotonic()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = MetricsServer(host, port)
        except OSError as error:
            raise LaunchError(
                f"metrics can't be served at {host}:{port}: {error.strerror or error}. Port 0 takes any free one."
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="tq-metrics", daemon=True)
        self._thread.start()
        shown = socket.gethostname() if is_any_host(host) else f"[{host}]" if ":" in host else host
        self.endpoint = f"{shown}:{self._server.server_port}"
        """ "host:port"; of a server at all addresses, with this host's name."""

    def collect(self) -> Iterable[Metric]:
        """What the registry asks for at each scrape."""
        with self._lock:
            self._storage = self._storage or self._make_storage()
            self._storage.session.timeout_s = ANSWER_S
            stats = run_blocking(self._storage.session.stats())
            try:
                units = run_blocking(self._storage.numbers())
            except TransferQueueError:  # a unit has just ended, or hangs; the controller will know
                units = []
        process = {"uptime_s": time.monotonic() - self._started, "rss_nbytes": _rss_nbytes()}
        return metrics_of(stats, units, process)

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._storage is not None and self._lock.acquire(timeout=_BUSY_S):
            run_blocking(self._storage.close())
            self._storage.session.close()


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A web server with a thread per connection, of which there are few, each for a short time."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, connection_s: float = CONNECTION_S) -> None:
        """Raises OSError if it can't listen there."""
        self._connection_s = connection_s
        self._since: dict[socket.socket, float] = {}
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__((str(address[0]), port), _QuietHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A new connection. One too many is closed at once."""
        if len(self._since) >= MOST_CONNECTIONS:
            return self.shutdown_request(request)
        self._since[request] = time.monotonic()
        return super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The connection has ended; called in its thread."""
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: the thread of a connection that takes too long finds it closed."""
        late = time.monotonic() - self._connection_s
        for request in [each for each, since in list(self._since.items()) if since < late]:
            with contextlib.suppress(OSError):  # it has just ended
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore what went wrong with a connection; the default would print a traceback."""


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no request."""


def metrics_host(config: FullConfig) -> str:
    """Where the queue's metrics are served: as configured, else where it listens for other hosts, else here alone."""
    if config.metrics.host is not None or config.listen is None:
        return config.metrics.host or "127.0.0.1"
    host, _ = host_and_port(config.listen)
    return "0.0.0.0" if host == "*" else host.strip("[]")


def _rss_nbytes() -> int | None:
    """Memory of this process; None where the system doesn't say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE_NBYTES
    except OSError:
        return None
