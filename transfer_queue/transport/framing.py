# SPDX-License-Identifier: Apache-2.0
"""Messages on a byte stream, in client and server. Uses only three methods of a socket.

    head:    a mark, the header's size, the number of the call, the number of frames and their sizes
    header:  a short encoded message
    frames:  buffers of values, unchanged and uncopied

Ctrl-C may be raised between any two steps of Python. So bytes are moved and counted in one step, which runs in C.
"""

from __future__ import annotations

import contextlib
import operator
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transfer_queue.transport.base import Buffer

# Both ends have the same version and byte order. The mark changes with the format.
_MARK = b"TQL1"
_PREFIX = struct.Struct("=4sIQQ")  # mark, size of the header, number of the call, number of frames; their sizes follow
_SIZE = 8
_MAX_HEADER = 1 << 31
_MAX_FRAMES = 1 << 24
_MAX_FRAME = 1 << 40
_ONE_CHUNK = (1 << 15,)
_OWN_MEMORY = 1 << 14
_MAX_BUFFERS = 1024  # the kernel's limit per call
_COUNT = operator.itemgetter(0)


class FramingError(Exception):
    """The stream is not in our format; nothing that follows on it can be read."""


class Message(NamedTuple):
    """The frames are read-only views. None of them shares memory with another message's frames."""

    number: int
    header: bytes
    frames: list[memoryview]


class ByteSource(Protocol):
    """A source of bytes: a non-blocking socket."""

    def recv(self, size: int, /) -> bytes: ...

    def recvmsg_into(self, buffers: Iterable[Any], /) -> tuple[int, Any, Any, Any]: ...


class ByteSink(Protocol):
    """A sink of bytes: a non-blocking socket."""

    def sendmsg(self, buffers: Iterable[Any], /) -> int: ...


def encode(number: int, header: bytes, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers to send in order; frames are not copied."""
    if not frames:
        return [_PREFIX.pack(_MARK, len(header), number, 0) + header]
    views, sizes = [], array("Q")
    for frame in frames:
        view = memoryview(frame)
        sizes.append(view.nbytes)
        if view.nbytes:
            views.append(view.cast("B"))
    head = _PREFIX.pack(_MARK, len(header), number, len(sizes)) + sizes.tobytes() + header
    return [head, *views]


class _Buffers:
    """Buffers that are sent or filled in order, and the progress."""

    __slots__ = ("_state",)

    def __init__(self, buffers: list[Buffer]) -> None:
        # The remaining buffers, and the bytes moved since then. Both are replaced together, by one assignment.
        self._state: tuple[list[Buffer], list[int]] = (buffers, [])

    def left(self) -> list[Buffer]:
        buffers, moved = self._state
        if moved:
            buffers = _after(buffers, sum(moved))
            self._state = (buffers, [])
        return buffers

    def move(self, some: Callable[[list[Buffer]], Iterator[int]]) -> int:
        """Move some bytes. Returns how many; raises what the attempt raises.

        ``some`` must run in C only. Ctrl-C is raised between two steps of Python, and there is none between moving the
        bytes and recording their number.
        """
        buffers = self.left()
        _, moved = self._state
        moved.extend(some(buffers[:_MAX_BUFFERS]))
        return moved[0]


def _after(buffers: list[Buffer], nbytes: int) -> list[Buffer]:
    """The rest of the buffers after this many bytes."""
    for position, buffer in enumerate(buffers):
        if len(buffer) > nbytes:
            return [memoryview(buffer)[nbytes:] if nbytes else buffer, *buffers[position + 1 :]]
        nbytes -= len(buffer)
    return []


class Outbound(_Buffers):
    """What could not be sent yet."""

    __slots__ = ("num_messages",)

    def __init__(self) -> None:
        super().__init__([])
        self.num_messages = 0
        """Roughly how many messages wait: those since the queue was last empty."""

    def __bool__(self) -> bool:
        return bool(self._state[0]) and bool(self.left())

    def send(self, sink: ByteSink, parts: list[Buffer]) -> bool:
        """Send after everything that waits, as much as possible now. The buffers are kept until they are sent.

        Returns whether nothing waits any more.

        Raises:
            OSError: the other side has closed.
        """
        if self:
            self._state = ([*self.left(), *parts], [])
            self.num_messages += 1
            return False
        moved: list[int] = []
        self._state = (parts, moved)
        self.num_messages = 1
        try:
            moved.extend(map(sink.sendmsg, (parts[:_MAX_BUFFERS],)))  # see ``move``
        except BlockingIOError:
            return False
        if moved[0] < sum(map(len, parts)):
            return False
        self._state = ([], [])
        return True

    def flush(self, sink: ByteSink) -> None:
        """Send as much as possible now."""
        with contextlib.suppress(BlockingIOError):
            self.move(lambda some: map(sink.sendmsg, (some,)))

    def own(self) -> None:
        """Copy what waits, because its owners may change the buffers from now on."""
        if self:
            self._state = ([part if isinstance(part, bytes) else bytes(part) for part in self.left()], [])

    def clear(self) -> None:
        """Drop everything: the other side has closed."""
        self._state = ([], [])


class Inbound:
    """Splits arriving bytes into messages, however they were split on the way."""

    def __init__(self) -> None:
        # Chunks of an incomplete message, (number of measured chunks, their bytes), and frames being received.
        # All are replaced by one assignment, so that Ctrl-C between two steps loses nothing that was read.
        self._state: tuple[list[bytes], tuple[int, int], _Body | None] = ([], (0, 0), None)
        self._need = 1

    def receive(self, source: ByteSource) -> list[Message]:
        """Read once and return the complete messages.

        Raises:
            BlockingIOError: there is nothing to read.
            EOFError: the other side has closed.
            FramingError: the stream is not in our format.
        """
        chunks, (measured, size), body = self._state
        if body is not None:
            message = body.receive(source)
            if message is None:
                return []
            self._state = ([], (0, 0), None)
            return [message]
        chunks.extend(map(source.recv, _ONE_CHUNK))  # in one step of Python: see ``_Buffers.move``
        if not chunks[-1]:
            raise EOFError
        if len(chunks) == 1 and (message := _whole(chunks[0])) is not None:
            chunks.clear()
            return [message]
        size += sum(map(len, chunks[measured:]))  # not all of them again: a peer may send byte by byte
        self._state = (chunks, (len(chunks), size), None)
        if size < self._need:
            return []
        return self._cut(b"".join(chunks))

    def _cut(self, data: bytes) -> list[Message]:
        messages = []
        body = None
        at, self._need = 0, 1
        while at < len(data) and (head := self._head(data, at)) is not None:
            number, header, sizes, body_at = head
            at = body_at + sum(sizes)
            if at > len(data):
                body = _Body(number, header, sizes, memoryview(data)[body_at:])
            else:
                messages.append(Message(number, header, _views(memoryview(data[body_at:at]), sizes)))
        self._state = ([data[at:]] if at < len(data) else [], (0, 0), body)
        return messages

    def _head(self, data: bytes, at: int) -> tuple[int, bytes, Sequence[int], int] | None:
        """Number of the call, header, sizes of the frames and their offset; None if more must be read first."""
        left = len(data) - at
        if not data.startswith(_MARK[:left], at):
            raise FramingError(f"not a message of this version: {data[at : at + _PREFIX.size]!r}")
        if left < _PREFIX.size:
            self._need = _PREFIX.size
            return None
        _, header_size, number, num_frames = _PREFIX.unpack_from(data, at)
        if header_size > _MAX_HEADER or num_frames > _MAX_FRAMES:
            raise FramingError(f"a message with a header of {header_size} bytes and {num_frames} frames.")
        sizes_at = at + _PREFIX.size
        header_at = sizes_at + num_frames * _SIZE
        body_at = header_at + header_size
        if len(data) < body_at:
            self._need = body_at - at
            return None
        sizes = memoryview(data)[sizes_at:header_at].cast("Q").tolist() if num_frames else ()
        return number, data[header_at:body_at], sizes, body_at


def _whole(chunk: bytes) -> Message | None:
    """Decode a chunk that is exactly one message, as nearly every small one is. None: it is not.

    Without this and the first attempt in ``Outbound.send``, small puts and gets take 4 % longer (benchmarks.small_ops).
    """
    if len(chunk) < _PREFIX.size:
        return None
    mark, header_size, number, num_frames = _PREFIX.unpack_from(chunk)
    header_at = _PREFIX.size + num_frames * _SIZE
    body_at = header_at + header_size
    if mark != _MARK or len(chunk) < body_at:
        return None
    if not num_frames:
        return Message(number, chunk[header_at:], []) if len(chunk) == body_at else None
    memory = memoryview(chunk)
    sizes = memory[_PREFIX.size : header_at].cast("Q").tolist()
    if len(chunk) != body_at + sum(sizes):
        return None
    return Message(number, chunk[header_at:body_at], _views(memory[body_at:], sizes))


def _views(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    views, at = [], 0
    for size in sizes:
        views.append(memory[at : at + size])
        at += size
    return views


class _Body:
    """The frames of one message, received into memory of their own without a further copy."""

    def __init__(self, number: int, header: bytes, sizes: Sequence[int], received: memoryview) -> None:
        """``received``: the first bytes of the frames, which came with the head."""
        if max(sizes) > _MAX_FRAME:
            raise FramingError(f"a frame of {max(sizes)} bytes.")
        frames: list[memoryview] = []
        missing: list[Buffer] = []
        for run in _runs(sizes):
            try:
                memory = memoryview(np.empty(sum(run), np.uint8).data)
            except MemoryError:
                raise FramingError(f"{sum(run):,} bytes, for which this process has no memory.") from None
            frames += _views(memory, run)
            if memory.nbytes:
                missing.append(memory)
        self._message = Message(number, header, [frame.toreadonly() for frame in frames])
        self._missing = _Buffers(_after_filling(missing, received))

    def receive(self, source: ByteSource) -> Message | None:
        """Read once; return the message once it is complete."""
        if self._missing.left() and not self._missing.move(lambda some: map(_COUNT, map(source.recvmsg_into, (some,)))):
            raise EOFError
        return None if self._missing.left() else self._message


def _after_filling(buffers: list[Buffer], received: memoryview) -> list[Buffer]:
    """Copy these bytes into the first buffers, and return the rest."""
    left = received
    for buffer in buffers:
        taken = min(len(left), len(buffer))
        buffer[:taken] = left[:taken]
        left = left[taken:]
    return _after(buffers, len(received))


def _runs(sizes: Sequence[int]) -> Iterable[list[int]]:
    """Group frames by memory: a large frame gets its own, so that keeping it keeps nothing else; small neighbours
    share.
    """
    run: list[int] = []
    total = 0
    for size in sizes:
        if run and total + size >= _OWN_MEMORY:
            yield run
            run, total = [], 0
        run.append(size)
        total += size
    yield run
