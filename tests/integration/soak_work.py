# SPDX-License-Identifier: Apache-2.0
"""One actor of the soak: random puts, gets and clears, each value looked at byte by byte, each error judged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration import soak_values as values
from tests.integration.calls import fetch_of
from tests.integration.soak_kinds import ASKED, KINDS, PARTITIONS, Kind
from tests.integration.soak_kv import Keyed
from tests.integration.soak_reads import Reads, scribble
from tests.integration.soak_state import Share, sids_of, tags_for, versions_of
from transfer_queue import protocol as p
from transfer_queue.errors import (
    BatchTimeoutError,
    EndOfPartitionError,
    ProducersGoneError,
    SampleClearedError,
    StorageFullError,
    TransferQueueError,
    UnknownPartitionError,
)

SHARED_TASK = "shared"
_MANY, _READ_ROWS = 10, 64
_STATS_EVERY = 12


class Actor(Reads, Keyed):
    """Works with one client beside other actors of its process, in a thread of its own or as a task of a loop.

    Only the actor that put a sample replaces its fields, and only the one that the shared task gave it to writes
    "back": so each knows the version that it must read.
    """

    def __init__(self, share: Share, client: Any, rng: random.Random, number: int, on_loop: bool) -> None:
        Reads.__init__(self, share, client, rng, number)
        Keyed.__init__(self, share, rng, number)
        self.on_loop = on_loop
        self.own: list[tq.BatchMeta] = []
        self.held: list[tuple[tq.BatchMeta, str]] = []
        self._tasks = (share.task, SHARED_TASK)
        self._made = 0
        self._crowded = False
        self._steps = 0
        self._operations: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "put": (20, self._put_new), "stream": (2, self._stream), "insert": (3, self._insert),
            "replace": (8, self._replace),
            "write_back": (6, self._write_back), "fetch": (14, self._fetch), "fetch_shared": (12, self._fetch_shared),
            "take": (12, self._take),
            "read_any": (12, self._read_any), "read_own": (8, self._read_own), "recheck": (6, self.recheck),
            "clear": (12, self._clear), "clear_any": (3, self._clear_any),
            "clear_partition": (0.3, self._clear_partition),
            "kv_put": (5, self.kv_put), "kv_get": (5, self.kv_get), "kv_clear": (2, self.kv_clear),
            "look": (1, self._look), "cancel": (4 if on_loop else 0, self._cancel),
        }  # fmt: skip

    def leave_out(self, names: Sequence[str]) -> None:
        """Do without these operations: to find out what a failure needs."""
        for name in names:
            self._operations[name] = (0, self._operations[name][1])

    async def step(self) -> None:
        """One random operation; an error that the others can't have caused is raised."""
        self._steps += 1
        name = self._chosen()
        self.share.begin(self.number, name)
        try:
            await self._operations[name][1]()
            outcome = "ok"
        except (SampleClearedError, UnknownPartitionError, EndOfPartitionError, BatchTimeoutError) as error:
            outcome = type(error).__name__
        except ProducersGoneError as error:  # the only producers of a field were killed a while ago
            outcome = type(error).__name__
        except StorageFullError as error:
            if self.share.capacity_bytes is None:
                raise
            self._crowded, outcome = True, type(error).__name__
        self.share.end(self.number, name, outcome)

    def _chosen(self) -> str:
        if self._crowded and self._operations["clear_any"][0]:
            return "clear_any" if self.rng.random() < 0.7 else "clear"
        if self._steps % _STATS_EVERY == 0:
            return "look"
        names = list(self._operations)
        return self.rng.choices(names, [self._operations[name][0] for name in names])[0]

    # ---- puts ----

    def _new_sids(self, count: int) -> NDArray[np.int64]:
        start = ((self.share.serial << 4 | self.number) << 26) + self._made
        self._made += count
        return np.arange(start, start + count)

    def _columns(self, fields: Sequence[str], sids: NDArray[np.int64], version: int, nbytes: int) -> TensorDict:
        made = {name: values.make(self.rng, name, sids, version, nbytes) for name in fields}
        self.share.count("nbytes_put", sum(map(values.nbytes_of, made.values())))
        return TensorDict(made, batch_size=[len(sids)])

    def _drawn_kind(self) -> tuple[Kind, NDArray[np.int64], int]:
        kind = self.rng.choices(list(KINDS.values()), [kind.weight for kind in KINDS.values()])[0]
        nbytes = self.rng.randint(min(kind.row_nbytes, 100), kind.row_nbytes)
        most = max(1, min(kind.samples[1], self.share.largest_put // nbytes))
        return kind, self._new_sids(self.rng.randint(min(kind.samples[0], most), most)), nbytes

    async def _put_new(self) -> None:
        kind, sids, nbytes = self._drawn_kind()
        partition = self.rng.choice(PARTITIONS)
        self.log(f"put {partition} {kind.fields} sids {sids[0]}+{len(sids)} x {nbytes}")
        rows = self._columns(kind.fields, sids, 1, nbytes)
        parser = self.share.fatal_parser(self.rng)
        meta = await self.client.async_put(rows, partition_id=partition, tags=tags_for(sids), data_parser=parser)
        self.log(f"is {meta.global_indexes[0]}+{meta.size}")
        self._take_sources_back(rows)
        self._own(meta)

    async def _stream(self) -> None:
        """Puts of one size into one partition, each read at once."""
        partition, nbytes = self.rng.choice(PARTITIONS), self.rng.choice((200, 4096, 65536))
        count = max(1, min(32, self.share.largest_put // nbytes // 2))
        for _ in range(self.rng.randint(4, 8)):
            sids = self._new_sids(count)
            rows = self._columns(("num", "big"), sids, 1, nbytes)
            meta = await self.client.async_put(rows, partition_id=partition, tags=tags_for(sids))
            self.log(f"stream {partition} {meta.global_indexes[0]}+{count} x {nbytes}, sids {sids[0]}")
            self._take_sources_back(rows)
            self._own(meta)
            await self.read(meta, exact=True)

    async def _insert(self) -> None:
        kind, sids, nbytes = self._drawn_kind()
        partition = self.rng.choice(PARTITIONS)
        meta = await self.client.async_get_meta(list(kind.fields), len(sids), partition, mode="insert")
        self.log(f"insert {partition} {kind.fields} {meta.global_indexes[0]}+{meta.size} x {nbytes}")
        rows = self._columns(kind.fields, sids, 1, nbytes)
        bare = tq.BatchMeta(meta.global_indexes, meta.partition_ids)
        await self.judged(meta, self.client.async_put(rows, metadata=bare, tags=tags_for(sids)))
        self._own(bare)

    def _own(self, meta: tq.BatchMeta) -> None:
        self.own.append(meta)
        if len(self.own) > _MANY:
            del self.own[self.rng.randrange(_MANY)]

    def _take_sources_back(self, rows: TensorDict) -> None:
        """What was put is stored: its source may be used for something else."""
        if self.rng.random() < 0.4:
            scribble(rows)

    async def _replace(self) -> None:
        """A newer version of some fields, or a further field, of some samples put before."""
        if not self.own:
            return
        meta = self.own.pop(self.rng.randrange(len(self.own)))  # comes back only if all went well
        names = [name for name in meta.field_names if name not in ("big", "back")] or meta.field_names
        name = "late" if self.rng.random() < 0.3 else self.rng.choice(names)
        part = meta if self.rng.random() < 0.5 else meta.select_samples(self.positions(meta.size, repeats=False))
        version = await self._write(part, name)
        if part is not meta:
            written = set(part.global_indexes)
            fresh = [{f"v.{name}": version} if index in written else None for index in meta.global_indexes]
            meta.update_custom_meta(fresh)
            if name not in meta.field_names and len(written) == meta.size:
                shapeless = {key: value for key, value in part.field_schema[name].items() if key != "per_sample_shapes"}
                meta.field_schema = {**meta.field_schema, name: shapeless}
        self._own(meta)

    async def _write(self, meta: tq.BatchMeta, name: str) -> int:
        version = 1 + int(versions_of(meta, name, default=0 if name not in meta.field_names else 1).max())
        self.log(f"write {name} version {version} of {len(meta)} samples, first {meta.global_indexes[0]}")
        rows = self._columns([name], sids_of(meta), version, self.rng.choice((40, 500, 3000)))
        fresh = [{f"v.{name}": version}] * meta.size
        await self.judged(meta, self.client.async_put(rows, metadata=meta, tags=fresh))
        self._take_sources_back(rows)
        return version

    async def _write_back(self) -> None:
        mine = [at for at, (_, task) in enumerate(self.held) if task == SHARED_TASK]
        if not mine:
            return
        meta, task = self.held.pop(self.rng.choice(mine))
        await self._write(meta, "back")
        self.held.append((meta, task))
        await self.read(meta.select_fields(["back"]), exact=True)

    # ---- gets ----

    async def _fetch(self) -> None:
        await self._fetch_as(self.share.task, {"dp_rank": 0} if self.rng.random() < 0.5 else None)

    async def _fetch_shared(self) -> None:
        await self._fetch_as(SHARED_TASK, None)

    async def _fetch_as(self, task: str, sampling: dict[str, Any] | None) -> None:
        partition, asked = self.rng.choice(PARTITIONS), self.rng.choice(ASKED)
        size, wait_s = self.rng.choice((1, 2, 8, 32, 64)), self.rng.choice((0.0, 0.02, 0.2))
        meta = await self.client.async_get_meta(
            asked, size, partition, task_name=task, sampling_config=sampling, timeout_s=wait_s
        )
        await self._was_given(meta, task, size, asked)
        await self.read(meta)
        if sampling is not None and self.rng.random() < 0.7:
            await self.client.async_ack(meta, task)

    async def _was_given(self, meta: tq.BatchMeta, task: str, size: int, asked: Sequence[str]) -> None:
        self.log(f"fetch {task} {meta.partition_ids[0]} {asked}: {meta.global_indexes}")
        assert (meta.size, set(meta.field_names)) == (size, set(asked)), f"asked {size} x {asked}, got {meta}"
        if task == SHARED_TASK:
            # Only what the queue knows to have arrived is this process' for good: else it goes to others when it dies.
            await self.client.async_get_partition_list()
            self.share.given(meta.global_indexes)
        self.held.append((meta, task))
        if len(self.held) > _MANY:
            del self.held[self.rng.randrange(_MANY)]

    async def _take(self) -> None:
        """A batch as a stream takes it: its values come with the answer, and now and then nobody wants them."""
        partition, asked, task = self.rng.choice(PARTITIONS), self.rng.choice(ASKED), self.rng.choice(self._tasks)
        size, wait_s = self.rng.choice((1, 2, 8, 32)), self.rng.choice((0.0, 0.02, 0.2))
        batch = await self.client.async_fetch_batch(fetch_of(asked, size, partition, task, wait_s))
        if isinstance(batch, p.NotReady):
            return
        try:
            await self._was_given(batch.meta, task, size, asked)
            if self.rng.random() < 0.8:
                self.keep(self.seen(await self.judged(batch.meta, self.client.async_take(batch)), batch.meta))
        finally:
            await batch.close()

    async def _read_any(self) -> None:
        partition, asked = self.rng.choice(PARTITIONS), self.rng.choice(ASKED)
        every = await self.client.async_get_meta(asked, partition_id=partition, mode="force_fetch")
        ready = np.flatnonzero(np.asarray(every.production_status)).tolist()
        if ready:
            chosen = self.rng.sample(ready, min(len(ready), self.rng.choice((1, 5, _READ_ROWS))))
            await self.read(every.select_samples(chosen))

    async def _read_own(self) -> None:
        if self.own:
            await self.read(self.rng.choice(self.own), exact=True)

    # ---- clears ----

    async def _clear(self) -> None:
        pool = self.own if not self.held or self.rng.random() < 0.4 else self.held
        if not pool:
            return
        at = self.rng.randrange(len(pool))
        found: Any = pool.pop(at)
        meta, task = found if isinstance(found, tuple) else (found, None)
        gone = self._doomed(meta.size)
        await self._clear_these(meta.select_samples(gone))
        left = sorted(set(range(meta.size)) - set(gone))
        if left:
            rest = meta.select_samples(left)
            pool.append((rest, task) if task else rest)  # type: ignore[arg-type]

    def _doomed(self, count: int) -> list[int]:
        """Positions to clear: all, some, or all but a few of every 64."""
        way = self.rng.randrange(3)
        if way == 0:
            return list(range(count))
        if way == 1:
            return self.rng.sample(range(count), self.rng.randint(1, count))
        spared = set(self.rng.sample(range(64), 2))
        return [at for at in range(count) if at % 64 not in spared] or [0]

    async def _clear_these(self, meta: tq.BatchMeta) -> None:
        self.log(f"clear {meta.partition_ids[0]} {meta.global_indexes}")
        await self.client.async_clear_samples(meta)

    async def _clear_any(self) -> None:
        partition = self.rng.choice(PARTITIONS)
        self._crowded = False
        every = await self.client.async_get_meta(["num"], partition_id=partition, mode="force_fetch")
        if every.size:
            await self._clear_these(every.select_samples(self._doomed(every.size)))

    async def _clear_partition(self) -> None:
        partition = self.rng.choice(PARTITIONS)
        self.log(f"clear partition {partition}")
        await self.client.async_clear_partition(partition)

    # ---- the rest ----

    async def _look(self) -> None:
        """How full is it? Too much at once makes this actor clear next."""
        units = await self.client.storage_manager.stats()
        samples = sum(unit.samples for unit in units)
        live, held = (sum(getattr(unit, name) for unit in units) for name in ("live_nbytes", "held_nbytes"))
        assert live <= held, f"more is live than held: {units}"
        self.share.saw(held)
        self._crowded = live > self.share.most_nbytes or samples > self.share.most_samples

    async def _cancel(self) -> None:
        """A call that its caller cancels, at any moment of it."""
        work = self.rng.choice((self._put_new, self._fetch, self._take, self._read_any, self._clear, self.kv_put))
        try:
            await asyncio.wait_for(work(), self.rng.uniform(0.0, 0.02))
        except asyncio.TimeoutError as error:
            if isinstance(error, TransferQueueError):  # it had failed by itself
                raise
            self.log("cancelled")
