# SPDX-License-Identifier: Apache-2.0
"""Strangers, broken clients and deaf ones at the queue's socket: whoever else is there is served."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

import transfer_queue as tq
from tests.integration.any_request import every_request, some
from tests.integration.faults import (
    check_served,
    comes_true,
    framed,
    promise,
    received_replies,
    server_pids,
    stranger,
)
from transfer_queue import protocol as p
from transfer_queue.storage.messages import EndSession

CONF = {"backend": {"SimpleStorage": {"put_timeout_s": 1.0, "capacity_bytes": 64 << 20}}}
GREETING = framed(b"stranger")
OWN_TASK = "of this module's tests"
"""Strangers give tasks with the names of ``any_request.TEXTS`` samplers of their own."""


@pytest.fixture(autouse=True)
def served_in_the_end(queue: Any) -> Iterator[None]:
    """Whatever the test did, another client's put and get work."""
    yield
    check_served(queue)


def hello(queue: Any, name: str = "stranger") -> socket.socket:
    bare = stranger(queue)
    bare.sendall(framed(name.encode()))
    return bare


def sent(bare: socket.socket, data: bytes) -> bool:
    """Send all, or as much as the server takes before it closes the connection or stops reading. Was that all?"""
    try:
        bare.sendall(data)
    except (BrokenPipeError, ConnectionResetError, TimeoutError):
        return False
    return True


def seeded() -> random.Random:
    seed = random.randrange(10**6)
    print("seed", seed)
    return random.Random(seed)


# ---- bytes ----


@pytest.mark.parametrize("greets", [True, False])
def test_random_bytes_harm_nobody(queue, greets):
    chance = seeded()
    for _ in range(100):
        with stranger(queue) as bare:
            sent(bare, GREETING if greets else b"")
            sent(bare, chance.randbytes(chance.choice([1, 7, 24, 100, 70_000])))
    check_served(queue)


def test_messages_cut_at_any_byte_harm_nobody(queue):
    whole = GREETING + framed(p.encode_request(p.GetStats(1)), 1) + framed(p.encode_request(p.ListPartitions(2)), 2)
    with ExitStack() as kept:
        for stop in range(len(whole)):
            bare = kept.enter_context(stranger(queue))
            bare.sendall(whole[:stop])
        check_served(queue)
    check_served(queue)


def test_messages_with_flipped_bits_harm_nobody(queue):
    chance = seeded()
    whole = GREETING + b"".join(framed(p.encode_request(request), request.id) for request in every_request())
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(GREETING), len(data))] ^= 1 << chance.randrange(8)
        with stranger(queue) as bare:
            sent(bare, bytes(data))
    check_served(queue)


def test_a_message_that_promises_more_memory_than_there_is_harms_nobody(queue):
    for header, frames, size in [(2**31, 0, 0), (2**32 - 1, 0, 0), (5, 1, 2**40), (5, 1, 2**63), (5, 2**24, 2**30)]:
        with stranger(queue) as bare:
            sent(bare, GREETING + promise(header, frames) + size.to_bytes(8, "little") * min(frames, 1))
            sent(bare, b"x" * 4096)
            check_served(queue)


def test_a_thousand_connections_that_say_nothing_harm_nobody(queue):
    with ExitStack() as kept:
        for _ in range(900):
            kept.enter_context(stranger(queue))
        check_served(queue)
    for _ in range(2000):
        stranger(queue).close()


# ---- requests ----


def test_requests_of_any_contents_harm_nobody(queue):
    """Types are right, numbers and names are anything. Nothing clears others' samples, as a client well may."""
    chance = seeded()
    kinds = [type(request) for request in every_request()]
    clearing = ["ClearPartition", "ClearSamples", "ClearConsumed", "Delete", "Restore", "EvictClient", "ForgetTask"]
    kinds = [kind for kind in kinds if kind.__name__ not in clearing]
    for attempt in range(60):
        with hello(queue, f"stranger {attempt}") as bare:
            for number in range(1, 60):
                request = some(chance.choice(kinds), number, chance)
                sent(bare, framed(msgspec.msgpack.encode([[], request]), number))
        if attempt % 10 == 0:
            check_served(queue, f"served {attempt}")


@pytest.mark.parametrize("depth", [65, 990, 5_000])
def test_a_request_nested_deep_is_answered_with_an_error(queue, depth):
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    deep = b"\x81\xa1a" * depth + b"\x80"
    head = msgspec.msgpack.encode([[], p.Fetch(1, "p", "t", ["x"], 1)])
    empty = head.rindex(b"\x80")  # of sampler_args, the only empty mapping
    with hello(queue) as bare:
        bare.sendall(framed(head[:empty] + deep + head[empty + 1 :], 1))
        (reply,) = received_replies(bare, 1)
        assert isinstance(p.decode_reply(reply.header), p.Failed)


def test_the_same_number_again_gets_the_same_answer(client, queue, name):
    """As after a connection that was lost before the answer came."""
    reserved = f"{name}, reserved"
    put = framed(p.encode_request(p.Put(7, p.Reserve(7, reserved, 2, {}, 0.5))), 1)
    fetch = framed(p.encode_request(p.Fetch(9, name, OWN_TASK, ["x"], 1)), 2)
    insert = framed(p.encode_request(p.Insert(8, name, 2, ["x"])), 3)
    for message, partition, counts in ((put, reserved, (2, 0)), (insert, name, (2,))):  # a put ends after a second
        with hello(queue, "twice") as bare:
            bare.sendall(message + message)
            first, second = received_replies(bare, 2)
            assert first.header == second.header
            assert client.get_stats()["partitions"][partition]["samples"] in counts
            bare.sendall(framed(msgspec.msgpack.encode([[8], p.ListPartitions(10)]), 4))
            received_replies(bare, 1)
        assert comes_true(lambda: "twice" not in client.get_stats()["clients"]), "the next session has its name"
    client.put({"x": torch.arange(2)}, partition_id=name)
    with hello(queue, "fetches") as bare:
        bare.sendall(fetch + fetch)
        first, second = received_replies(bare, 2)
        assert first.header == second.header
        assert isinstance(p.decode_reply(first.header), p.Batch)
        assert client.get_stats()["partitions"][name]["tasks"][OWN_TASK]["consumed"] == 1


def test_a_client_that_comes_back_under_its_name_keeps_what_it_inserts(queue, name):
    """The controller tells all storage units of a session's end, itself among them, and the client may be faster."""
    with hello(queue, "came back") as bare, hello(queue, "controller") as controller:
        bare.sendall(framed(p.encode_request(p.Insert(1, name, 2, ["x"])), 1))
        received_replies(bare, 1)
        controller.sendall(framed(p.encode_request(EndSession(1, "came back", [])), 1))
        received_replies(controller, 1)
        assert tq.get_client().get_stats()["partitions"][name]["samples"] == 2


# ---- clients that don't listen ----


def test_a_client_that_never_reads_its_answers_harms_nobody(client, queue, name):
    """The server reads no more of its requests then. All answers together would take 2 GiB."""
    tq.kv_batch_put([f"key {n}" for n in range(2000)], name, {"x": torch.zeros(2000)}, [{"a": "b" * 20}] * 2000)
    before = server_memory(queue)  # after strangers of earlier tests, who asked for anything
    with hello(queue, "deaf") as bare, hello(queue, "deaf, too") as other:
        for one in (bare, other):
            one.settimeout(0.2)
            requests = (framed(p.encode_request(p.ListKeys(number, name)), number) for number in range(1, 16_000))
            assert not all(sent(one, request) for request in requests)
        check_served(queue)
        assert server_memory(queue) - before < 1 << 28  # what one read of each socket, and its buffer, may ask for
    assert comes_true(lambda: "deaf" not in client.get_stats().get("clients", {}))


def server_memory(queue: Any) -> int:
    import psutil

    return int(psutil.Process(server_pids(queue)[0]).memory_info().rss)


@pytest.mark.programs
def test_large_answers_that_nobody_takes_are_released_with_their_client(client, queue, name):
    client.put({"x": torch.zeros(8, 500_000)}, partition_id=name)
    with hello(queue, "deaf") as bare:
        for number in range(1, 50):
            fetch = p.Fetch(
                number, name, OWN_TASK, ["x"], 1, batch_index=number % 8, dp_rank=0, with_values=True, mapped=True
            )
            sent(bare, framed(p.encode_request(fetch), number))
        received_replies(bare, 1)
        check_served(queue)
        assert client.get_storage_stats()[0]["pins"] > 0
    assert comes_true(lambda: client.get_storage_stats()[0]["pins"] == 0)
    assert client.get_data(client.get_meta(["x"], 8, name, task_name="u"))["x"].values().numel() == 4_000_000
