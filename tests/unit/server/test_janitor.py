# SPDX-License-Identifier: Apache-2.0
"""Writes that end halfway: which are published, and that they end in the units of other processes, job by job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.local_plane import LocalPlane
from tests.unit.server.front_kit import NBYTES, Client, bytes_of, failed, front_of, specs
from transfer_queue import protocol as p
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.server.front import Front
from transfer_queue.server.janitor import Janitor
from transfer_queue.storage.base import StorageManager
from transfer_queue.storage.messages import AskUnitStats, ColumnHeader, Columns, Write, Written
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.storage.wire import dense_layout
from transfer_queue.transport.base import Peer
from transfer_queue.transport.session import Session


class NotedStorage(StorageManager):
    """Notes its jobs; fails the next one with ``error``."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, {})
        self.jobs: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.threads: set[str] = set()

    def note(self, *job: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.jobs.append(job)

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> Any: ...

    async def get_data(self, metadata: Any) -> Any: ...

    async def clear_data(self, metadata: Any) -> None:
        self.note("delete", list(metadata.global_indexes))

    async def end_session(self, client: str, published: Sequence[p.WriteName]) -> None:
        self.note("end", client, list(published))

    async def end_write(self, write: p.WriteName, published: Sequence[p.WriteName]) -> None:
        self.note("end write", write, list(published))

    async def close(self) -> None:
        self.note("close")


# ---- which writes are published ----


# ---- the thread ----


@pytest.fixture
def storage() -> NotedStorage:
    return NotedStorage(Session("controller", Peer("controller", "local://controller")))


@pytest.fixture
def janitor(storage) -> Iterator[Janitor]:
    made = Janitor(storage)
    yield made
    if "close" not in [job[0] for job in storage.jobs]:
        made.close()


def test_jobs_are_done_in_order_in_a_thread_of_its_own_and_all_of_them_before_it_is_closed(janitor, storage):
    janitor.delete(np.array([3, 4]))
    janitor.end_session("me", [("other", 1), ("me", 10)])
    janitor.end_write(("me", 11), [("other", 1), ("me", 11)])
    janitor.end_write(("me", 12), [])
    janitor.delete(np.array([5]))
    janitor.close()
    assert storage.jobs == [
        ("delete", [3, 4]), ("end", "me", [("other", 1), ("me", 10)]),
        ("end write", ("me", 11), [("other", 1), ("me", 11)]), ("end write", ("me", 12), []), ("delete", [5]),
        ("close",),
    ]  # fmt: skip
    assert list(janitor.committed) == [("me", 10), ("me", 11)], "the others are their clients' to report"
    assert storage.threads == {"tq-janitor"}
    assert "tq-janitor" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "error", [QueueUnreachableError("gone"), OSError("a backend of a user")], ids=lambda e: type(e).__name__
)
def test_a_job_that_fails_is_logged_and_the_next_one_is_done(janitor, storage, caplog, error):
    storage.error = error
    caplog.set_level(logging.DEBUG, "transfer_queue.server.janitor")
    janitor.delete(np.array([3]))
    janitor.delete(np.array([4]))
    janitor.close()
    assert storage.jobs == [("delete", [4]), ("close",)]
    assert str(error) in caplog.text


# ---- behind a front ----


@pytest.fixture(params=["units of other processes alone", "a unit of its own, too"])
def front(request, janitor) -> Front:
    unit = StorageUnit("u0") if request.param == "a unit of its own, too" else None
    made = Front({}, LocalPlane(), unit, lambda: janitor)
    made.start_janitor()
    return made


def put_in_steps(client: Client, dtype: str = "uint8") -> tuple[bytes, Any]:
    """A new sample: its packed index, and the answer to its publish."""
    reserved = client.one(client.reserve(1))
    fields = {"x": p.FieldSpec(dtype, (100,))}
    answer = client.one(p.Publish(client.number(), "p", reserved.indexes, fields, completes=reserved.id))
    client.send(p.ListPartitions(client.number()), received=[reserved.id, answer.id])
    return reserved.indexes, answer


def published(client: Client) -> tuple[int, Any]:
    """A write to a sample that exists: its first call, and the answer to its publish."""
    indexes, _ = put_in_steps(client)
    first = client.one(p.CheckFields(client.number(), "p", indexes, specs()))
    request = p.Publish(client.number(), "p", indexes, specs(), completes=first.id, uncommitted=True)
    return first.id, client.one(request)


def give_up(client: Client, first: int, publish: int = 0) -> None:
    """The client cancels both calls, because it doesn't know how far the write came."""
    for call in filter(None, (first, publish)):
        client.cancel(call)


def test_a_published_write_is_committed_for_a_client_that_ends_before_it_could(front, janitor, storage):
    me = Client(front, "me")
    write, answer = published(me)
    assert isinstance(answer, p.Published)
    me.gone()
    janitor.close()
    assert storage.jobs == [("end", "me", [("me", write)]), ("close",)]


def test_a_write_that_its_client_has_committed_is_not_committed_again(front, janitor, storage):
    me = Client(front, "me")
    write, publish = published(me)
    me.send(p.ListPartitions(me.number()), received=[write, publish.id])
    me.gone()
    janitor.close()
    assert storage.jobs == [("end", "me", []), ("close",)]


def test_a_write_whose_publish_was_refused_is_not_committed_and_its_values_are_deleted(front, janitor, storage):
    me, other = Client(front, "me"), Client(front, "other")
    other.one(p.CreatePartition(other.number(), "p", None, {"x": p.DeclaredField("uint8")}))
    put_in_steps(other)
    _, answer = put_in_steps(me, "int64")
    failed(answer, "SchemaConflictError")
    me.gone()
    janitor.close()
    assert storage.jobs == [("end", "me", []), ("delete", [1]), ("close",)]


def test_what_a_session_reserved_is_deleted_after_its_end(front, janitor, storage):
    me = Client(front, "me")
    me.one(p.Reserve(me.number(), "p", 3, specs()))
    assert me.one(p.Goodbye(me.number())) == p.Done(2)
    me.gone()
    janitor.close()
    assert storage.jobs == [("end", "me", []), ("delete", [0, 1, 2]), ("end", "me", []), ("close",)]


def test_a_cancelled_reservation_is_deleted(front, janitor, storage):
    me = Client(front, "me")
    me.one(p.Reserve(me.number(), "p", 2, specs()))
    me.cancel(1)
    janitor.close()
    assert storage.jobs == [("delete", [0, 1]), ("close",)]


def test_a_write_that_its_client_gave_up_is_committed_where_it_is_published_and_else_aborted(front, janitor, storage):
    me = Client(front, "me")
    write, publish = published(me)
    unpublished = me.one(p.CheckFields(me.number(), "p", p.pack_indexes([0]), specs())).id
    give_up(me, write, publish.id)
    for call in (unpublished, unpublished, 99):
        me.cancel(call)
    me.gone()
    janitor.close()
    assert storage.jobs == [
        ("end write", ("me", write), [("me", write)]),
        ("end write", ("me", unpublished), []),
        ("end", "me", []),
        ("close",),
    ]


# ---- in the unit of the front's own process ----


def write_in_steps(client: Client, first: Any, indexes: bytes, value: int, fresh: bool) -> None:
    columns = Columns([ColumnHeader("x", dense_layout("uint8", 1, (NBYTES,)), 1)])
    written = client.one(Write(first.id, indexes, columns, 0.0, fresh), [bytes_of([value])])
    assert isinstance(written, Written)


def publish(client: Client, first: Any, indexes: bytes) -> int:
    request = p.Publish(client.number(), "p", indexes, specs(), completes=first.id, uncommitted=True)
    assert isinstance(client.one(request), p.Published)
    return request.id


@pytest.mark.parametrize("how", ["cancelled", "ended"])
@pytest.mark.parametrize("is_published", [True, False])
def test_a_write_that_replaces_a_value_in_steps_and_ends_halfway_is_committed_if_it_is_published(how, is_published):
    front = front_of()
    me, other = Client(front, "me"), Client(front, "other")
    assert other.stored([3]) == [0]
    indexes = p.pack_indexes([0])
    first = me.one(p.CheckFields(me.number(), "p", indexes, specs()))
    write_in_steps(me, first, indexes, 7, fresh=False)
    last = publish(me, first, indexes) if is_published else 0
    assert me.one(AskUnitStats(me.number())).uncommitted_nbytes == (0 if is_published else NBYTES)
    give_up(me, first.id, last) if how == "cancelled" else me.gone()
    assert other.one(AskUnitStats(other.number())).uncommitted_nbytes == 0
    assert other.values([0]) == {0: 7 if is_published else 3}


@pytest.mark.parametrize("how", ["cancelled", "ended"])
@pytest.mark.parametrize("is_published", [True, False])
def test_values_of_new_samples_are_stored_at_once_and_gone_if_their_put_ends_before_its_publish(how, is_published):
    front = front_of()
    me, other = Client(front, "me"), Client(front, "other")
    reserved = me.one(me.reserve(1))
    write_in_steps(me, reserved, reserved.indexes, 7, fresh=True)
    stats = me.one(AskUnitStats(me.number()))
    assert (stats.uncommitted_nbytes, stats.values) == (0, 1)
    if is_published:
        publish(me, reserved, reserved.indexes)
    me.cancel(reserved.id) if how == "cancelled" else me.gone()
    assert other.one(AskUnitStats(other.number())).values == int(is_published)
    if is_published:
        assert other.values([0]) == {0: 7}


# ---- when it starts ----


def test_the_thread_starts_when_the_first_unit_joins_and_ends_with_the_front(storage):
    made: list[Janitor] = []

    def make() -> Janitor:
        made.append(Janitor(storage))
        return made[-1]

    front = Front({}, LocalPlane(), StorageUnit("u0"), make)
    first, second = Client(front, "first"), Client(front, "second")
    failed(first.one(p.JoinUnit(first.number(), "first", "host", [])), "InvalidRequestError", "without an address")
    assert made == []
    for client in (first, second):
        assert isinstance(client.one(p.JoinUnit(client.number(), client.name, "host", ["tcp://host:1"])), p.Done)
    first.gone()
    front.close()
    assert (len(made), storage.jobs) == (1, [("end", "first", []), ("close",)])


def test_a_front_that_no_unit_has_joined_has_no_thread_to_end(storage):
    front = Front({}, LocalPlane(), StorageUnit("u0"), lambda: Janitor(storage))
    Client(front, "me").gone()
    front.close()
    assert storage.jobs == []
