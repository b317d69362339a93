# SPDX-License-Identifier: Apache-2.0
"""SharedMemoryManager: which unit holds which sample, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.local_caller import LocalCaller
from transfer_queue import protocol as p
from transfer_queue.errors import ConfigError, ProtocolError, QueueUnreachableError, StorageFullError
from transfer_queue.server.front import Front
from transfer_queue.storage.shm.manager import SharedMemoryManager
from transfer_queue.storage.shm.messages import (
    Commit,
    Delete,
    Deleted,
    EndSession,
    Read,
    Release,
    Rows,
    Write,
    Written,
    decode_columns,
    unpack_indexes,
)
from transfer_queue.storage.shm.unit import StorageUnit
from transfer_queue.storage.shm.unit_client import ROUTING_RUN, shares_of, unit_of
from transfer_queue.transport.base import Peer, RawReply
from transfer_queue.transport.modes import run_blocking
from transfer_queue.transport.session import Session

CONTROLLER = Peer("controller", "local://controller")


def config(num_units: int, **more: Any) -> dict[str, Any]:
    return {"units": [{"name": f"u{n}", "address": f"local://u{n}"} for n in range(num_units)], **more}


class NotedSession:
    """Answers every request with one of the same kind, and notes what it was asked."""

    controller = CONTROLLER

    def __init__(self, answer: p.Reply) -> None:
        self.answer = answer
        self.asked: list[tuple[list[Any], float]] = []
        self.told: list[tuple[str, p.Request]] = []
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    async def call_many(self, asks: Sequence[Any], timeout_s: float) -> list[RawReply]:
        self.asked.append((list(asks), timeout_s))
        return [RawReply(p.encode(self.answer), []) for _ in asks]

    async def post(self, peer: Peer, request: p.Request) -> None:
        self.told.append((peer.name, request))

    def using_memory(self) -> Any:
        return nullcontext()


def rows_of(indexes: Sequence[int], fields: Sequence[str] = ()) -> SimpleNamespace:
    return SimpleNamespace(global_indexes=list(indexes), field_names=list(fields))


def rows(count: int, *fields: str) -> TensorDict:
    return TensorDict({name: torch.zeros(count) for name in fields}, batch_size=[count])


# ---- which unit holds which sample ----


def test_neighbouring_indexes_share_a_unit_and_runs_of_them_take_turns():
    assert ROUTING_RUN == 64
    assert unit_of(np.array([0, 63, 64, 127, 128, 192, 1 << 50]), 3).tolist() == [0, 0, 1, 1, 2, 0, (1 << 44) % 3]
    assert unit_of(np.arange(1000), 1).tolist() == [0] * 1000


@pytest.mark.parametrize("kind", [list, np.array])
def test_the_shares_of_a_batch_name_each_position_once_and_no_unit_without_any(kind):
    batch = kind([200, 1, 64, 65, 0])
    shares = {unit: [int(batch[n]) for n in range(5)[at]] if isinstance(at, slice) else batch_at(batch, at)
              for unit, at in shares_of(batch, 3)}  # fmt: skip
    assert shares == {0: [200, 1, 0], 1: [64, 65]}
    assert [shares_of(kind(one), 3) for one in ([], [70, 64])] == [[], [(1, slice(0, 2))]]
    assert shares_of(kind([5, 500]), 1) == [(0, slice(0, 2))]


def batch_at(batch: Any, at: Any) -> list[int]:
    return [int(batch[n]) for n in at]


# ---- what is sent ----


def test_a_write_is_one_message_per_unit_that_holds_some_all_sent_at_once_and_none_of_them_waits_for_room():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(3, put_timeout_s=5, timeout_s=2))
    run_blocking(manager.write(1, range(100), manager.prepare(rows(100, "a", "b"))))
    ((asks, timeout_s),) = session.asked
    assert ([peer for peer, _, _ in asks], timeout_s) == ([Peer("u0", "local://u0"), Peer("u1", "local://u1")], 2.0)
    writes = [request for _, request, _ in asks]
    assert [
        (type(write), write.id, len(unpack_indexes(write.indexes)), write.wait_s, write.commit) for write in writes
    ] == [(Write, 1, 64, 0.0, False), (Write, 1, 36, 0.0, False)]
    assert [[part.field for part in write.columns.headers] for write in writes] == [["a", "b"], ["a", "b"]]


def test_a_put_to_one_unit_waits_for_room_and_is_committed_in_its_only_message():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(3, put_timeout_s=5, timeout_s=2))
    run_blocking(manager.put_data(rows(64, "a"), rows_of(range(64))))
    ((((_, write, _),), timeout_s),) = session.asked
    assert (write.wait_s, write.commit, timeout_s) == (5.0, True, 7.0)


def test_a_write_in_steps_is_committed_or_aborted_by_its_number_at_the_units_that_hold_some():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(3))
    run_blocking(manager.write(7, range(64, 65), manager.prepare(rows(1, "a"))))
    session.answer = p.Done(0)
    run_blocking(manager.commit(7, range(64, 65)))
    run_blocking(manager.abort(7, range(60, 70)))
    run_blocking(manager.end_session("gone", [7]))
    write, commit, *ends = [(peer.name, request) for asks, _ in session.asked for peer, request, _ in asks]
    assert (write[0], write[1].id, write[1].commit) == ("u1", 7, False)
    assert commit == ("u1", Commit(2, [7]))
    assert session.told == [("u0", p.Cancel(3, 7)), ("u1", p.Cancel(4, 7))]
    assert ends == [(f"u{n}", EndSession(5 + n, "gone", [7])) for n in range(3)]


def test_frames_of_a_contiguous_put_are_the_tensor_itself():
    session, data = NotedSession(Written(0)), torch.zeros(256, 4096)
    manager = SharedMemoryManager(session, config(2))
    run_blocking(manager.write(1, range(256), manager.prepare(TensorDict({"a": data}, batch_size=[256]))))
    ((asks, _),) = session.asked
    begins = [[(frame.ctypes.data - data.data_ptr()) // (4096 * 4) for frame in frames] for _, _, frames in asks]
    assert begins == [[0, 128], [64, 192]]


def test_nothing_is_sent_for_no_rows_and_no_fields():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(2))
    run_blocking(manager.put_data(rows(0, "a"), rows_of([])))
    run_blocking(manager.put_data(rows(2), rows_of([1, 2])))
    run_blocking(manager.get_rows([1, 2], []))
    run_blocking(manager.clear_rows([]))
    assert (session.asked, session.told) == ([], [])


def test_a_read_asks_for_each_field_once_and_a_clear_names_its_fields():
    session = NotedSession(Rows(0, []))
    manager = SharedMemoryManager(session, config(1))
    with pytest.raises(Exception):  # noqa: B017, PT011 (the answer holds no values)
        run_blocking(manager.get_rows([1], ["b", "a", "b"]))
    session.answer = Deleted(0, 0)
    run_blocking(manager.clear_rows([1], ["b", "a", "b"]))
    (read, delete) = [request for asks, _ in session.asked for _, request, _ in asks]
    packed = np.array([1]).tobytes()
    assert (read, delete) == (Read(1, packed, ["a", "b"]), Delete(2, packed, ["a", "b"]))


def test_what_a_read_pinned_is_released():
    session = NotedSession(Rows(9, [], [], True))
    manager = SharedMemoryManager(session, config(1))
    with pytest.raises(Exception):  # noqa: B017, PT011 (the answer holds no values)
        run_blocking(manager.get_rows([1], ["a"]))
    assert session.told == [("u0", Release(2, [9]))]


# ---- beside the controller ----


def test_it_is_in_front_where_its_only_unit_has_the_controller_s_address():
    beside = {"units": [{"name": "u0", "address": CONTROLLER.address}]}
    assert SharedMemoryManager(NotedSession(Written(0)), beside).is_in_front
    assert not SharedMemoryManager(NotedSession(Written(0)), config(1)).is_in_front
    both = {"units": [*beside["units"], *config(1)["units"]]}
    assert not SharedMemoryManager(NotedSession(Written(0)), both).is_in_front


def test_an_encoded_write_is_the_message_s_part_about_values_and_asks_nobody_where_frames_carry_them():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(1))
    encoded, frames = run_blocking(manager.encode_write(7, manager.prepare(rows(3, "a")), 3, [1, 2, 3]))
    columns = decode_columns(encoded)
    assert ([(header.field, header.rows) for header in columns.headers], columns.lease) == ([("a", 3)], 0)
    assert ([memoryview(frame).nbytes for frame in frames], session.asked) == ([12], [])


def test_values_that_are_not_wanted_are_released_by_the_number_of_their_call():
    session = NotedSession(Written(0))
    run_blocking(SharedMemoryManager(session, config(1)).release(7))
    assert session.told == [("u0", Release(1, [7]))]


# ---- what is refused ----


def test_an_unexpected_answer_is_a_protocol_error():
    manager = SharedMemoryManager(NotedSession(Written(0)), config(1))
    with pytest.raises(ProtocolError, match="answered Written, expected Rows"):
        run_blocking(manager.get_rows([1], ["a"]))


def test_a_refusal_of_a_unit_is_raised():
    manager = SharedMemoryManager(NotedSession(p.Failed(0, "StorageFullError", "full")), config(1))
    with pytest.raises(StorageFullError, match="full"):
        run_blocking(manager.put_data(rows(1, "a"), rows_of([1])))


def test_a_manager_without_units_is_a_config_error():
    with pytest.raises(ConfigError, match="no storage units"):
        SharedMemoryManager(NotedSession(Written(0)), config(0))


def test_an_unknown_layout_is_refused_before_anything_is_asked():
    session = NotedSession(Written(0))
    with pytest.raises(ConfigError, match="layout is 'padded'"):
        run_blocking(SharedMemoryManager(session, config(1, layout="padded")).get_rows([1], ["a"]))
    assert session.asked == []


def test_what_can_not_be_stored_is_known_before_anything_is_asked():
    session = NotedSession(Written(0))
    with pytest.raises(TypeError, match="allow_pickle"):
        SharedMemoryManager(session, config(1)).prepare(TensorDict({"a": [object(), object()]}, batch_size=[2]))
    assert session.asked == []


# ---- with units ----


@pytest.fixture
def units() -> dict[str, Front]:
    return {f"u{n}": Front({}, None, StorageUnit(f"u{n}")) for n in range(2)}


@pytest.fixture
def session(units) -> Iterator[Session]:
    made = Session("me", CONTROLLER)
    made.caller.close()
    made.caller = LocalCaller(units, "me")
    yield made
    made.close()


def test_a_unit_that_is_gone_is_named(session):
    manager = SharedMemoryManager(session, config(3))
    with pytest.raises(QueueUnreachableError, match="'u2'"):
        run_blocking(manager.stats())


def test_stats_come_from_every_unit_in_order(session):
    manager = SharedMemoryManager(session, config(2))
    run_blocking(manager.put_data(rows(70, "a"), rows_of(range(70))))
    assert [(stats.unit, stats.samples, stats.live_nbytes, stats.path) for stats in run_blocking(manager.stats())] == [
        ("u0", 64, 256, "frames"),
        ("u1", 6, 24, "frames"),
    ]


def test_a_write_in_steps_is_read_once_it_is_committed_and_gone_once_it_is_aborted(session, units):
    manager = SharedMemoryManager(session, config(2))
    run_blocking(manager.put_data(rows(100, "a"), rows_of(range(100))))
    for call, value in ((100, 1.0), (101, 2.0)):
        data = TensorDict({"a": torch.full((100,), value)}, batch_size=[100])
        run_blocking(manager.write(call, range(100), manager.prepare(data)))
    assert run_blocking(manager.get_rows(range(100), ["a"]))["a"].unique().tolist() == [0.0]
    run_blocking(manager.abort(101, range(100)))
    run_blocking(manager.commit(100, range(100)))
    run_blocking(manager.commit(101, range(100)))
    assert run_blocking(manager.get_rows(range(100), ["a"]))["a"].unique().tolist() == [1.0]
    assert [front.unit.stats().uncommitted_nbytes for front in units.values()] == [0, 0]
