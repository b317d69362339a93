# SPDX-License-Identifier: Apache-2.0
"""What a client sends and gets beside its messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import transfer_queue as tq
from transfer_queue.transport.base import Call


class Frames:
    """What travels beside a client's requests and their answers."""

    def __init__(self, client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.came_nbytes = 0
        ask = client.session.caller.call_many

        async def noted(calls: Any, timeout_s: float) -> Any:
            def passed() -> Iterator[Call]:
                for call in calls:
                    self.sent.append(len(call.frames))
                    yield call

            replies = await ask(passed(), timeout_s)
            self.came_nbytes += sum(frame.nbytes for reply in replies for frame in reply.frames)
            return replies

        monkeypatch.setattr(client.session.caller, "call_many", noted)
