# SPDX-License-Identifier: Apache-2.0
"""Janitor: what ended sessions leave in units of other processes is committed or deleted, job by job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.server.front_kit import Client, failed, specs
from transfer_queue import protocol as p
from transfer_queue.control.plane import ControlPlane
from transfer_queue.errors import QueueUnreachableError
from transfer_queue.server.front import Front
from transfer_queue.server.janitor import Janitor
from transfer_queue.storage.base import StorageManager
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

    async def end_session(self, client: str, published: Sequence[int]) -> None:
        self.note("end", client, list(published))

    async def end_write(self, client: str, call: int, published: bool) -> None:
        self.note("commit" if published else "abort", client, call)

    async def close(self) -> None:
        self.note("close")


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
    janitor.end_session("me")
    janitor.delete(np.array([5]))
    janitor.close()
    assert storage.jobs == [("delete", [3, 4]), ("end", "me", []), ("delete", [5]), ("close",)]
    assert storage.threads == {"tq-janitor"}
    assert "tq-janitor" not in [thread.name for thread in threading.enumerate()]


def test_the_end_of_a_session_names_the_writes_that_were_published_and_maybe_not_committed(janitor, storage):
    janitor.published("me", 10)
    janitor.published("me", 20)
    janitor.published("other", 30)
    janitor.received("me", [10, 11, 99])
    janitor.received("nobody", [21])
    for client in ("me", "me", "other"):
        janitor.end_session(client)
    janitor.close()
    assert storage.jobs[:3] == [("end", "me", [20]), ("end", "me", []), ("end", "other", [30])]


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


# ---- behind a front without storage ----


@pytest.fixture
def front(janitor) -> Front:
    return Front({}, ControlPlane(), None, janitor)


def published(client: Client, dtype: str = "uint8") -> tuple[int, Any]:
    """(number of the reservation, the answer to its publish)"""
    reserved = client.one(client.reserve(1))
    fields = {"x": p.FieldSpec(dtype, (100,))}
    answer = client.one(p.Publish(client.number(), "p", reserved.indexes, fields, completes=reserved.id))
    return reserved.id, answer


def test_a_published_write_is_committed_for_a_client_that_ends_before_it_could(front, janitor, storage):
    me = Client(front, "me")
    write, answer = published(me)
    assert isinstance(answer, p.Published)
    me.gone()
    janitor.close()
    assert storage.jobs == [("end", "me", [write]), ("close",)]


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
    published(other)
    _, answer = published(me, "int64")
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
    assert storage.jobs == [("abort", "me", 1), ("delete", [0, 1]), ("close",)]


def test_a_write_that_its_client_gave_up_is_committed_where_it_is_published_and_else_aborted(front, janitor, storage):
    me = Client(front, "me")
    write, _ = published(me)
    unpublished = me.one(p.Reserve(me.number(), "p", 1, specs())).id
    for call in (write, unpublished, unpublished, 99):
        me.cancel(call)
    me.gone()
    janitor.close()
    assert storage.jobs == [
        ("commit", "me", write),
        ("abort", "me", unpublished),
        ("delete", [1]),
        ("end", "me", []),
        ("close",),
    ]
