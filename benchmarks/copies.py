# SPDX-License-Identifier: Apache-2.0
"""How long does a copy take: into memory touched before or not, by one thread or several? Prints one JSON line."""

from __future__ import annotations

import mmap
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import arguments, report, timed_ms
from transfer_queue.storage.copying import Copies

MIB = 1 << 20
REPEATS = 21
TOUCHED_MIB = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def shared(nbytes: int) -> tuple[int, mmap.mmap]:
    """Memory as an arena's: a descriptor, and one mapping of it."""
    descriptor = os.memfd_create("copies")
    os.ftruncate(descriptor, nbytes)
    return descriptor, mmap.mmap(descriptor, nbytes)


def copied(target: Bytes, source: Bytes, into_mapped: bool = False) -> None:
    copies = Copies(into_mapped)
    copies(target, source)
    copies.finish()


def together_ms(mib: int, repeats: int) -> dict[str, float]:
    """Medians of a copy between warm memory, out of what was just written as a get finds it; by turns."""
    nbytes, threads = mib * MIB, torch.get_num_threads()
    descriptor, mapped = shared(nbytes)
    arena: Bytes = np.frombuffer(mapped, np.uint8)
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    ours, theirs = torch.from_numpy(target), torch.from_numpy(arena)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "one_thread": (1, lambda: copied(target, arena)),
        "threads": (threads, lambda: copied(target, arena)),
        "torch": (threads, lambda: ours.copy_(theirs)),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (count, copy) in ways.items():
            torch.set_num_threads(count)
            arena[:] = source
            found[name].append(timed_ms(copy))
    torch.set_num_threads(threads)
    os.close(descriptor)
    return {f"{name}_ms": statistics.median(times) for name, times in found.items()}


def first_touch_ms(mib: int, repeats: int) -> dict[str, float]:
    """Medians of a copy by one thread into, or out of, memory that this process has not touched."""
    nbytes = mib * MIB
    source = np.ones(nbytes, np.uint8)
    descriptor, mapped = shared(nbytes)
    copied(np.frombuffer(mapped, np.uint8), source)

    def fresh_pages() -> float:
        other, memory = shared(nbytes)
        os.close(other)
        return timed_ms(lambda: np.copyto(np.frombuffer(memory, np.uint8), source))

    def out_of_mapping(copy: Callable[[Bytes, Bytes], None]) -> float:
        memory = mmap.mmap(descriptor, nbytes)
        return timed_ms(lambda: copy(source, np.frombuffer(memory, np.uint8)))

    def into_mapping(copy: Callable[[Bytes, Bytes], None]) -> float:
        memory = mmap.mmap(descriptor, nbytes)
        return timed_ms(lambda: copy(np.frombuffer(memory, np.uint8), source))

    def small_pages() -> float:
        memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
        return timed_ms(lambda: np.copyto(memory, source))

    def large_pages() -> float:
        memory = np.empty(nbytes, np.uint8)
        return timed_ms(lambda: np.copyto(memory, source))

    ways: dict[str, Callable[[], float]] = {
        "into_fresh_memfd": fresh_pages,
        "out_of_new_mapping": lambda: out_of_mapping(np.copyto),
        "out_of_new_mapping_looked_at": lambda: out_of_mapping(copied),
        "into_new_mapping": lambda: into_mapping(np.copyto),
        "into_new_mapping_looked_at": lambda: into_mapping(lambda target, source: copied(target, source, True)),
        "into_torch_empty": small_pages,
        "into_numpy_empty": large_pages,
        "warm": lambda: timed_ms(lambda: np.copyto(np.frombuffer(mapped, np.uint8), source)),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {f"{name}_ms": statistics.median([way() for _ in range(repeats)]) for name, way in ways.items()}
    torch.set_num_threads(threads)
    os.close(descriptor)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    sizes, touched, repeats = ((1,), 1, 2) if args.quick else ((1, 4, 16, 64, 256), TOUCHED_MIB, REPEATS)
    report(
        "copies",
        torch_threads=torch.get_num_threads(),
        by_mib={mib: together_ms(mib, repeats) for mib in sizes},
        first_touch_mib=touched,
        first_touch=first_touch_ms(touched, repeats),
    )


if __name__ == "__main__":
    main()
