# SPDX-License-Identifier: Apache-2.0
"""What a plane looks at, counted: elements of a partition's columns, waiting fetches, waiting writers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.local_plane import LocalPlane
from transfer_queue.control import fetches, writing
from transfer_queue.control.serving import ServedFetch


class Watched(np.ndarray):
    """A column that counts the elements which are read, compared, searched or gathered; views of it are free."""

    elements = 0

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(key)
        if isinstance(key, slice):
            return result
        Watched.elements += size_of(result)
        return plain(result)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        Watched.elements += max(map(size_of, inputs))
        out = kwargs.pop("out", None)
        if out is not None:
            kwargs["out"] = tuple(plain(each) for each in out)
        return getattr(ufunc, method)(*map(plain, inputs), **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Watched.elements += sum(map(size_of, args))
        return function(*map(plain, args), **kwargs)

    def nonzero(self) -> Any:
        Watched.elements += self.size
        return plain(self).nonzero()

    def argmax(self, *args: Any, **kwargs: Any) -> Any:
        found = plain(self).argmax(*args, **kwargs)  # it stops at the first True
        Watched.elements += int(found) + 1
        return found

    def tolist(self) -> Any:
        Watched.elements += self.size
        return plain(self).tolist()

    def tobytes(self) -> Any:
        Watched.elements += self.size
        return plain(self).tobytes()


def plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, Watched) else array


def size_of(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else 1


def watch(plane: LocalPlane) -> None:
    """From here on every column of partition "p" counts, and so does what is ready in it."""
    partition = plane.state.partitions["p"]
    table = partition.table
    table._columns = {name: column.view(Watched) for name, column in table._columns.items()}
    for consumer in partition.consumers.values():
        for _, ready in consumer._ready.items():
            for each in (ready, getattr(ready.follower, "_heads", ready)):
                each._grow(len(each._mask) + 1)  # a set that grows later would not be watched
                each._mask = each._mask.view(Watched)
    Watched.elements = 0


def cost(action: Any) -> int:
    Watched.elements = 0
    action()
    return Watched.elements


class Looks:
    """How often fetches that may wait were examined, and how often writers were."""

    fetches = 0
    writers = 0

    def of(self, action: Callable[[], Any]) -> int:
        """At fetches, while this is done."""
        before = self.fetches
        action()
        return self.fetches - before


def count_looks(patch: pytest.MonkeyPatch) -> Looks:
    """Count from now on."""
    counts, check = Looks(), writing.check

    class CountedFetch(ServedFetch):
        def answer(self, *args: Any, **kwargs: Any) -> Any:
            counts.fetches += 1
            return super().answer(*args, **kwargs)

    def counted_check(*args: Any) -> int:
        counts.writers += 1
        return check(*args)

    patch.setattr(fetches, "ServedFetch", CountedFetch)
    patch.setattr(writing, "check", counted_check)
    return counts
