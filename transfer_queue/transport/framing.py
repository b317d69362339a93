# SPDX-License-Identifier: Apache-2.0
"""Messages on a byte stream: a short head, then the frames as they are. Knows no socket, only its three methods."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transfer_queue.transport.base import Buffer

# Both ends are processes of one host and one version: numbers travel in its byte order, the mark changes with the form.
_MARK = b"TQL1"
_PREFIX = struct.Struct("=4sIQQ")  # mark, size of the header, request id, number of frames; their sizes follow
_SIZE = 8
_MAX_HEADER = 1 << 31
_MAX_FRAMES = 1 << 24
_MAX_FRAME = 1 << 40
_CHUNK = 1 << 15
_OWN_MEMORY = 1 << 14
_MAX_PIECES = 1024  # the kernel's limit on buffers per call


class FramingError(Exception):
    """What arrived is no message of ours; nothing that follows on this stream can be read."""


class Message(NamedTuple):
    """The frames are read-only views. None of them shares memory with another message's."""

    request_id: int
    header: bytes
    frames: list[memoryview]


class Source(Protocol):
    """Where bytes come from: a non-blocking socket."""

    def recv(self, size: int, /) -> bytes: ...

    def recvmsg_into(self, buffers: Iterable[Any], /) -> tuple[int, Any, Any, Any]: ...


class Sink(Protocol):
    """Where bytes go: a non-blocking socket."""

    def sendmsg(self, buffers: Iterable[Any], /) -> int: ...


def encode(request_id: int, header: bytes, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to send one after the other; frames are not copied."""
    if not frames:
        return [_PREFIX.pack(_MARK, len(header), request_id, 0) + header]
    flat = [memoryview(frame) for frame in frames]
    sizes = array("Q", [view.nbytes for view in flat]).tobytes()
    head = _PREFIX.pack(_MARK, len(header), request_id, len(flat)) + sizes + header
    return [head, *(view.cast("B") for view in flat if view.nbytes)]


class Outbound:
    """What could not be sent yet."""

    def __init__(self) -> None:
        self._parts: deque[Buffer] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def send(self, sink: Sink, parts: Sequence[Buffer]) -> None:
        """Send after what waits already, as far as it goes now; the buffers are kept until they are sent.

        Raises:
            OSError: the other side has closed.
        """
        waiting = self._parts
        if not waiting and len(parts) <= _MAX_PIECES:
            try:
                sent = sink.sendmsg(parts)
            except BlockingIOError:
                sent = 0
            if sent == sum(map(len, parts)):
                return
            waiting.extend(parts)
            self._take(sent)
            return
        waiting.extend(parts)
        if len(waiting) == len(parts):
            self.flush(sink)

    def flush(self, sink: Sink) -> None:
        """Send what goes now."""
        parts = self._parts
        some = list(parts) if len(parts) <= _MAX_PIECES else [parts[i] for i in range(_MAX_PIECES)]
        try:
            sent = sink.sendmsg(some)
        except BlockingIOError:
            return
        self._take(sent)

    def own(self) -> None:
        """Copy what waits: its buffers may be changed by their owners from now on."""
        self._parts = deque(part if isinstance(part, bytes) else bytes(part) for part in self._parts)

    def _take(self, sent: int) -> None:
        parts = self._parts
        while sent and (size := len(parts[0])) <= sent:
            sent -= size
            parts.popleft()
        if sent:
            parts[0] = memoryview(parts[0])[sent:]


class Inbound:
    """Cuts what arrives into messages, however it was split on its way."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._need = 1
        self._body: _Body | None = None

    def receive(self, source: Source) -> list[Message]:
        """Read once; the messages that are whole now.

        Raises:
            BlockingIOError: there is nothing to read.
            EOFError: the other side has closed.
            FramingError: a stranger.
        """
        if self._body is not None:
            message = self._body.receive(source)
            if message is None:
                return []
            self._body = None
            return [message]
        chunk = source.recv(_CHUNK)
        if not chunk:
            raise EOFError
        if not self._pieces and (message := _whole(chunk)) is not None:
            return [message]
        self._pieces.append(chunk)
        self._size += len(chunk)
        if self._size < self._need:
            return []
        return self._cut(chunk if len(self._pieces) == 1 else b"".join(self._pieces))

    def _cut(self, data: bytes) -> list[Message]:
        messages = []
        at, self._need = 0, 1
        while at < len(data) and (head := self._head(data, at)) is not None:
            request_id, header, sizes, body_at = head
            end = body_at + sum(sizes)
            if end <= len(data):
                own, begin = (data, body_at) if at == 0 and end == len(data) else (data[body_at:end], 0)
                messages.append(Message(request_id, header, _views(memoryview(own), begin, sizes)))
                at = end
            else:
                self._body = _Body(request_id, header, sizes, memoryview(data)[body_at:])
                at = len(data)
        self._pieces = [data[at:]] if at < len(data) else []
        self._size = len(data) - at
        return messages

    def _head(self, data: bytes, at: int) -> tuple[int, bytes, Sequence[int], int] | None:
        """Request id, header, sizes of the frames and where these begin; None when more must be read first."""
        left = len(data) - at
        if not data.startswith(_MARK[:left], at):
            raise FramingError(f"not a message of this version: {data[at : at + _PREFIX.size]!r}")
        if left < _PREFIX.size:
            self._need = _PREFIX.size
            return None
        _, header_size, request_id, num_frames = _PREFIX.unpack_from(data, at)
        if header_size > _MAX_HEADER or num_frames > _MAX_FRAMES:
            raise FramingError(f"a message with a header of {header_size} bytes and {num_frames} frames.")
        sizes_at = at + _PREFIX.size
        header_at = sizes_at + num_frames * _SIZE
        body_at = header_at + header_size
        if len(data) < body_at:
            self._need = body_at - at
            return None
        sizes = memoryview(data)[sizes_at:header_at].cast("Q").tolist() if num_frames else ()
        return request_id, data[header_at:body_at], sizes, body_at


def _whole(chunk: bytes) -> Message | None:
    """The message that this is from end to end: nearly every small one. None: look closer."""
    if len(chunk) < _PREFIX.size:
        return None
    mark, header_size, request_id, num_frames = _PREFIX.unpack_from(chunk)
    header_at = _PREFIX.size + num_frames * _SIZE
    body_at = header_at + header_size
    if mark != _MARK or len(chunk) < body_at:
        return None
    if not num_frames:
        return Message(request_id, chunk[header_at:], []) if len(chunk) == body_at else None
    memory = memoryview(chunk)
    sizes = memory[_PREFIX.size : header_at].cast("Q").tolist()
    if len(chunk) != body_at + sum(sizes):
        return None
    return Message(request_id, chunk[header_at:body_at], _views(memory, body_at, sizes))


def _views(memory: memoryview, at: int, sizes: Sequence[int]) -> list[memoryview]:
    views = []
    for size in sizes:
        views.append(memory[at : at + size])
        at += size
    return views


class _Body:
    """The frames of one message on their way into memory of their own, read there without a copy in between."""

    def __init__(self, request_id: int, header: bytes, sizes: Sequence[int], begun: memoryview) -> None:
        """``begun``: the part of them that has been read already."""
        if max(sizes) > _MAX_FRAME:
            raise FramingError(f"a frame of {max(sizes)} bytes.")
        frames: list[memoryview] = []
        self._missing: deque[memoryview] = deque()
        for run in _runs(sizes):
            try:
                memory = memoryview(np.empty(sum(run), np.uint8).data)
            except MemoryError:
                raise FramingError(f"no memory for {sum(run)} bytes.") from None
            frames += _views(memory, 0, run)
            if memory.nbytes:
                self._missing.append(memory)
        self._message = Message(request_id, header, [frame.toreadonly() for frame in frames])
        while begun:
            taken = min(len(begun), len(self._missing[0]))
            self._missing[0][:taken] = begun[:taken]
            begun = begun[taken:]
            self._advance(taken)

    def receive(self, source: Source) -> Message | None:
        """Read once; the message when it is whole."""
        missing = self._missing
        some = list(missing) if len(missing) <= _MAX_PIECES else [missing[i] for i in range(_MAX_PIECES)]
        taken = source.recvmsg_into(some)[0]
        if not taken:
            raise EOFError
        self._advance(taken)
        return None if missing else self._message

    def _advance(self, taken: int) -> None:
        missing = self._missing
        while taken and (size := len(missing[0])) <= taken:
            taken -= size
            missing.popleft()
        if taken:
            missing[0] = missing[0][taken:]


def _runs(sizes: Sequence[int]) -> Iterable[list[int]]:
    """A large frame gets memory of its own, so that keeping it keeps nothing else; small neighbours share some."""
    run: list[int] = []
    total = 0
    for size in sizes:
        if run and total + size >= _OWN_MEMORY:
            yield run
            run, total = [], 0
        run.append(size)
        total += size
    yield run
