# SPDX-License-Identifier: Apache-2.0
"""What groups and leases cost the control plane at the scale of GRPO: a clock around its turns, one JSON line.

``close_to_put`` compares whole messages of a client; ``close_to_put_in_plane`` the control plane's part of them alone.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import transfer_queue as tq
from benchmarks.common import arguments, report
from tests.local_plane import LocalPlane
from transfer_queue import protocol as p
from transfer_queue.sampler import GroupSampler
from transfer_queue.server.main import collect_rarely

READY, QUICK_READY = 100_000, 2_000
LEASES, QUICK_LEASES = 8_192, 256
GROUPS, ROWS = 32, 8
REPEATS, QUICK_REPEATS = 200, 20
RENEWAL_S = 20.0
"""A third of the default lease: a worker renews so often."""
SPEC = {"x": p.FieldSpec("int64", (4,))}


class Turns:
    """Sends requests to a plane of its own."""

    def __init__(self, groups: int) -> None:
        self.plane = LocalPlane()
        self._ids = itertools.count(1)
        self.ask(p.RegisterTask, "actor", GroupSampler(groups=groups).spec())

    def ask(self, verb: Any, *args: Any, client: str = "c", **kwargs: Any) -> Any:
        request = verb(next(self._ids), *args, **kwargs)
        replies = self.plane.handle(client, request, 0.0)
        own = next((to.reply for to in replies if to.reply.id == request.id), None)
        if own is not None:
            self.plane.received(client, [request.id])
        return own

    def add(self, count: int, tasks: Sequence[str] = ()) -> None:
        terms, number = p.Terms(parts=ROWS, tasks=tuple(tasks)), next(self._ids)
        keys = [f"{number}-{at}" for at in range(count)]
        request = p.ResolveKeys(number, "p", keys, True, True, SPEC, 0.0, ["x"], terms)
        (to,) = self.plane.handle("c", request, 0.0)
        self.ask(p.Publish, "p", to.reply.indexes, SPEC, {}, completes=number, role=terms)

    def lease(self, count: int) -> list[p.GrantedLease]:
        leased: list[p.GrantedLease] = self.ask(p.LeaseGroups, ["p"], count).leases
        return leased

    def close(self, lease: p.GrantedLease) -> None:
        members = p.Members(lease.token, lease.head, lease.parts, True)
        self._put("p", members)

    def put(self) -> None:
        self._put("plain", None)

    def _put(self, partition: str, members: p.Members | None) -> None:
        number = next(self._ids)
        (to,) = self.plane.handle("c", p.Reserve(number, partition, ROWS, SPEC, 0.0, members), 0.0)
        tags = {index: {"reward": 1.0} for index in p.unpack_indexes(to.reply.indexes).tolist()}
        self.ask(p.Publish, partition, to.reply.indexes, SPEC, tags, completes=number, role=members)


def median_ms(act: Callable[[], Any], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def ratio_of(repeats: int) -> dict[str, float]:
    """A close with rows beside a put of the same rows, in turn, because the machine may have other work."""
    turns, closes, puts = Turns(10**6), [], []
    turns.add(repeats)
    for lease in turns.lease(repeats):
        closes.append(median_ms(lambda lease=lease: turns.close(lease), 1))  # type: ignore[misc]
        puts.append(median_ms(turns.put, 1))
    return compared(closes, puts, "_in_plane")


def compared(closes: list[float], puts: list[float], where: str = "") -> dict[str, float]:
    close_ms, put_ms = statistics.median(closes), statistics.median(puts)
    return {f"close{where}_ms": close_ms, f"put{where}_ms": put_ms, f"close_to_put{where}": close_ms / put_ms}


def whole_ratio(repeats: int) -> dict[str, float]:
    """The same as a client sees it, with rows of 1 KiB."""
    tq.init()
    client, closes, puts = tq.get_client(), list[float](), list[float]()
    rows = TensorDict({"x": torch.zeros(ROWS, 256)}, batch_size=[ROWS])
    client.add_groups({"prompt": torch.zeros(repeats)}, "p")
    for lease in client.lease("p", repeats):
        closes.append(median_ms(lambda lease=lease: lease.close(rows), 1))  # type: ignore[misc]
        puts.append(median_ms(lambda: client.put(rows, partition_id="plain"), 1))
    tq.close()
    return compared(closes, puts)


def lease_ms(repeats: int) -> float:
    turns = Turns(10**6)
    turns.add(repeats * GROUPS, ["actor"])
    return median_ms(lambda: turns.lease(GROUPS), repeats)


def fetch_ms(ready: int, repeats: int) -> float:
    """A step of ``GROUPS`` groups among so many ready ones."""
    turns = Turns(GROUPS)
    turns.add(ready)
    for _ in range(0, ready, 2_000):
        for lease in turns.lease(2_000):
            turns.close(lease)
    turns.ask(p.Fetch, "p", "actor", ["x"], 1)
    return median_ms(lambda: turns.ask(p.Fetch, "p", "actor", ["x"], 1), min(repeats, ready // GROUPS // 2))


def renewals_of_a_core(leases: int, repeats: int) -> float:
    """The share of a core that renewals of so many leases take, 512 of each of its workers."""
    turns = Turns(10**6)
    turns.add(leases)
    tokens = [lease.token for at in range(0, leases, 512) for lease in turns.lease(min(512, leases - at))]

    def renew() -> None:
        for at in range(0, leases, 512):
            turns.ask(p.RenewLeases, tokens[at : at + 512])

    return median_ms(renew, repeats) / 1e3 / RENEWAL_S


def bytes_taken(act: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    act()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken


def bytes_per_group(count: int) -> tuple[float, float]:
    """What a group takes in the controller: one that waits, with its keyed row, and what a lease of it adds."""
    turns = Turns(10**6)
    waiting = bytes_taken(lambda: turns.add(count))
    return waiting / count, bytes_taken(lambda: turns.lease(count)) / count


def refill_ms(repeats: int) -> float:
    """From a trainer's reject to the lease that waited for the slot."""
    turns = Turns(1)
    turns.add(2 * repeats + 8, ["actor"])
    for lease in turns.lease(2):
        turns.close(lease)
    took = []
    for _ in range(repeats):
        assert turns.ask(p.LeaseGroups, ["p"], 1, client="w", wait_s=9.0) is None
        groups = turns.plane.state.partitions["p"].groups
        assert groups is not None
        members = next(iter(groups.live.values())).all_members()
        request = p.RejectGroups(next(turns._ids), "p", p.pack_indexes(np.array(members, dtype=np.int64)), "no use")
        began = time.perf_counter()
        replies = turns.plane.handle("c", request, 0.0)
        took.append(time.perf_counter() - began)
        (granted,) = [to.reply for to in replies if isinstance(to.reply, p.LeasedGroups)]
        turns.plane.received("w", [granted.id])
        lease = granted.leases[0]
        number = next(turns._ids)
        closing = p.Members(lease.token, lease.head, lease.parts, True)
        (to,) = turns.plane.handle("w", p.Reserve(number, "p", ROWS, SPEC, 0.0, closing), 0.0)
        turns.ask(p.Publish, "p", to.reply.indexes, SPEC, {}, completes=number, role=closing, client="w")
    return statistics.median(took) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    collect_rarely()  # as a server does
    ready, leases, repeats = (QUICK_READY, QUICK_LEASES, QUICK_REPEATS) if options.quick else (READY, LEASES, REPEATS)
    few = max(ready // 10, 2 * GROUPS)
    found: dict[str, Any] = {"ready": ready, "leases": leases, "lease_32_ms": lease_ms(repeats)}
    found |= ratio_of(repeats) | whole_ratio(repeats)
    found |= {f"fetch_32_of_{few}_ms": fetch_ms(few, repeats), "fetch_32_ms": fetch_ms(ready, repeats)}
    found |= {
        "renewals_of_a_core": renewals_of_a_core(leases, repeats // 5),
        "reject_to_lease_ms": refill_ms(repeats),
    }
    found["bytes_per_group"], found["bytes_per_lease"] = bytes_per_group(leases)
    report("groups and leases in the control plane", **found)


if __name__ == "__main__":
    main()
