# SPDX-License-Identifier: Apache-2.0
"""What a bad configuration, a missing queue and dead servers get; each test has a queue of its own, or none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from calls import answered
from omegaconf import OmegaConf
from plain_rows import Point, rows
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests.own_processes import SLOW
from transfer_queue import protocol as p
from transfer_queue.errors import InvalidRequestError, LaunchError, UnitLostError

JOIN_S = 20.0 * SLOW


class Pickled:
    """Ends a test that its unpickling would fail."""

    def __reduce__(self) -> Any:
        return (os.abort, ())


def test_a_queue_that_may_have_no_more_threads_names_the_limit(monkeypatch):
    def refuse(_):  # as the system does at ``ulimit -u``, which does not hold for root
        raise RuntimeError("can't start new thread")

    before = psutil.Process().children()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LaunchError, match=r"no more processes and threads .* Raise the limit \(ulimit -u"):
        tq.init()
    assert not set(psutil.Process().children()).difference(before)


@pytest.mark.programs
def test_a_program_killed_while_its_queue_starts_leaves_nothing_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", "import transfer_queue as tq; tq.init(); input()"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        while not psutil.Process(program.pid).children():
            assert program.poll() is None
        program.kill()
        assert program.stderr.read() == ""  # until the server has ended, too
    assert not list(tmp_path.glob("tq-*"))


def test_get_client_and_the_module_functions_ask_for_init_first():
    for call in (tq.get_client, lambda: tq.kv_put("k", "p", tag={"a": 1}), tq.kv_list):
        with pytest.raises(AssertionError, match=r"Please call init\(\) first"):
            call()
    assert tq.get_metrics_endpoint() is None
    tq.close()


# ---- configuration ----


@pytest.mark.parametrize(
    ("conf", "text"),
    [
        ({"controler": {}}, "'controler'. Nearest known key: 'controller'"),
        ({"controller": {"poling_mode": True}}, "'controller.poling_mode'. Nearest known key: 'polling_mode'"),
        ({"backend": {"SimpleStorage": {"num_units": 2}}}, "'backend.SimpleStorage.num_units'"),
        ({"backend": {"SimpleStorage": {"num_data_storage_units": 0}}}, "num_data_storage_units is 0"),
        ({"backend": {"storage_backend": "Redis"}}, "'Redis'"),
        ({"client": {"layout": "ragged"}}, r"client\.layout.*'ragged'"),
    ],
    ids=["section", "key", "deep", "units", "backend", "layout"],
)
def test_a_configuration_that_cannot_be_meant_starts_nothing(start, conf, text):
    with pytest.raises(ValueError, match=text) as caught:
        start(conf)
    assert isinstance(caught.value, tq.ConfigError)


def test_an_unknown_or_impossible_sampler_starts_nothing(start):
    with pytest.raises(ValueError, match="Could not find sampler"):
        start({"controller": {"sampler": "TransferQueueClient"}})
    for wrong in (3, print):
        with pytest.raises(TypeError, match="sampler"):
            start(OmegaConf.create({"controller": {"sampler": wrong}}, flags={"allow_objects": True}))


def test_keys_of_a_larger_program_pass(start):
    conf = start(OmegaConf.create({"enable": True, "verl_key": {"x": 1}, "metrics": {"enabled": False}}))
    assert (conf.enable, conf.verl_key.x) == (True, 1)


def test_keys_that_belong_elsewhere_are_warned_of(start, caplog):
    start({"memory": "1GiB", "dashboard": True})
    assert "'memory', of TQDataModule(queue=...), has no effect at the top level: set backend.Simple" in caplog.text
    assert "'dashboard', of TQDataModule(queue=...), has no effect at the top level: run lightning-tq" in caplog.text


# ---- nobody there ----


def test_a_wrong_address_is_an_error_at_once(start, tmp_path):
    with pytest.raises(ConnectionError, match="no such socket") as caught:
        start(f"ipc://{tmp_path}/controller")
    assert isinstance(caught.value, RuntimeError)


def killed(process: psutil.Process) -> None:
    process.kill()
    psutil.wait_procs([process], JOIN_S)


def server(conf: Any, name: str) -> psutil.Process:
    infos = {"controller": conf.controller.zmq_info, **conf.backend.SimpleStorage.zmq_info}
    return psutil.Process(infos[name].pid)


@pytest.mark.parametrize("processes", ["one", "each"])
def test_a_controller_killed_while_a_fetch_waits_ends_it_at_once(start, fork, processes):
    conf = start({"server_processes": processes})
    client = tq.get_client()
    client.put(rows(a=torch.arange(1)), partition_id="p")
    fork(kill_when_waiting, server(conf, "controller").pid)
    with pytest.raises(ConnectionError, match=r"controller .* has ended"):
        client.get_meta(["a"], 2, "p", task_name="t", timeout_s=60.0)
    with pytest.raises(ConnectionError, match=r"controller .* has ended"):
        asyncio.run(client.async_get_meta(["a"], 2, "p", task_name="t", timeout_s=60.0))
    with pytest.raises(ConnectionError):
        client.put(rows(a=torch.arange(1)), partition_id="p")


def kill_when_waiting(controller: int) -> None:
    client = tq.get_client()
    while not client.get_stats()["waiting"]:
        pass
    os.kill(controller, signal.SIGKILL)


def test_a_killed_unit_is_an_error_for_what_it_holds_and_the_queue_still_closes(start, fork):
    storage = {"num_data_storage_units": 1, "put_timeout_s": 5}
    conf = start({"server_processes": "each", "backend": {"SimpleStorage": storage}})
    client = tq.get_client()
    meta = client.put(rows(a=torch.arange(1)), partition_id="p")
    writer = fork(reserve_and_wait)
    while not client.get_stats()["partitions"].get("other", {}).get("held"):
        pass
    killed(server(conf, "unit0"))
    with pytest.raises(ConnectionError, match=r"storage unit .* has ended"):
        client.get_data(meta)
    with pytest.raises(UnitLostError, match="no storage unit of the queue can be reached"):
        client.put(rows(a=torch.arange(1)), partition_id="p")
    writer.kill()  # what it had reserved can't be freed in the dead unit, and the controller must outlive that
    writer.join(JOIN_S)
    client.seal_partition("other")
    with pytest.raises(tq.EndOfPartitionError):
        client.get_meta(["a"], 1, "other", task_name="t", timeout_s=JOIN_S)


def test_a_queue_is_saved_although_a_unit_ends_meanwhile_and_knows_what_it_lost(start, tmp_path):
    conf = start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    client = tq.get_client()
    metas = [client.put({"x": torch.full((3,), n)}, partition_id="p") for n in range(4)]
    victim = psutil.Process(server(conf, "unit0").pid)
    victim.suspend()
    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(client.save_checkpoint, tmp_path / "saved")
        while not list(tmp_path.rglob("0000-p")):  # its values are being read
            assert not saved.done()
        victim.kill()
        saved.result(JOIN_S)
    lost = client.get_lost_samples("p")
    assert 0 < len(lost["x"]) < 12
    client.load_checkpoint(tmp_path / "saved")
    assert client.get_lost_samples("p").keys() == {"x"}
    assert len(client.get_lost_samples("p")["x"]) == len(lost["x"])
    left = [n for n, meta in enumerate(metas) for index in meta.global_indexes if index not in lost["x"]]
    batch = client.get_meta(["x"], len(left), "p", task_name="t", timeout_s=JOIN_S)
    assert client.get_data(batch)["x"].tolist() == left


def test_calls_under_way_at_a_unit_that_is_killed_name_what_was_lost_and_puts_go_to_another(start):
    conf = start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    client, number = tq.get_client(), 4
    metas = [client.put({"x": torch.full((3,), n)}, partition_id="p") for n in range(number)]
    victim = psutil.Process(server(conf, "unit0").pid)
    victim.suspend()
    with ThreadPoolExecutor(2 * number + 1) as pool:
        reads = [pool.submit(client.get_data, meta) for meta in metas]
        puts = [pool.submit(client.put, {"x": torch.full((3,), n)}, None, "q") for n in range(number)]
        stats = pool.submit(client.get_storage_stats)
        assert concurrent.futures.wait(reads, JOIN_S, "FIRST_COMPLETED").done, "those at the other unit are served"
        victim.kill()
        errors = [each.exception() for each in reads]
        assert [unit["unit"] for unit in stats.result()] == ["unit1"]
        for n, put in enumerate(puts):
            assert client.get_data(put.result())["x"].tolist() == [n] * 3
    lost = client.get_lost_samples("p")["x"]
    for meta, error in zip(metas, errors, strict=True):
        if set(meta.global_indexes).isdisjoint(lost):
            assert error is None
            assert client.get_data(meta).batch_size == (3,)
            continue
        text = f"field 'x' of 3 samples, first {meta.global_indexes}"
        assert (type(error), text in str(error)) == (UnitLostError, True)
        with pytest.raises(UnitLostError, match=re.escape(text)):
            client.get_data(meta)
        client.put({"x": torch.zeros(3, dtype=torch.int64)}, metadata=meta)
    assert (len(lost), client.get_lost_samples("p")) == (6, {})


def test_what_a_lease_gives_of_a_group_whose_values_were_lost_is_an_error_until_they_are_put_again(start):
    start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    client = tq.get_client()
    rows = {"number": torch.arange(1), "text": ["a"]}
    heads = client.add_groups(rows, "p")
    (at,) = [each["unit"] for each in client.get_storage_stats() if each["samples"]]
    (first,) = client.lease("p")
    first.put({"answer": torch.tensor([5])})
    first.release("for another")
    (name,) = [name for name in client.get_stats()["clients"] if name.startswith(f"unit {at}")]
    client.evict_client(name, unit=True)
    for _ in range(2):  # the lease that failed was given back
        with pytest.raises(UnitLostError, match="field 'number' of 1 samples"):
            client.lease("p", keep="all")
    client.put(rows, metadata=heads)
    (second,) = client.lease("p", keep="all")
    assert (second.head["number"].tolist(), second.attempt) == ([0], 2)


def test_a_storage_unit_is_evicted_only_if_the_call_says_that_it_is_one(start):
    start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    client = tq.get_client()
    metas = [client.put({"x": torch.arange(3)}, partition_id="p") for _ in range(4)]
    (unit,) = [name for name in client.get_stats()["clients"] if name.startswith("unit unit0")]
    with pytest.raises(InvalidRequestError, match=r"is a storage unit, and what it stores would be lost.*--unit"):
        client.evict_client(unit)
    assert [client.get_data(meta)["x"].tolist() for meta in metas] == [[0, 1, 2]] * 4
    client.evict_client(unit, unit=True)
    assert len(client.get_lost_samples("p")["x"]) == 6


def reserve_and_wait() -> None:
    session = tq.get_client().session
    reserve = p.Reserve(session.number(), "other", 1)
    answered(tq.get_client(), reserve, p.Reserved, keep=True)
    signal.pause()


# ---- pickle, only when asked for ----


def test_with_allow_pickle_objects_of_any_class_come_back(start):
    start({"backend": {"SimpleStorage": {"allow_pickle": True}}})
    client = tq.get_client()
    meta = client.put(TensorDict({"a": NonTensorStack(Point(1), {"in": Point(2)})}, batch_size=[2]), partition_id="p")
    assert client.get_data(meta)["a"] == [Point(1), {"in": Point(2)}]


def test_a_reader_that_does_not_allow_pickle_never_unpickles(start):
    conf = start()
    trusting = tq.TransferQueueClient("trusting", conf.controller.zmq_info)
    trusting.initialize_storage_manager("SimpleStorage", conf.backend.SimpleStorage, allow_pickle=True)
    meta = trusting.put(TensorDict({"a": NonTensorStack(Pickled())}, batch_size=[1]), partition_id="p")
    trusting.close()
    with pytest.raises(TypeError, match="allow_pickle"):
        tq.get_client().get_data(meta)


def test_a_unit_that_does_not_answer_is_left_out_of_the_statistics(start):
    conf = start(
        {
            "server_processes": "each", "client": {"timeout_s": 5.0 * SLOW},
            "backend": {"SimpleStorage": {"num_data_storage_units": 2}},
        }
    )  # fmt: skip
    client, pid = tq.get_client(), conf.backend.SimpleStorage.zmq_info["unit1"].pid
    assert sorted(unit["unit"] for unit in client.get_storage_stats()) == ["unit0", "unit1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [unit["unit"] for unit in client.get_storage_stats()] == ["unit0"]
        assert sorted(unit["name"] for unit in client.get_stats()["storage_units"]) == ["unit0", "unit1"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sorted(unit["unit"] for unit in client.get_storage_stats()) == ["unit0", "unit1"]
