# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage's client side: who holds what, and what is sent."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue.storage.shm.manager import SimpleStorageManager
from transfer_queue.transport.inproc_channel import InprocCaller

from transfer_queue.errors import ConfigError, ProtocolError, QueueUnreachableError, StorageFullError
from transfer_queue.storage.shm.messages import Failed, Written, decode_request, encode
from transfer_queue.storage.shm.routing import LONG_RUN, ROUTING_RUN, best_run, routing_run, unit_of
from transfer_queue.storage.shm.unit import StorageUnit, Told
from transfer_queue.transport.base import Peer, Reply
from transfer_queue.transport.modes import run_blocking


def config(num_units: int, **more) -> dict:
    return {"units": [{"name": f"u{n}", "address": f"inproc://u{n}", "pid": 7 + n} for n in range(num_units)], **more}


def with_run(num_units: int, run: int | None) -> dict:
    """Units whose launcher said how they take turns."""
    return {"units": [{**unit, "run": run} for unit in config(num_units)["units"]]}


class Notebook:
    """A caller that answers everything with one header and notes what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked = []

    async def call_many(self, calls, timeout_s):
        made = list(calls)
        self.asked.append((made, timeout_s))
        return [Reply(self.answer, []) for _ in made]


def test_neighbouring_indexes_share_a_unit_and_runs_take_turns():
    assert unit_of(np.array([0, 63, 64, 127, 128, 192, 1 << 50]), 3).tolist() == [0, 0, 1, 1, 2, 0, (1 << 44) % 3]
    assert unit_of(np.arange(1000), 1).tolist() == [0] * 1000


def test_units_that_share_a_process_take_turns_in_long_runs():
    ends = np.array([0, 1, 1, 2, 2, 3, 3]) * (1 << 20) - np.array([0, 1, 0, 1, 0, 1, 0])
    assert unit_of(ends, 3, LONG_RUN).tolist() == [0, 0, 1, 1, 2, 2, 0]
    assert unit_of(ends, 1, LONG_RUN).tolist() == [0] * len(ends)


def test_units_are_started_with_long_runs_only_where_they_share_a_process_and_have_no_limit_of_their_own():
    assert best_run(True, None) == LONG_RUN
    assert [best_run(False, None), best_run(True, 1 << 30), best_run(False, 1 << 30)] == [ROUTING_RUN] * 3


def test_everybody_reads_the_runs_where_the_units_are_and_the_usual_ones_where_nothing_is_said():
    limited = {**with_run(2, LONG_RUN), "capacity_bytes": 1 << 30}
    assert [routing_run(settings) for settings in (with_run(2, 7), limited)] == [7, LONG_RUN]
    assert [routing_run(settings) for settings in (config(2), with_run(1, None))] == [ROUTING_RUN] * 2


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [(with_run(3, LONG_RUN), {0: 1200}), (with_run(3, ROUTING_RUN), {0: 432, 1: 384, 2: 384})],
    ids=["long", "usual"],
)
def test_what_a_put_sends_to_whom_goes_by_the_length_of_the_runs(settings, sizes):
    caller = Notebook(encode(Written()))
    data = TensorDict({"a": torch.zeros(1200)}, batch_size=[1200])
    run_blocking(SimpleStorageManager(caller, settings).put_data(data, rows_of(range(1200))))
    ((calls, _),) = caller.asked
    assert {int(call.peer.name[1:]): len(decode_request(call.header).indexes) // 8 for call in calls} == sizes


def rows_of(indexes, fields=()) -> SimpleNamespace:
    return SimpleNamespace(global_indexes=list(indexes), field_names=list(fields))


def put_rows(num_rows: int) -> tuple[list, float]:
    """The only exchange of a put of two fields: (its calls, its timeout)."""
    caller = Notebook(encode(Written()))
    manager = SimpleStorageManager(caller, config(3, put_timeout_s=5, timeout_s=2))
    data = TensorDict({"a": torch.zeros(num_rows), "b": torch.zeros(num_rows)}, batch_size=[num_rows])
    run_blocking(manager.put_data(data, SimpleNamespace(global_indexes=range(num_rows), field_names=[])))
    (asked,) = caller.asked
    return asked


def test_a_put_is_one_message_per_unit_touched_all_sent_at_once_and_none_of_them_waits_for_room():
    calls, timeout_s = put_rows(100)
    assert ([call.peer for call in calls], timeout_s) == (
        [Peer("u0", "inproc://u0", 7), Peer("u1", "inproc://u1", 8)],
        7.0,
    )
    writes = [decode_request(call.header) for call in calls]
    assert [(len(write.indexes) // 8, [part.field for part in write.parts], write.wait_s) for write in writes] == [
        (64, ["a", "b"], 0.0),
        (36, ["a", "b"], 0.0),
    ]


def test_a_put_to_one_unit_waits_for_room_in_its_first_message():
    (call,), timeout_s = put_rows(20)
    assert (decode_request(call.header).wait_s, timeout_s) == (5.0, 7.0)


def test_frames_of_a_contiguous_put_are_the_tensor_itself():
    caller = Notebook(encode(Written()))
    manager = SimpleStorageManager(caller, config(2))
    data = torch.zeros(256, 4096)
    meta = SimpleNamespace(global_indexes=range(256), field_names=[])
    run_blocking(manager.put_data(TensorDict({"a": data}, batch_size=[256]), meta))
    ((calls, _),) = caller.asked
    begins = [[(frame.ctypes.data - data.data_ptr()) // (4096 * 4) for frame in call.frames] for call in calls]
    assert begins == [[0, 128], [64, 192]]


def test_nothing_is_sent_for_no_rows_and_no_fields():
    caller = Notebook(encode(Written()))
    manager = SimpleStorageManager(caller, config(2))
    empty, fieldless = TensorDict({"a": torch.zeros(0)}, batch_size=[0]), TensorDict({}, batch_size=[2])
    run_blocking(manager.put_data(empty, SimpleNamespace(global_indexes=[], field_names=[])))
    run_blocking(manager.put_data(fieldless, SimpleNamespace(global_indexes=[1, 2], field_names=[])))
    run_blocking(manager.get_rows([1, 2], []))
    run_blocking(manager.clear_rows([]))
    assert caller.asked == []


def test_an_unexpected_answer_is_a_protocol_error():
    manager = SimpleStorageManager(Notebook(encode(Written())), config(1))
    with pytest.raises(ProtocolError, match="answered Written, expected Rows"):
        run_blocking(manager.get_rows([1], ["a"]))


def test_a_manager_without_units_is_a_config_error():
    with pytest.raises(ConfigError, match="no storage units"):
        SimpleStorageManager(Notebook(b""), config(0))


def test_an_unknown_layout_is_refused_before_anything_is_asked():
    manager = SimpleStorageManager(Notebook(b""), config(1, layout="padded"))
    with pytest.raises(ConfigError, match="layout is 'padded'"):
        run_blocking(manager.get_rows([1], ["a"]))


def test_a_unit_that_is_gone_is_told_as_such():
    manager = SimpleStorageManager(InprocCaller({"u0": StorageUnit("u0")}, "me"), config(2))
    with pytest.raises(QueueUnreachableError, match="no peer 'u1'"):
        run_blocking(manager.stats())


def test_stats_come_from_every_unit_in_order():
    units = {f"u{n}": StorageUnit(f"u{n}") for n in range(2)}
    manager = SimpleStorageManager(InprocCaller(units, "me"), config(2))
    data = TensorDict({"a": torch.zeros(70)}, batch_size=[70])
    run_blocking(manager.put_data(data, SimpleNamespace(global_indexes=range(70), field_names=[])))
    assert [(stats.unit, stats.samples, stats.live_nbytes) for stats in run_blocking(manager.stats())] == [
        ("u0", 64, 256),
        ("u1", 6, 24),
    ]


# ---- what a put says to the controller ----


class Meanwhile:
    """Counts how often there was time for something else."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def put_and_tell(manager: SimpleStorageManager, num_rows: int, meanwhile: Meanwhile) -> bytes:
    prepared = manager.prepared(TensorDict({"a": torch.zeros(num_rows)}, batch_size=[num_rows]))
    return run_blocking(manager.put_and_tell(prepared, range(num_rows), b"publish", meanwhile))


def test_a_put_to_one_unit_carries_its_message_and_brings_the_answer_back():
    caller, meanwhile = Notebook(encode(Written(-1, b"published"))), Meanwhile()
    assert put_and_tell(SimpleStorageManager(caller, config(3)), 64, meanwhile) == b"published"
    (((call,), _),) = caller.asked
    assert (decode_request(call.header).then, meanwhile.times) == (b"publish", 1)


def test_a_put_over_several_units_tells_nothing_as_none_of_them_knows_when_all_is_kept():
    caller, meanwhile = Notebook(encode(Written())), Meanwhile()
    assert put_and_tell(SimpleStorageManager(caller, config(3)), 65, meanwhile) == b""
    ((calls, _),) = caller.asked
    assert ([decode_request(call.header).then for call in calls], meanwhile.times) == ([b"", b""], 1)


def test_a_put_of_no_fields_asks_nobody_and_has_time_for_something_else():
    caller, meanwhile = Notebook(b""), Meanwhile()
    manager = SimpleStorageManager(caller, config(3))
    prepared = manager.prepared(TensorDict({}, batch_size=[2]))
    assert run_blocking(manager.put_and_tell(prepared, [0, 1], b"publish", meanwhile)) == b""
    assert (caller.asked, meanwhile.times) == ([], 1)


def test_a_put_that_tells_has_as_many_rows_as_samples():
    manager = SimpleStorageManager(Notebook(b""), config(1))
    prepared = manager.prepared(TensorDict({"a": torch.zeros(2)}, batch_size=[2]))
    with pytest.raises(ValueError, match="put of 2 rows for 3 samples"):
        run_blocking(manager.put_and_tell(prepared, [0, 1, 2], b"publish", Meanwhile()))


def test_what_can_not_be_stored_is_known_before_anything_is_asked():
    manager = SimpleStorageManager(Notebook(b""), config(1))
    with pytest.raises(TypeError, match="allow_pickle"):
        manager.prepared(TensorDict({"a": [object(), object()]}, batch_size=[2]))


@pytest.fixture
def near() -> tuple[SimpleStorageManager, list[tuple[str, bytes]]]:
    """A manager of two units beside a controller, and what that was told."""
    told: list[tuple[str, bytes]] = []

    def tell(client: str, message: bytes) -> Told:
        told.append((client, message))
        return Told(b"published", True)

    units = {f"u{n}": StorageUnit(f"u{n}", tell=tell) for n in range(2)}
    return SimpleStorageManager(InprocCaller(units, "me"), config(2)), told


def update(manager: SimpleStorageManager, num_rows: int, message: bytes):
    data = TensorDict({"a": torch.zeros(num_rows)}, batch_size=[num_rows])
    return run_blocking(manager.update_data(data, rows_of(range(num_rows)), absent=True, message=message))


@pytest.mark.parametrize(("num_rows", "said"), [(64, b"published"), (65, b"")], ids=["one unit", "two units"])
def test_an_update_tells_the_controller_where_one_unit_holds_all_of_it(near, num_rows, said):
    manager, told = near
    made = update(manager, num_rows, b"publish")
    assert (made.said, made.absent, told) == (said, True, [("me", b"publish")] if said else [])


def test_an_update_that_found_values_there_tells_nothing(near):
    manager, told = near
    update(manager, 1, b"first")
    assert update(manager, 2, b"second") is None
    assert (told, [stats.values for stats in run_blocking(manager.stats())]) == ([("me", b"first")], [1, 0])


def test_a_put_that_is_refused_is_not_taken_for_told():
    manager = SimpleStorageManager(Notebook(encode(Failed("StorageFullError", "full"))), config(1))
    with pytest.raises(StorageFullError, match="full"):
        put_and_tell(manager, 1, Meanwhile())
