# SPDX-License-Identifier: Apache-2.0
"""SimpleStorage's client side: who holds what, and what is sent."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from transfer_queue.errors import ConfigError, ProtocolError, QueueUnreachableError
from transfer_queue.storage.simple.manager import SimpleStorageManager, unit_of
from transfer_queue.storage.simple.messages import Written, decode_request, encode
from transfer_queue.storage.simple.unit import StorageUnit
from transfer_queue.transport.base import Peer, Reply
from transfer_queue.transport.inproc_channel import InprocCaller
from transfer_queue.transport.modes import run_blocking


def config(num_units: int, **more) -> dict:
    return {"units": [{"name": f"u{n}", "address": f"inproc://u{n}", "pid": 7 + n} for n in range(num_units)], **more}


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
