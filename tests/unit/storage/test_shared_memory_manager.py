# SPDX-License-Identifier: Apache-2.0
"""SharedMemoryManager: which unit is asked for which rows, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.local_caller import LocalCaller
from transfer_queue import protocol as p
from transfer_queue.errors import ConfigError, ProtocolError, QueueUnreachableError, StorageFullError, UnitLostError
from transfer_queue.protocol import unpack_indexes
from transfer_queue.server.front import Front
from transfer_queue.storage.base import RowsOf
from transfer_queue.storage.messages import (
    Abort,
    Commit,
    EndSession,
    EndWrite,
    Read,
    Release,
    Rows,
    Write,
    Written,
    decode_columns,
)
from transfer_queue.storage.shm.read import shares_of
from transfer_queue.storage.shm.shared_memory import SharedMemoryManager
from transfer_queue.storage.unit.unit import StorageUnit
from transfer_queue.transport.base import Peer
from transfer_queue.transport.blocking import run_blocking
from transfer_queue.transport.framing import Message
from transfer_queue.transport.session import Session

CONTROLLER = Peer("controller", "local://controller")


FRONT = {"units": [{"name": "controller", "address": CONTROLLER.address}]}


def config(num_units: int, **more: Any) -> dict[str, Any]:
    return {"units": [{"name": f"u{n}", "address": f"local://u{n}"} for n in range(num_units)], **more}


class NotedSession:
    """Answers every request with one of the same kind, and notes what it was asked."""

    controller = CONTROLLER
    caller = SimpleNamespace(client="me")

    def __init__(self, answer: p.Reply) -> None:
        self.answer = answer
        self.asked: list[tuple[list[Any], float]] = []
        self.told: list[tuple[str, p.Request]] = []
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    async def call_many(self, asks: Sequence[Any], timeout_s: float) -> list[Message]:
        self.asked.append((list(asks), timeout_s))
        return [Message(request.id, p.encode(self.answer), []) for _, request, _ in asks]

    async def post(self, peer: Peer, request: p.Request) -> None:
        self.told.append((peer.name, request))

    def using_memory(self) -> Any:
        return nullcontext()


def rows_of(indexes: Sequence[int], fields: Sequence[str] = ()) -> SimpleNamespace:
    return SimpleNamespace(global_indexes=list(indexes), field_names=list(fields))


def rows(count: int, *fields: str) -> TensorDict:
    return TensorDict({name: torch.zeros(count) for name in fields}, batch_size=[count])


# ---- which unit holds which rows ----


def listed(shares: Any) -> list[tuple[int, list[int] | slice, list[str]]]:
    return [(unit, at if isinstance(at, slice) else at.tolist(), fields) for unit, at, fields in shares]


def test_fields_in_one_unit_are_read_there_as_a_whole():
    assert listed(shares_of(5, ["a", "b"], {})) == [(0, slice(0, 5), ["a", "b"])]
    assert listed(shares_of(5, ["a", "b"], {"a": [(2, 5)], "b": [(2, 5)]})) == [(2, slice(0, 5), ["a", "b"])]
    assert listed(shares_of(5, ["a", "b"], {"a": [(2, 5)], "b": None})) == [
        (2, slice(0, 5), ["a"]),
        (0, slice(0, 5), ["b"]),
    ]


def test_rows_in_several_units_are_read_by_their_positions_once_per_unit_and_fields_that_lie_alike_together():
    runs = [(1, 2), (3, 1), (1, 1)]
    shares = listed(shares_of(4, ["a", "b", "c"], {"a": runs, "b": [(3, 4)], "c": list(runs)}))
    assert sorted(shares, key=str) == sorted(
        [(1, [0, 1, 3], ["a", "c"]), (3, [2], ["a", "c"]), (3, slice(0, 4), ["b"])], key=str
    )


# ---- what is sent ----


def test_a_write_without_room_waits_for_some_after_one_look_and_is_aborted_in_between():
    session = NotedSession(p.Failed(0, "StorageFullError", "full"))
    manager = SharedMemoryManager(session, config(1, put_timeout_s=5, timeout_s=2))
    with pytest.raises(StorageFullError, match="full"):
        run_blocking(manager.write(1, range(100), manager.prepare(rows(100, "a", "b"))))
    (look, first_timeout_s), (wait, timeout_s) = [(asks[0][1], timeout_s) for asks, timeout_s in session.asked]
    assert (look.wait_s, first_timeout_s) == (0.0, 2.0)
    assert 0 < wait.wait_s <= 5.0
    assert timeout_s == wait.wait_s + 2.0
    assert [(name, type(told), told.writes) for name, told in session.told] == 2 * [("u0", Abort, [1])]


def test_a_write_is_one_message_with_all_rows_of_all_fields():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(1))
    assert run_blocking(manager.write(1, range(100), manager.prepare(rows(100, "a", "b")))) is None
    ((((peer, write, _),), _),) = session.asked
    assert (peer, type(write), write.id) == (Peer("u0", "local://u0"), Write, 1)
    assert unpack_indexes(write.indexes).tolist() == list(range(100))
    assert [part.field for part in write.columns.headers] == ["a", "b"]


def test_a_write_in_steps_is_committed_or_aborted_by_its_number():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(1))
    units = run_blocking(manager.write(7, range(1), manager.prepare(rows(1, "a"))))
    session.asked.clear()
    session.answer = p.Done(0)
    run_blocking(manager.commit(7, units, [("gone", 7)]))
    run_blocking(manager.abort(7, units))
    run_blocking(manager.end_session("gone", [("gone", 7)]))
    run_blocking(manager.end_write(("gone", 8), []))
    asked = [request for asks, _ in session.asked for _, request, _ in asks]
    assert [(type(request), msgspec.structs.astuple(request)[1:]) for request in asked] == [
        (Commit, ([("gone", 7), ("me", 7)],)), (EndSession, ("gone", [("gone", 7)])),
        (EndWrite, (("gone", 8), [])),
    ]  # fmt: skip
    assert [(name, type(told), told.writes) for name, told in session.told] == [("u0", Abort, [7])]


def test_frames_of_a_contiguous_put_are_the_tensor_itself():
    session, data = NotedSession(Written(0)), torch.zeros(256, 4096)
    manager = SharedMemoryManager(session, config(1))
    run_blocking(manager.write(1, range(256), manager.prepare(TensorDict({"a": data}, batch_size=[256]))))
    (((_, _, (frame,)),), _) = session.asked[0]
    assert frame.ctypes.data == data.data_ptr()


def test_nothing_is_sent_for_no_rows_and_no_fields():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, config(1))
    run_blocking(manager.put_data(rows(0, "a"), rows_of([])))
    run_blocking(manager.put_data(rows(2), rows_of([1, 2])))
    run_blocking(manager.read(RowsOf([1, 2], []), None, None))
    run_blocking(manager.clear_rows([]))
    assert (session.asked, session.told) == ([], [])


def test_a_read_asks_for_each_field_once():
    session = NotedSession(Rows(0, []))
    manager = SharedMemoryManager(session, config(1))
    with pytest.raises(Exception):  # noqa: B017, PT011 (the answer holds no values)
        run_blocking(manager.read(RowsOf([1], ["b", "a", "b"]), None, None))
    (read,) = [request for asks, _ in session.asked for _, request, _ in asks]
    assert read == Read(1, np.array([1]).tobytes(), ["a", "b"], alone=True)


def test_what_a_read_pinned_is_released():
    session = NotedSession(Rows(9, [], [], True))
    manager = SharedMemoryManager(session, config(1))
    with pytest.raises(Exception):  # noqa: B017, PT011 (the answer holds no values)
        run_blocking(manager.read(RowsOf([1], ["a"]), None, None))
    assert session.told == [("u0", Release(2, [9]))]


# ---- beside the controller ----


def test_it_is_in_front_where_its_only_unit_has_the_controller_s_address():
    assert SharedMemoryManager(NotedSession(Written(0)), FRONT).front is not None
    assert SharedMemoryManager(NotedSession(Written(0)), config(1)).front is None
    both = {"units": [*FRONT["units"], *config(1)["units"]]}
    assert SharedMemoryManager(NotedSession(Written(0)), both).front is None


def test_an_encoded_write_is_the_message_s_part_about_values_and_asks_nobody_where_frames_carry_them():
    session = NotedSession(Written(0))
    manager = SharedMemoryManager(session, FRONT)
    encoded, frames = run_blocking(manager.encode_write(7, manager.prepare(rows(3, "a")), 3, [1, 2, 3], 0.0))
    columns = decode_columns(encoded)
    assert ([(header.field, header.rows) for header in columns.headers], columns.lease) == ([("a", 3)], 0)
    assert ([memoryview(frame).nbytes for frame in frames], session.asked) == ([12], [])


def test_values_that_are_not_wanted_are_released_by_the_number_of_their_call():
    session = NotedSession(Written(0))
    run_blocking(SharedMemoryManager(session, FRONT).release(7))
    assert session.told == [("controller", Release(1, [7]))]


# ---- what is refused ----


def test_an_unexpected_answer_is_a_protocol_error():
    manager = SharedMemoryManager(NotedSession(Written(0)), config(1))
    with pytest.raises(ProtocolError, match="answered Written, expected Rows"):
        run_blocking(manager.read(RowsOf([1], ["a"]), None, None))


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
        run_blocking(SharedMemoryManager(session, config(1, layout="padded")).read(RowsOf([1], ["a"]), None, None))
    assert session.asked == []


def test_what_can_not_be_stored_is_known_before_anything_is_asked():
    session = NotedSession(Written(0))
    with pytest.raises(TypeError, match="allow_pickle"):
        SharedMemoryManager(session, config(1)).prepare(TensorDict({"a": [object(), object()]}, batch_size=[2]))
    assert session.asked == []


# ---- with a unit ----


@pytest.fixture
def unit() -> StorageUnit:
    return StorageUnit("u0")


@pytest.fixture
def session(unit) -> Iterator[Session]:
    made = Session("me", CONTROLLER)
    made.caller.close()
    made.caller = LocalCaller({"u0": Front({}, None, unit)}, "me")
    yield made
    made.close()


def test_a_unit_that_is_gone_is_named(session):
    session.caller._handlers.clear()
    manager = SharedMemoryManager(session, config(1))
    with pytest.raises(QueueUnreachableError, match="'u0'"):
        run_blocking(manager.stats())
    with pytest.raises(UnitLostError, match="no storage unit of the queue can be reached"):
        run_blocking(manager.write(1, range(1), manager.prepare(rows(1, "a"))))


def test_statistics_say_how_this_client_s_values_travel(session):
    manager = SharedMemoryManager(session, config(1))
    run_blocking(manager.put_data(rows(70, "a"), rows_of(range(70))))
    (stats,) = run_blocking(manager.stats())
    assert (stats.unit, stats.samples, stats.live_nbytes, stats.path) == ("u0", 70, 280, "frames")


def test_a_write_in_steps_is_read_once_it_is_committed_and_gone_once_it_is_aborted(session, unit):
    manager = SharedMemoryManager(session, config(1))
    run_blocking(manager.put_data(rows(100, "a"), rows_of(range(100))))
    for call, value in ((100, 1.0), (101, 2.0)):
        data = TensorDict({"a": torch.full((100,), value)}, batch_size=[100])
        assert run_blocking(manager.write(call, range(100), manager.prepare(data))) is None
    assert run_blocking(manager.read(RowsOf(range(100), ["a"]), None, None))["a"].unique().tolist() == [0.0]
    run_blocking(manager.abort(101, None))
    run_blocking(manager.commit(100, None))
    run_blocking(manager.commit(101, None))
    assert run_blocking(manager.read(RowsOf(range(100), ["a"]), None, None))["a"].unique().tolist() == [1.0]
    assert unit.stats().uncommitted_nbytes == 0
