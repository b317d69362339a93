# SPDX-License-Identifier: Apache-2.0
"""What a seed means: the queue's configuration, the processes, and the faults in their order. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WORLDS = ("streams", "groups", "fits")
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Event:
    """A fault. ``at``: the share of the samples that was trained by then. ``hold_s``: how long it lasts."""

    at: float
    fault: str
    target: str
    hold_s: float = 0.0

    def __str__(self) -> str:
        held = f" for {self.hold_s:.1f} s" if self.hold_s else ""
        return f"{self.at:6.1%}  {self.fault} {self.target}{held}"


@dataclass(frozen=True)
class Plan:
    """``length``: 1 is a short run. ``actors``: how many of each role. ``disk_nbytes``: of a disk that fills up."""

    world: str
    seed: int
    length: float
    conf: dict[str, Any]
    actors: dict[str, int]
    shape: dict[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    disk_nbytes: int | None = None
    hosts: bool = False

    def names(self) -> Iterator[str]:
        """Of all processes."""
        for role, count in self.actors.items():
            yield from (f"{role}-{number}" for number in range(count))

    def text(self) -> str:
        """For people: what a failure prints."""
        lines = [
            f"world {self.world}, seed {self.seed}, length {self.length}, hosts {self.hosts}",
            f"queue {self.conf}",
        ]
        lines += [f"processes {self.actors}, shape {self.shape}", *map(str, self.events)]
        return "\n".join(lines)

    def command(self) -> str:
        """Replays it."""
        hosts = " --hosts" if self.hosts else ""
        return f"python -m tests.chaos --world {self.world} --seed {self.seed} --length {self.length:g}{hosts}"


def make_plan(world: str, seed: int, length: float = 1.0, hosts: bool = False, disk: bool = False) -> Plan:
    """The plan of a seed. ``disk``: whether this process may mount a small one."""
    rng = random.Random(f"{world}/{seed}/{hosts}")
    processes = "one" if hosts else rng.choice(("one", "each"))
    units = rng.choice((2, 3))
    has_disk, spills = rng.random() < 0.5, rng.random() < 0.4  # drawn always, so that a seed means the same everywhere
    storage: dict[str, Any] = {
        "num_data_storage_units": units, "arena": hosts or rng.random() < 0.6, "put_timeout_s": rng.choice((1.0, 20.0)),
        "capacity_bytes": rng.choice((6, 16)) * MIB // (units if processes == "each" else 2),
    }  # fmt: skip
    if spills and not hosts:
        storage["ssd_offload"] = {"enabled": True, "threshold_bytes": KIB, "max_bytes": 2 * MIB}
    conf = {
        "backend": {"SimpleStorage": storage}, "server_processes": processes,
        "controller": {"producer_grace_s": rng.choice((1.0, 5.0))}, "client": {"timeout_s": 20.0},
    }  # fmt: skip
    actors, shape = {"streams": _streams, "groups": _groups, "fits": _fits}[world](rng, length)
    disk_nbytes = (160 if world == "fits" else 4) * MIB  # a fit ends where it can't save
    plan = Plan(world, seed, length, conf, actors, shape, (), disk_nbytes if disk and has_disk else None, hosts)
    events = sorted(_events(rng, plan, has_disk), key=lambda event: event.at)
    kept = [event for event in events if event.fault != "fill" or plan.disk_nbytes]
    if world == "fits" and any(event.fault == "kill unit" for event in kept):
        # A fit waits for the first samples, and full units can't take their values again.
        storage["capacity_bytes"] *= 8
    return Plan(**{**plan.__dict__, "events": tuple(kept)})


def _streams(rng: random.Random, length: float) -> tuple[dict[str, int], dict[str, Any]]:
    actors = {"producer": 2, "scorer": rng.choice((1, 2)), "trainer": rng.choice((1, 2)), "reader": rng.choice((1, 2))}
    shape = {
        "chunk": rng.choice((4, 8, 16)), "batch": rng.choice((4, 6, 8)), "save_every": rng.choice((2, 4)),
        "width": rng.choice((64, 512)), "loader": rng.random() < 0.4,
    }  # fmt: skip
    shape["chunks"] = max(2, round(600 * length / shape["chunk"]))
    return actors, shape


def _groups(rng: random.Random, length: float) -> tuple[dict[str, int], dict[str, Any]]:
    actors = {"feeder": 1, "worker": 3, "rewarder": rng.choice((0, 1)), "trainer": rng.choice((1, 2))}
    stale = rng.choice(("train", "train", "wait", "drop"))
    shape = {
        "groups": 4, "ahead": rng.choice((1, 3)), "stale": stale, "save_every": rng.choice((2, 4)),
        "width": rng.choice((64, 512)), "lease_s": rng.choice((1.0, 4.0)),
        "keep": rng.choice(("closed", "all", "none")),
        "count": max(40, round(240 * length)), "rows": 2, "max_staleness": None if stale == "train" else 2,
    }  # fmt: skip
    return actors, shape


def _fits(rng: random.Random, length: float) -> tuple[dict[str, int], dict[str, Any]]:
    actors = {"producer": 2, "scorer": rng.choice((1, 2)), "trainer": 1}
    width = rng.choice((64, 512, 8192))
    shape = {
        "chunk": rng.choice((4, 8, 16)), "batch": rng.choice((4, 6, 8)), "micro_batch": 2,
        "save_every": rng.choice((2, 4)), "width": width, "accumulate": rng.choice((1, 2)),
        "clear_consumed": width > 64 or rng.random() < 0.5,
    }  # fmt: skip
    shape["chunks"] = max(2, round(300 * length / shape["chunk"]))
    return actors, shape


def _events(rng: random.Random, plan: Plan, has_disk: bool) -> Iterator[Event]:
    """About eight faults per length. Each kind of the world comes about equally often."""
    names = list(plan.names())
    units = plan.conf["backend"]["SimpleStorage"]["num_data_storage_units"]
    apart = plan.conf["server_processes"] == "each"
    lost_units = 0
    kinds = ["kill", "kill", "die", "die", "stop", "stop", "queue", "all", "freeze", "memory"]
    kinds += ["fill"] * has_disk + ["unit", "freeze unit"] * apart + ["cut", "cut", "host"] * plan.hosts
    for _ in range(round(8 * max(plan.length, 0.5))):
        at, kind = rng.uniform(0.02, 0.95), rng.choice(kinds)
        hold_s, target = rng.choice((0.2, 1.0, 3.0)), rng.choice(names)
        if kind == "unit":
            lost_units += 1
            if lost_units < units:
                yield Event(at, "kill unit", str(lost_units))
        elif kind == "queue":
            yield Event(at, "kill queue", rng.choice(("server", "owner")) if not plan.hosts else "server")
        elif kind in ("freeze", "freeze unit"):
            yield Event(at, "stop", "server" if kind == "freeze" else "unit", hold_s)
        elif kind == "memory":
            yield Event(at, "full memory", rng.choice([*names, "server", "unit"]), hold_s)
        elif kind == "all":
            yield Event(at, "kill all", rng.choice([role for role, count in plan.actors.items() if count]))
        elif kind == "host":
            yield Event(at, "kill host", "b")
        else:
            what = {"cut": "b", "fill": "disk"}.get(kind, target)
            yield Event(at, kind, what, {"cut": 3 * hold_s}.get(kind, hold_s) if kind in ("stop", "cut", "fill") else 0)
