# SPDX-License-Identifier: Apache-2.0
"""A stranger to the queue: sends requests without its keys, and prints what becomes of them.

Arguments: the queue's address. Lines of input: the type of a request.
"""

from __future__ import annotations

import contextlib
import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.integration.any_request import every_request
from transfer_queue import protocol as p
from transfer_queue.transport.framing import encode
from transfer_queue.transport.tcp_wire import CALL, HELLO, VERSION, make_keys

PATIENCE_MS = 60_000
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip


def ask(context: zmq.Context[zmq.Socket[bytes]], address: str, request: p.Request, key: str | None) -> str:
    """How the connection ended, and how many answers came."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if key is not None:
        own = make_keys()
        dealer.curve_publickey, dealer.curve_secretkey = own.public.encode(), own.secret.encode()
        dealer.curve_serverkey = key.encode()
    monitor = dealer.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):  # refused by now: there is nobody to send to
        for message in [[HELLO, VERSION, b"stranger"], [CALL, *map(bytes, encode(1, p.encode_request(request)))]]:
            dealer.send_multipart(message, zmq.DONTWAIT)
    known = monitor.poll(PATIENCE_MS) and recv_monitor_message(monitor)["event"]
    said = "refused" if known & REFUSED else f"event {known}"
    said = said if not dealer.poll(0) else f"{said}, answered {dealer.recv_multipart()}"
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close()
    return said


def main() -> None:
    requests = {type(request).__name__: request for request in (*every_request(), p.Put(1, p.Reserve(1, "p", 2)))}
    context = zmq.Context()
    print("joined", flush=True)
    for line in sys.stdin:
        request = requests[line.strip()]
        print(repr([ask(context, sys.argv[1], request, key) for key in (None, make_keys().public)]), flush=True)


if __name__ == "__main__":
    main()
