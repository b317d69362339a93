# SPDX-License-Identifier: Apache-2.0
"""The client's verbs of groups: add, lease, advance, retry, reject, and the fields that a group's rows share."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import msgspec
import torch
from tensordict import TensorDict

from transfer_queue import protocol as p
from transfer_queue.client.base import as_names, check_meta, checked_wait, joined, parts_of, tags_by_row, to_meta
from transfer_queue.client.get import Gets
from transfer_queue.client.given_rows import as_rows, rows_at
from transfer_queue.client.lease import Lease, LeaseClient, LeaseStream, Rows
from transfer_queue.errors import BatchTimeoutError, EndOfPartitionError, InvalidRequestError, SampleClearedError
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from typing_extensions import Unpack

Keep = Literal["all", "closed", "none"]
_log = get_logger(__name__)
LEASE_S: Final = 60.0
_SLICE_S = 30.0
"""The longest wait of one request. After each one without a lease, it is logged what the caller waits for."""


class LeaseTerms(TypedDict, total=False):
    """What ``lease`` and ``leases`` take by name."""

    by: Literal["group", "part"]
    where: str | None
    lease_s: float
    keep: Keep


class GroupVerbs(Gets, LeaseClient):
    """Verbs of groups and leases."""

    async def async_add_groups(
        self,
        heads: Rows,
        partition: str,
        *,
        keys: Sequence[str] | None = None,
        parts: int = 1,
        min_parts: int | None = None,
        deadline_s: float | None = None,
        attempts: int = 2,
        worker_attempts: int = 5,
        tasks: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> BatchMeta:
        """Add groups to be worked on: one prompt, episode or pair each, with the fields that all its rows share.

        Args:
            heads: ``{field: [N, ...]}``: the groups' own rows. They are never drawn for training; see ``get_heads``.
            keys: Names of the groups, new in this partition. None: random ones.
            parts: Attempts at each group, which several workers may share. A part has any number of rows.
            min_parts: How many are enough at the deadline. None: all.
            deadline_s: Seconds from the first lease on, over all attempts. A group with fewer closed parts expires.
            attempts: Attempts that may fail because of the sample, before the group fails.
            worker_attempts: Attempts that may fail because of a worker.
            tasks: Tasks with a ``GroupSampler`` that train the groups. Their budgets admit leases, and groups that all
                of them have acknowledged are deleted. None: leases are not bounded, and groups stay.
            tags: One mapping or None per group.
        Returns:
            Metadata of the heads, [N].
        Raises:
            GroupStateError: a key exists already, or the budgets of the tasks contradict each other.
            InvalidRequestError: impossible numbers, or a sealed partition.
        Examples:
            >>> client.register_task("actor", tq.GroupSampler(groups=2))
            >>> meta = client.add_groups({"prompt": torch.arange(8)}, "train", parts=4, tasks=["actor"])
            >>> len(client.lease("train", 8))  # the budget is two steps of two groups
            4
        """
        if not self.storage_manager.servers_delete:
            raise InvalidRequestError(
                f"groups need the storage backend SimpleStorage, because servers delete what has been trained; "
                f"{type(self.storage_manager).__name__} keeps values where only clients can delete them."
            )
        rows = as_rows(heads)
        count = int(rows.batch_size[0])
        if not count:
            raise InvalidRequestError("add_groups got 0 heads; there is nothing to add.")
        if keys is None:
            keys = [uuid.uuid4().hex for _ in range(count)]
        names = [keys] if isinstance(keys, str) else list(keys)
        if len(names) != count or not all(isinstance(name, str) for name in names):
            raise InvalidRequestError(f"{count} heads were given with {len(names)} keys. Give one string per head.")
        _check_whole(2**16, parts=parts, min_parts=min_parts, attempts=attempts, worker_attempts=worker_attempts)
        if deadline_s is not None:
            _check_seconds(deadline_s=deadline_s)
        if isinstance(tasks, str) or not all(isinstance(task, str) for task in tasks or ()):
            raise InvalidRequestError(f"tasks must be a list of names, got {tasks!r}.")
        terms = p.Terms(parts, min_parts, deadline_s, attempts, worker_attempts, tuple(tasks or ()))
        return joined(await self.put_by_key(names, partition, rows, tags_by_row(tags, count), terms))

    async def async_lease(
        self,
        partition: str | Sequence[str],
        n: int = 1,
        *,
        by: Literal["group", "part"] = "group",
        where: str | None = None,
        lease_s: float = LEASE_S,
        keep: Keep = "closed",
        timeout_s: float | None = None,
    ) -> list[Lease]:
        """Lease up to ``n`` groups, or parts of groups; at least one. It waits until there is one to work on.

        Args:
            partition: A name, a pattern such as ``"train@*"`` (the oldest partition first), or a list of both in order
                of preference.
            by: "group": all open parts of a group. "part": one part per lease, so that workers share a group.
            where: Only groups whose heads' tags match this filter.
            lease_s: Seconds without a renewal after which the lease is lost. This process renews it by itself.
            keep: What to go on with of a lease that was lost: "closed" parts alone, "all" rows (``Lease.members``), or
                "none", not even closed parts.
            timeout_s: Longest wait. None: no limit, with a report every 30 s.
        Returns:
            Leases in the order in which work should begin.
        Raises:
            BatchTimeoutError: there was nothing to work on in time; says how many groups are in which state.
            EndOfPartitionError: the partitions are sealed, and no group of them can need work any more.
        Examples:
            >>> meta = client.add_groups({"prompt": torch.arange(2)}, "train", tags=[{"env": "math"}, {"env": "code"}])
            >>> [lease.tags for lease in client.lease("train", 2, where="env == 'code'")]
            [{'env': 'code'}]
        """
        names = as_names(partition, "partition")
        _check_whole(p.MOST_ROWS, n=n)
        _check_lease(names, by, keep, lease_s)
        request = p.LeaseGroups(0, names, n, by == "part", where, float(lease_s), keep)
        began = time.monotonic()
        end = began + (math.inf if timeout_s is None else checked_wait("lease", timeout_s))
        while True:
            now = time.monotonic()
            asked = {"id": self.session.number(), "wait_s": min(max(0.0, end - now), _SLICE_S), "waited_s": now - began}
            try:
                return await self._leased(msgspec.structs.replace(request, **asked))
            except SampleClearedError as error:
                # This process stood still between the answer and the reading of a head. The lease was lost meanwhile,
                # and its group has been trained: there may be other work.
                if time.monotonic() >= end:
                    raise BatchTimeoutError(
                        f"lease got only groups whose heads were cleared before it read them: {error.args[0]} Lease "
                        f"again, or wait longer (timeout_s)."
                    ) from error
            except BatchTimeoutError as error:
                if time.monotonic() >= end:
                    raise
                _log.warning("%s", error)

    async def _leased(self, request: p.LeaseGroups) -> list[Lease]:
        reply = await self.session.send(request, p.Reply, request.wait_s, keep=True)
        if isinstance(reply, p.Ended):
            names = ", ".join(map(repr, request.partitions))
            raise EndOfPartitionError(f"{names}: sealed, and no group there can need work any more.")
        assert isinstance(reply, p.LeasedGroups)
        try:
            heads: dict[int, tuple[TensorDict, Mapping[str, Any]]] = {}
            for batch in reply.heads:
                meta = to_meta(batch)
                data = await self.async_get_data(meta) if batch.fields else TensorDict({}, [meta.size])
                rows = [_dense(row) for row in rows_at(data, [[row] for row in range(meta.size)])]
                heads.update(zip(meta.global_indexes, zip(rows, meta.custom_meta, strict=True), strict=True))
        except BaseException:
            await self.session.cancel(request.id)
            raise
        await self.session.post_done(request.id)  # now: if this process dies at its work, that counts as an attempt
        found = [Lease(self, granted, *heads[granted.head], request.lease_s) for granted in reply.leases]
        self.renewals.add(found)
        return found

    def leases(
        self,
        partition: str | Sequence[str],
        n: int = 1,
        *,
        timeout_s: float | None = None,
        **terms: Unpack[LeaseTerms],
    ) -> LeaseStream:
        """Leases one after the other, for a worker: with ``for`` or ``async for``, until no group can need work.

        Args:
            n: How many it asks for at once.
            terms: ``by``, ``where``, ``lease_s`` and ``keep``, as for ``lease``.
        Examples:
            >>> meta = client.add_groups({"prompt": torch.arange(2)}, "train")
            >>> client.seal_partition("train")
            >>> for lease in client.leases("train"):
            ...     rows = lease.close({"response": lease.head["prompt"] * 10})
        """
        return LeaseStream(partial(self.async_lease, partition, n, timeout_s=timeout_s, **terms))

    async def async_advance(self, partition: str, version: int, *, resumed: bool = False) -> None:
        """Say which policy version trains now. What was drawn for earlier steps counts as trained.

        Args:
            partition: A name, or a pattern such as ``"train@*"``, for partitions to come, too.
            resumed: A trainer goes on from an earlier version. Otherwise versions never go back.
        Raises:
            GroupStateError: the version is lower than the last one.
        Examples:
            >>> client.advance("train@*", 3)
        """
        await self.session.ask(p.Advance, p.Done, partition, version, resumed)

    async def async_note_trained(self, partition: str, task_name: str, before: int, dp_rank: int = 0) -> None:
        """Say that the steps with a reader's batches below ``before`` are done: the slots of their groups are free.

        Loaders do so. A reader that asks for one batch after the other needs not, as its next fetch says the same.
        Batches may be asked for again until they are acknowledged.

        Examples:
            >>> client.note_trained("train", "update_actor", before=1)
        """
        await self.session.ask(p.Trained, p.Done, partition, task_name, before, dp_rank)

    async def async_move_on(self, partition: str, task_name: str, left: Sequence[str] = (), dp_rank: int = 0) -> None:
        """Say that a task draws groups of this partition from here on, and no more of those that it has left.

        There, the reader trains no more of what it was given. Groups that no other task trains expire, also new ones,
        and hold no slots. Fetches of the task are answered with the end of the stream, except for batches that were
        drawn before. Loaders do so between epochs.

        Examples:
            >>> client.move_on("train@1", "update_actor", left=["train@0"])
        """
        await self.session.ask(p.MoveOn, p.Done, partition, task_name, as_names(left, "left"), dp_rank)

    async def async_retry_groups(self, partition: str, where: str | None = None) -> int:
        """Make groups that failed, expired, were rejected or got stale wait again, as if they were new.

        Args:
            where: Only groups whose heads' tags match, such as ``"group.state == 'failed'"``.
        Returns:
            How many.
        Raises:
            GroupStateError: nobody would train them: a task's stream has ended, or all tasks have gone on.
        Examples:
            >>> meta = client.add_groups({"prompt": torch.arange(1)}, "train")
            >>> client.lease("train")[0].reject("too easy")
            >>> client.retry_groups("train", "group.state == 'rejected'")
            1
        """
        return int((await self.session.ask(p.RetryGroups, p.Done, partition, where)).value)

    async def async_reject(self, metadata: BatchMeta, reason: str) -> int:
        """A trainer has no use for the groups of this batch: they leave, and their slots are free.

        Returns:
            How many groups.
        Examples:
            >>> client.register_task("actor", tq.GroupSampler(groups=1))
            >>> meta = client.add_groups({"prompt": torch.arange(1)}, "train", tasks=["actor"])
            >>> rows = client.lease("train")[0].close({"response": torch.arange(3)})
            >>> batch = client.get_meta(["response"], 1, "train", task_name="actor")
            >>> client.reject(batch, "longer than the context")
            1
        """
        check_meta("reject", metadata)
        count = 0
        for part in metadata.chunk_by_partition() if metadata.size else ():
            for some in parts_of(part.size):
                packed = p.pack_indexes(part.global_indexes[some])
                count += (await self.session.ask(p.RejectGroups, p.Done, part.partition_ids[0], packed, reason)).value
        return count

    async def async_get_heads(
        self,
        metadata: BatchMeta,
        fields: Sequence[str] | str | None = None,
        layout: str | None = None,
    ) -> TensorDict:
        """Fields of the heads of a batch's groups: one row per group, in order of ``metadata.group_index``.

        Args:
            fields: Names, or one name. None: all that every head has.
            layout: As for ``get_data``. Dense tensors can be indexed by ``metadata.group_index``: a row per row of the
                batch.
        Raises:
            InvalidRequestError: a sample of the batch belongs to no group.
            StorageKeyNotFoundError: a head lacks a field that was asked for; the text names it.
        Examples:
            >>> meta = client.add_groups({"prompt": torch.tensor([7])}, "train")
            >>> rows = client.lease("train")[0].close({"response": torch.arange(3)})
            >>> batch = client.get_meta(["response"], 3, "train", task_name="reward")
            >>> client.get_heads(batch, "prompt")["prompt"][batch.group_index]
            tensor([7, 7, 7])
        """
        check_meta("get_heads", metadata)
        if not metadata.size:
            return TensorDict({}, batch_size=[0])
        heads = list(dict(zip(metadata.group_index, metadata.heads or (), strict=True)).values())
        partition, *others = dict.fromkeys(metadata.partition_ids)
        if others:
            raise InvalidRequestError(
                f"get_heads reads one partition at a time, this batch is of {[partition, *others]}: select its rows."
            )
        indexes = p.pack_indexes(heads)
        if fields is None:
            batch = await self.session.ask(p.Describe, p.Batch, partition, None, indexes)
        else:
            batch = await self._described(partition, as_names(fields), indexes)
        return await self.async_get_data(to_meta(batch), layout=layout)


def _dense(row: TensorDict) -> TensorDict:
    """One row has one shape, so that it needs no nested tensors."""
    for name, column in row.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            row.set(name, column.unbind()[0].unsqueeze(0))
    return row


def _check_whole(most: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most):
            raise InvalidRequestError(f"{name} must be a whole number from 1 to {most}, got {number!r}.")


def _check_seconds(**numbers: float) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= p.LONGEST_WAIT_S:
            raise InvalidRequestError(f"{name} must be a number of seconds above 0, got {number!r}.")


def _check_lease(names: list[str], by: str, keep: str, lease_s: float) -> None:
    """Raises InvalidRequestError for what the server would refuse less clearly."""
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f"partition must be a name, a pattern or a list of them, got {names!r}.")
    if by not in ("group", "part"):
        raise InvalidRequestError(f'by must be "group" or "part", got {by!r}.')
    if keep not in ("all", "closed", "none"):
        raise InvalidRequestError(f'keep must be "all", "closed" or "none", got {keep!r}.')
    _check_seconds(lease_s=lease_s)
