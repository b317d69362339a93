# SPDX-License-Identifier: Apache-2.0
"""The prompts and trajectories of one of verl's partitions, kept by their changes instead of listed again and again."""

from __future__ import annotations

import contextlib
from typing import Any

import transfer_queue as tq
from transfer_queue.client.key_watch import KeyChanges, KeyWatch
from transfer_queue.errors import EndOfPartitionError, KeysTimeoutError

STATUSES = ("pending", "running", "finished", "failure")
ENDED = ("finished", "failure")
"""Statuses of a prompt whose rollouts are over."""

_HAS_ENDED = f"is_prompt == true and status in {list(ENDED)}"
_MOST_ANSWERS = 100
"""Each answer has up to 5 000 changes, and the queue remembers 100 000: so many reach past all that came before."""


class PromptTable:
    """A prompt's key has tags with ``is_prompt``, ``status`` and ``global_steps``; any other key is a trajectory.

    verl's replay buffer reads these containers, and removes from them what it clears in the queue. So they stay the
    same objects, and removing what is gone already does nothing.
    """

    def __init__(self) -> None:
        self.trajectories: dict[str, dict[str, Any]] = {}
        self.prompts: dict[str, set[str]] = {status: set() for status in STATUSES}
        """Keys of prompts by status."""
        self.steps: dict[str, int] = {}
        """``global_steps`` of each prompt."""

    def apply(self, changes: KeyChanges) -> None:
        """Take over what changed.

        Raises:
            ValueError: a prompt's status is none of these. The table is then of no use any more.
        """
        for key in changes.removed:
            self._remove(key)
        for key, tags in changes.changed.items():
            if not tags.get("is_prompt", False):
                self.trajectories[key] = tags
                continue
            status = tags["status"]
            if status not in self.prompts:
                raise ValueError(f"prompt {key!r} has status {status!r}, which is none of {', '.join(STATUSES)}.")
            self._remove(key)
            self.prompts[status].add(key)
            self.steps[key] = tags["global_steps"]

    def num_ended(self) -> int:
        return sum(len(self.prompts[status]) for status in ENDED)

    def _remove(self, key: str) -> None:
        self.trajectories.pop(key, None)
        self.steps.pop(key, None)
        for keys in self.prompts.values():
            keys.discard(key)


class PromptWatch:
    """A partition's table, and the watch that keeps it. One thread uses it at a time."""

    def __init__(self, partition: str) -> None:
        self._partition = partition
        self._watch: KeyWatch | None = None
        self.table = PromptTable()

    def current(self) -> PromptTable:
        """The table as the queue is now, this process' own puts and clears included."""
        for _ in range(_MOST_ANSWERS):
            if self._watch is None:
                self._watch, self.table = tq.get_client().kv_watch(self._partition, timeout_s=0.0), PromptTable()
            try:
                self.table.apply(next(self._watch))
            except KeysTimeoutError:
                break
            except StopIteration:  # the partition was cleared; there may be a new one
                self._watch = None
            except BaseException:  # what the table lacks now is unknown
                self._watch = None
                raise
        return self.table

    def wait(self, wanted: int, timeout_s: float) -> None:
        """Until half of the prompts that are still missing have ended, but no longer than this.

        So most that end cost no message, the last one is reported at once, and groups to evict are seen early.
        """
        ended = self.table.num_ended()
        count = ended + max(1, (wanted - ended) // 2)
        with contextlib.suppress(KeysTimeoutError, EndOfPartitionError):
            tq.get_client().wait_keys(self._partition, _HAS_ENDED, count, timeout_s=timeout_s)
