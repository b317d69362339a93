# SPDX-License-Identifier: Apache-2.0
"""A unit's arena as a client on the same host sees it."""

from __future__ import annotations

import itertools
import mmap
import os

import numpy as np

from transfer_queue.storage.pieces import ByteArray
from transfer_queue.storage.simple.arena import PAGE_NBYTES
from transfer_queue.storage.simple.changes import Changes
from transfer_queue.storage.simple.messages import Hold
from transfer_queue.storage.simple.views import Segment, Use
from transfer_queue.storage.simple.words import BEGIN, LET_GO, pack_word
from transfer_queue.transport.attachments import Attachment, attach

_SCHEME = "ipc://"
_SUFFIX = ".arena"


def arena_path(address: str) -> str | None:
    """Where a unit at this address lends its arena; None for one that may be on another host."""
    return address.removeprefix(_SCHEME) + _SUFFIX if address.startswith(_SCHEME) else None


class MappedArena:
    """Mapped whole, once: only pages that are touched cost anything."""

    def __init__(self, attachment: Attachment) -> None:
        """Raises OSError where a mapping of this size is refused."""
        self._attachment = attachment
        self._numbers = itertools.count(1)
        self.use = Use(attachment.close)
        self.nbytes = int.from_bytes(attachment.greeting, "little")
        self.descriptor = attachment.descriptor
        mapped = mmap.mmap(attachment.descriptor, self.nbytes + PAGE_NBYTES)
        self._memory = np.frombuffer(mapped, np.uint8, self.nbytes)
        self.changes = Changes(mapped, self.nbytes)
        self._first = int(self._memory.__array_interface__["data"][0])

    def hold(self) -> Hold:
        """A name for a hold to ask for."""
        self._attachment.catch_up()
        return Hold(self._attachment.number, next(self._numbers))

    def view(self, offset: int, nbytes: int) -> ByteArray:
        return self._memory[offset : offset + nbytes]

    def close(self) -> None:
        """All holds fall once nobody reads or writes where the values lie: until then ``use`` has one user more."""
        self.use.less()

    def segment(self, memory: ByteArray) -> Segment | None:
        """Which part of the arena this memory is."""
        offset = int(memory.__array_interface__["data"][0]) - self._first
        inside = offset >= 0 and offset + memory.nbytes <= self.nbytes
        return Segment(self.descriptor, offset, memory.nbytes) if inside else None

    def begin(self, hold: Hold) -> bool:
        """Say that this client writes into a lease from now on. Returns False where the unit can't hear it now."""
        # Not through another thread, which might be held up until the lease has expired.
        return self._attachment.say_at_once(pack_word(BEGIN, hold.number))

    def let_go(self, hold: Hold) -> None:
        """Say that this client has no use for a hold any more, whether it was granted or not."""
        self._attachment.say(pack_word(LET_GO, hold.number))


def map_arena(address: str) -> MappedArena | None:
    """The arena of the unit at this address, or None: another host, switched off, or no mapping to be had here."""
    path = arena_path(address)
    attachment = None if path is None or not os.path.exists(path) else attach(path)
    if attachment is None:
        return None
    try:
        return MappedArena(attachment)
    except (OSError, ValueError, OverflowError):  # a limit on addresses, say: frames work everywhere
        attachment.close()
        return None
