# SPDX-License-Identifier: Apache-2.0
"""How each task draws: its sampler, its number of data-parallel ranks, its tail policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transfer_queue.control.draw import TAIL_POLICIES, foreign
from transfer_queue.errors import InvalidRequestError
from transfer_queue.protocol import Fetch, RegisterTask
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.registry import resolve


@dataclass(slots=True)
class Task:
    """Settings of one task; None: not set."""

    name: str
    sampler: BaseSampler
    dp_size: int | None = None
    tail: str | None = None
    spec: Any = None

    def size_for(self, fetch: Fetch) -> int | None:
        """Number of data-parallel ranks of a round; None: every rank draws for itself, first come first served."""
        with foreign(self.sampler, self.name):
            own = self.sampler.dp_size
        sizes = {size for size in (self.dp_size, fetch.dp_size, own) if size is not None}
        if len(sizes) > 1:
            raise InvalidRequestError(
                f"task {self.name!r} is used with different numbers of data-parallel ranks: {sorted(sizes)} "
                f"(registered {self.dp_size}, fetch {fetch.dp_size}, sampler {own}). "
                f"Use one dp_size everywhere."
            )
        return sizes.pop() if sizes else None

    def needed(self, fetch: Fetch) -> int:
        """The number of ready samples for a round of this fetch, for all ranks together."""
        dp_size = self.size_for(fetch) or 1
        with foreign(self.sampler, self.name):
            return self.sampler.samples_needed(fetch.batch_size, dp_size)

    def tail_policy(self, dp_size: int | None) -> str:
        """The registered policy. By default one consumer loses nothing, and no rank is left alone in a collective."""
        return self.tail or ("uneven_ok" if (dp_size or 1) == 1 else "drop")


class Tasks:
    """Registered tasks. An unregistered task uses the queue's default sampler."""

    def __init__(self, default: BaseSampler, allowed_modules: Sequence[str]) -> None:
        self.default = default
        self._allowed_modules = allowed_modules
        self._tasks: dict[str, Task] = {}

    def get(self, name: str) -> Task:
        """Unregistered tasks are not stored, so names cost nothing."""
        return self._tasks.get(name) or Task(name, self.default)

    def register(self, request: RegisterTask) -> None:
        """Raises before anything changes. An equal sampler spec keeps the sampler and its state."""
        if request.dp_size is not None and request.dp_size < 1:
            raise InvalidRequestError(f"dp_size must be at least 1, got {request.dp_size}.")
        if request.tail is not None and request.tail not in TAIL_POLICIES:
            raise InvalidRequestError(f"tail must be one of {', '.join(TAIL_POLICIES)}, got {request.tail!r}.")
        task = self.get(request.task)
        if request.sampler is not None and request.sampler != task.spec:
            with foreign(f"the sampler of task {request.task!r}"):
                task.sampler = resolve(request.sampler, self._allowed_modules)
            task.spec = request.sampler
        task.dp_size = request.dp_size if request.dp_size is not None else task.dp_size
        task.tail = request.tail or task.tail
        self._tasks[request.task] = task

    def set_sampler(self, name: str, sampler: BaseSampler) -> None:
        """Use this sampler object: only for tasks in the plane's own process."""
        self._tasks[name] = task = self.get(name)
        task.sampler, task.spec = sampler, None

    def add(self, task: Task) -> None:
        """Add a task, replacing one of the same name."""
        self._tasks[task.name] = task

    def forget(self, name: str) -> None:
        """Delete the task's settings."""
        self._tasks.pop(name, None)

    def __iter__(self) -> Iterator[Task]:
        """The registered tasks."""
        return iter(self._tasks.values())

    def samplers(self) -> list[BaseSampler]:
        """Every sampler once."""
        unique = {id(task.sampler): task.sampler for task in self._tasks.values()}
        unique[id(self.default)] = self.default
        return list(unique.values())
