# SPDX-License-Identifier: Apache-2.0
"""What client and server agree on between hosts: the keys, the kinds of message, and calls as ZMQ messages."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.z85 import Z85CHARS

from transfer_queue.errors import ConfigError
from transfer_queue.transport.base import Buffer
from transfer_queue.transport.framing import Inbound, Message, encode

SCHEME = "tcp://"
VERSION = b"TQT1"
HELLO, BEAT, BYE, CALL = b"H", b"B", b"E", b"C"
"""The first part of a message. HELLO: then the version and a client's name. CALL: then parts of calls or answers."""
LINGER_MS = 500

_PART_NBYTES = 1 << 18
_LEAST_SHARED = 1 << 16
"""To copy less than this takes less time than to share it with ZMQ."""
_MAX_PARTS = 1024
_KEY_CHARACTERS = 40
_Z85 = frozenset(Z85CHARS.decode())
"""The characters of a key."""


# ---- messages ----


def pack(number: int, header: bytes, frames: Sequence[Buffer], copy: bool = True) -> Iterator[list[Any]]:
    """Encode a call or an answer as ZMQ messages. ``copy``: all of it, so that the owners may change their buffers.

    A message arrives whole or not at all. So a large one is sent in parts, each of which shows that the sender is
    alive.
    """
    message: list[Any] = [CALL]
    room = _PART_NBYTES
    for part in encode(number, header, frames):
        view = memoryview(part)
        while view:
            message.append(zmq.Frame(view[:room], copy=copy or len(view) < _LEAST_SHARED))
            view, room = view[room:], room - min(room, len(view))
            if not room or len(message) > _MAX_PARTS:
                yield message
                message, room = [CALL], _PART_NBYTES
    if len(message) > 1:
        yield message


class PartsReader:
    """Reassembles messages from the parts that ``pack`` made."""

    def __init__(self) -> None:
        self._inbound = Inbound()
        self._left: deque[memoryview] = deque()

    def add(self, parts: Sequence[zmq.Frame]) -> list[Message]:
        """Return the complete messages. Raises FramingError for parts that ``pack`` did not make."""
        self._left.extend(part.buffer for part in parts if len(part))
        messages = []
        while self._left:
            messages += self._inbound.receive(self)
        return messages

    def recv(self, size: int) -> bytes:
        """See ``framing.ByteSource``."""
        taken = []
        while self._left and size:
            taken.append(self._take(size))
            size -= len(taken[-1])
        return b"".join(taken)

    def recvmsg_into(self, buffers: Iterable[Any]) -> tuple[int, Any, Any, Any]:
        """See ``framing.ByteSource``. It fills the first buffer only, from one part."""
        buffer = next(iter(buffers))
        taken = self._take(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken), [], 0, None

    def _take(self, size: int) -> memoryview:
        taken = self._left[0][:size]
        if len(taken) == len(self._left[0]):
            self._left.popleft()
        else:
            self._left[0] = self._left[0][size:]
        return taken


# ---- keys: with the public one a client may connect; others get no answer ----


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """A pair of CURVE keys, in the alphabet of Z85."""

    public: str
    secret: str = field(repr=False)


def make_keys() -> ServerKeys:
    """Make a new pair."""
    public, secret = zmq.curve_keypair()
    return ServerKeys(public.decode(), secret.decode())


def write_keys(path: str | Path, keys: ServerKeys | None = None) -> ServerKeys:
    """Write a pair, a new one by default, to a new file that only this user can read.

    Raises:
        FileExistsError: there is a file already, and its keys may be in use.
    """
    keys = keys or make_keys()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump({"public": keys.public, "secret": keys.secret}, file)
    except OSError:  # such as a full disk
        os.unlink(path)
        raise
    return keys


def make_key_file(path: str | Path) -> None:
    """Make the keys of a queue before any server runs: the file that ``key_file`` and TQ_KEY_FILE name.

    Only this user can read it. Copy it to the other hosts before their servers and programs start.

    Raises:
        ConfigError: there is a file already, or none can be made there.
    Examples:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "keys")
        >>> tq.make_key_file(path)
        >>> oct(os.stat(path).st_mode & 0o777)
        '0o600'
    """
    try:
        write_keys(path)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already, and a queue may use its keys. Name another file, or remove this one."
        ) from error
    except OSError as error:
        raise ConfigError(f"can't write keys to {path}: {error.strerror or error}.") from error


def read_keys(path: str | Path) -> ServerKeys:
    """Read both keys, for a server. Raises ConfigError if they are missing, or other users can read them."""
    return ServerKeys(_key(path, "public"), _key(path, "secret"))


def read_public_key(path: str | Path) -> str:
    """Read the key that a client needs; its file may lack the secret. Raises ConfigError: see ``read_keys``."""
    return _key(path, "public")


def _key(path: str | Path, name: str) -> str:
    try:
        with open(path) as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the keys in {path}: {error}. lightning-tq keys FILE makes some.") from error
    if mode & 0o077:
        raise ConfigError(f"other users can read the keys in {path} (mode {mode:o}): chmod 600, and make new ones.")
    key = found.get(name) if isinstance(found, dict) else None
    if not isinstance(key, str) or len(key) != _KEY_CHARACTERS or not _Z85.issuperset(key):
        raise ConfigError(f"there is no {name} key in {path}.")
    return key
