# SPDX-License-Identifier: Apache-2.0
"""The calls that a client makes: written down, something done just before one, or given up when it was answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import protocol as p
from transfer_queue.client import kv
from transfer_queue.client.get import fetch_request
from transfer_queue.storage.messages import UnitRequest
from transfer_queue.transport.base import PeerCall
from transfer_queue.transport.blocking import is_blocking, run_blocking
from transfer_queue.transport.caller import SocketCaller
from transfer_queue.transport.framing import Message

R = TypeVar("R")
_decode = p.message_decoder(*get_args(UnitRequest))


def request_of(call: PeerCall) -> Any:
    """What a call asks for."""
    return _decode(call.header).request


def kind_of(call: PeerCall) -> str:
    return type(request_of(call)).__name__


def fetch_of(fields: Sequence[str], batch_size: int, partition: str, task: str, wait_s: float = 0.0) -> p.Fetch:
    """The request of a stream's batch."""
    return fetch_request(fields, batch_size, partition, task, None, wait_s)


def blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run what a client's coroutine does in this thread, as the blocking twin of a verb does."""
    return run_blocking(coroutine)


def check_does_not_block() -> None:
    """No call of this thread has left it as if it drove a blocking one: calls of an event loop would block that."""
    assert not is_blocking()


def answered(client: tq.TransferQueueClient, request: p.Request, reply: type[R], keep: bool = False) -> R:
    """The answer to a request that is made by hand and sent as the client sends its own."""
    return blocking(client.session.send(request, reply, keep=keep))


def put_by_key(client: tq.TransferQueueClient, partition: str, key: str, value: int) -> None:
    """Put field "a" as this client: the verbs of keys put as that of the process."""
    blocking(kv.batch_put(client, [key], partition, TensorDict({"a": torch.tensor([value])}, [1]), None))


def _caller_of(client: tq.TransferQueueClient) -> SocketCaller:
    """What sends the client's calls; in a forked child its own one."""
    client.session.follow_fork()
    return client.session.caller


def exchanges(client: tq.TransferQueueClient, verb: Callable[[], object]) -> list[list[str]]:
    """Kinds of the requests that ``verb`` waits for. Those of one exchange are under way together."""
    found: list[list[str]] = []
    caller = _caller_of(client)
    ask = caller.call_many

    async def noted(calls: Any, timeout_s: float) -> list[Message]:
        made = list(calls)
        found.append([kind_of(call) for call in made])
        return await ask(made, timeout_s)

    caller.call_many = noted  # type: ignore[method-assign]
    try:
        verb()
    finally:
        del caller.call_many
    return found


@contextmanager
def giving_up(client: tq.TransferQueueClient, kind: str, error: BaseException) -> Iterator[list[Any]]:
    """Inside, the first call of this kind is answered, and then given up with ``error`` before its answer is read.

    What the transport does for a call that is given up is done here, too: its cancel is sent. Yields the requests
    that were given up.
    """
    given_up: list[Any] = []
    caller = _caller_of(client)
    ask = caller.call_many

    async def give_up(calls: Any, timeout_s: float) -> list[Message]:
        made = list(calls)
        replies = await ask(made, timeout_s)
        if given_up or kind not in map(kind_of, made):
            return replies
        given_up.extend(map(request_of, made))
        for call in made:
            if call.cancel is not None:
                await caller.post(PeerCall(call.peer, call.cancel()))
        raise error

    caller.call_many = give_up  # type: ignore[method-assign]
    try:
        yield given_up
    finally:
        del caller.call_many


@contextmanager
def before(client: tq.TransferQueueClient, kind: str, act: Callable[[], object]) -> Iterator[None]:
    """Inside, ``act`` is done once, when the first request of this kind is about to be sent. There may be several."""
    acts = [act]
    caller = _caller_of(client)
    ask, outer = caller.call_many, vars(caller).get("call_many")

    async def act_first(calls: Any, timeout_s: float) -> list[Message]:
        made = list(calls)
        if acts and kind in map(kind_of, made):
            acts.pop()()
        return await ask(made, timeout_s)

    caller.call_many = act_first  # type: ignore[method-assign]
    try:
        yield
    finally:
        if outer is None:
            del caller.call_many
        else:
            caller.call_many = outer  # type: ignore[method-assign]


def die(*_: Any, **__: Any) -> Any:
    """This process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)
