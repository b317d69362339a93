# SPDX-License-Identifier: Apache-2.0
"""Messages on a byte stream: the same ones whatever the stream was split into, and none made of garbage."""

from __future__ import annotations

import gc
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.transport.framing import FramingError, Inbound, Message, Outbound, encode


class Pipe:
    """Both ends of a stream that takes and gives as many bytes at a time as it was told; nothing, where that is 0."""

    def __init__(self, takes: list[int], gives: list[int]) -> None:
        self.data = bytearray()
        self.takes, self.gives = takes, gives

    def sendmsg(self, buffers) -> int:
        buffers = list(buffers)
        assert len(buffers) <= 1024
        whole = b"".join(bytes(buffer) for buffer in buffers)
        size = self._next(self.takes, len(whole))
        self.data += whole[:size]
        return size

    def recv(self, size: int) -> bytes:
        return self._give(size)

    def recvmsg_into(self, buffers):
        buffers = list(buffers)
        assert len(buffers) <= 1024
        given, at = self._give(sum(len(buffer) for buffer in buffers)), 0
        for buffer in buffers:
            part = given[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(given), [], 0, None

    def _give(self, size: int) -> bytes:
        size = self._next(self.gives, min(size, len(self.data)))
        data = bytes(self.data[:size])
        del self.data[:size]
        return data

    def _next(self, sizes: list[int], most: int) -> int:
        size = min(sizes.pop(), most) if sizes else most
        if not size:
            raise BlockingIOError
        return size


def received(inbound: Inbound, pipe: Pipe) -> list[Message]:
    messages: list[Message] = []
    while pipe.data:
        try:
            messages += inbound.receive(pipe)
        except BlockingIOError:
            continue
    return messages


def plain(messages: list[Message]) -> list[tuple[int, bytes, list[bytes]]]:
    return [(each.number, each.header, [bytes(frame) for frame in each.frames]) for each in messages]


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([1 << 14, (1 << 14) - 1, 40_000, 100_000]))
MESSAGES = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=60), st.lists(SIZES, max_size=6)), min_size=1, max_size=8
)
SPLITS = st.lists(st.one_of(st.integers(0, 60), st.integers(0, 70_000)), max_size=60)


@settings(deadline=None, print_blob=True)
@given(MESSAGES, SPLITS, SPLITS)
def test_any_split_of_the_stream_gives_the_same_messages(described, takes, gives):
    sent = [
        (number, header, [bytes([(position + size) % 256]) * size for position, size in enumerate(sizes)])
        for number, header, sizes in described
    ]
    pipe, outbound, inbound = Pipe(takes, gives), Outbound(), Inbound()
    got: list[Message] = []
    for number, header, frames in sent:
        outbound.send(pipe, encode(number, header, frames))
        got += received(inbound, pipe)
    while outbound:
        outbound.flush(pipe)
        got += received(inbound, pipe)
    assert plain(got) == sent
    assert all(frame.readonly for message in got for frame in message.frames)


@pytest.mark.parametrize("split", [1, 19, 4096, 1 << 30])
def test_more_frames_and_a_longer_header_than_one_read_holds_arrive_whole(split):
    frames = [b"%d" % number for number in range(5000)] + [b"x" * 20_000] * 1500
    header = b"h" * 300_000
    pipe = Pipe([], [])
    outbound, inbound = Outbound(), Inbound()
    outbound.send(pipe, encode(7, header, frames))
    while outbound:
        outbound.flush(pipe)
    pipe.gives = [split] * 2000
    assert plain(received(inbound, pipe)) == [(7, header, frames)]


def test_frames_are_sent_without_a_copy():
    frame = np.zeros(1 << 20, np.uint8)
    (_, part) = encode(1, b"h", [frame])
    assert np.shares_memory(np.frombuffer(part, np.uint8), frame)


def test_a_message_keeps_nothing_of_its_neighbours_and_a_large_frame_nothing_of_its_message():
    pipe, inbound = Pipe([], []), Inbound()
    small = Message(0, b"", [memoryview(b"s" * 64)])
    for number in range(200):
        Outbound().send(pipe, encode(number, b"", small.frames))
    Outbound().send(pipe, encode(200, b"", [b"a" * 4_000_000, b"b" * 100_000]))
    tracemalloc.start()
    messages = received(inbound, pipe)
    kept = [messages[3].frames[0], messages[-1].frames[1]]
    del messages
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(frame) for frame in kept] == [64, 100_000]
    assert held < 150_000


PREFIX = struct.Struct("=4sIQQ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 100,
        PREFIX.pack(b"TQL1", 2**32 - 1, 1, 0),
        PREFIX.pack(b"TQL1", 0, 1, 2**63),
        PREFIX.pack(b"TQL1", 0, 1, 1) + struct.pack("=Q", 2**62),
        PREFIX.pack(b"TQL1", 0, 1, 2) + struct.pack("=QQ", 2**64 - 1, 2**64 - 1),
        PREFIX.pack(b"TQL1", 0, 1, 0) + b"TQL0" + bytes(20),
    ],
    ids=["http", "noise", "header too long", "too many frames", "frame too long", "sizes that overflow", "second one"],
)
def test_garbage_is_refused_at_once_and_takes_no_memory(garbage):
    pipe = Pipe([], [])
    pipe.data += garbage
    with pytest.raises(FramingError):
        received(Inbound(), pipe)
