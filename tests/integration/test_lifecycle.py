# SPDX-License-Identifier: Apache-2.0
"""How a queue begins and ends: which process owns it, which only joined, what a killed one leaves behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from plain_rows import rows

import transfer_queue as tq
from tests.own_processes import SLOW, own_processes

JOIN_S = 20.0 * SLOW
SCRIPT_S = 80.0 * SLOW
"""Importing torch takes a busy machine half a minute."""
MAX_RSS_BYTES = 80e6


def servers() -> list[psutil.Process]:
    return own_processes(recursive=False)


def finished(process: subprocess.Popen[str]) -> str:
    """What a script printed; it must have ended well and silently."""
    output, errors = process.communicate(timeout=SCRIPT_S)
    assert (process.returncode, errors) == (0, "")
    return output


# ---- begin and end ----


def test_init_and_close_again_and_again_leave_nothing(own_temporary_directory, start):
    before = set(threading.enumerate())  # torch and tqdm keep theirs, if a test before this one used them
    for turn in range(3):
        conf = start()
        tq.kv_put("k", "p", {"x": torch.tensor(turn)})
        assert tq.kv_batch_get("k", "p")["x"].tolist() == [turn]
        assert Path(conf.address.removeprefix("ipc://")).is_socket()
        tq.close()
        tq.close()
        assert servers() == []
        assert list(own_temporary_directory.glob("tq-*")) == []
        assert [thread.name for thread in threading.enumerate() if thread not in before] == []


def test_init_returns_the_merged_configuration_and_again_the_same(start, caplog):
    conf = start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    addresses = [unit.to_addr("put_get_socket") for unit in conf.backend.SimpleStorage.zmq_info.values()]
    assert conf.controller.zmq_info.to_addr("request_handle_socket") == conf.address
    assert list(conf.backend.SimpleStorage.zmq_info) == ["unit0", "unit1", "unit2"]
    assert len({conf.address, *addresses}) == 4
    assert all(address.startswith("ipc://") for address in addresses)
    assert (conf.controller.polling_mode, conf.metrics.enabled, tq.get_metrics_endpoint()) == (False, False, None)
    assert start({"controller": {"polling_mode": True}}) is conf
    assert tq.init("ipc:///tmp/of-another-queue") is tq.init(conf.address) is conf
    assert [f"is in the queue at {conf.address}." in text for text in caplog.messages] == [True]


def test_the_configuration_travels_by_pickle_and_leads_to_the_queue(start):
    conf = pickle.loads(pickle.dumps(start()))
    client = tq.TransferQueueClient("c", conf.controller.zmq_info)
    client.initialize_storage_manager(conf.backend.storage_backend, conf.backend[conf.backend.storage_backend])
    assert client.put(rows(a=torch.arange(2)), partition_id="p").size == 2
    client.close()


def test_the_configuration_of_a_closed_queue_starts_another_one(start):
    conf = start({"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    tq.close()
    again = start(conf)
    assert again.address != conf.address
    assert list(again.backend.SimpleStorage.zmq_info) == ["unit0"]
    tq.kv_put("k", "p", tag={"a": 1})


def test_the_defaults_are_a_file_that_others_may_read_and_pass_back(start):
    text = (files("transfer_queue") / "config.yaml").read_text()
    conf = OmegaConf.create(text)
    OmegaConf.set_struct(conf, True)
    assert start(conf).controller.sampler == "SequentialSampler"


def test_a_section_of_a_larger_configuration_resolves_against_its_whole(start):
    section = {"server_processes": "each", "backend": {"SimpleStorage": {"num_data_storage_units": "${units}"}}}
    whole = OmegaConf.create({"units": 1, "tq": section})
    assert len(start(whole.tq).backend.SimpleStorage.zmq_info) == 1


def test_after_close_the_old_client_says_so(start):
    start()
    client = tq.get_client()
    tq.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.put(rows(a=torch.arange(1)), partition_id="p")
    with pytest.raises(AssertionError, match="init"):
        tq.get_client()


def test_after_its_client_was_closed_by_hand_init_joins_the_same_queue_again(start):
    conf = start()
    tq.kv_put("k", "p", {"x": torch.tensor(1)})
    tq.get_client().close()
    assert tq.init().address == conf.address
    assert tq.kv_batch_get("k", "p")["x"].tolist() == [1]
    tq.close()
    assert servers() == [], "it still is the owner's process"


def test_one_process_has_one_address_for_all_and_one_unit(start):
    conf = start({"server_processes": "one", "backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    (unit,) = conf.backend.SimpleStorage.zmq_info.values()
    assert unit.to_addr("put_get_socket") == conf.address == conf.controller.zmq_info.to_addr("request_handle_socket")


@pytest.mark.parametrize("processes", ["one", "each"])
def test_several_units_hold_the_values_together(start, processes):
    start({"server_processes": processes, "backend": {"SimpleStorage": {"num_data_storage_units": 3}}})
    meta = tq.get_client().put(rows(a=torch.arange(1000)), partition_id="p")
    assert tq.get_client().get_data(meta)["a"].tolist() == list(range(1000))


# ---- servers ----


@pytest.mark.parametrize(("processes", "number"), [("one", 1), ("each", 3)])
def test_servers_are_light(start, processes, number):
    start({"server_processes": processes})
    tq.kv_put("k", "p", {"x": torch.ones(10)})
    for server in servers():
        assert server.memory_info().rss < MAX_RSS_BYTES
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
        assert [library for library in ("libtorch", "libzmq", "/zmq/", "/ray/") if library in mapped] == []
    assert len(servers()) == number


def test_importing_the_package_loads_neither_torch_nor_lightning():
    code = "import sys, transfer_queue; print(sorted({'torch', 'ray', 'lightning', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


CONTROLLERS = {  # how the servers are run, and how many processes of their own they have
    "all in a process": ("one", False, 1),
    "a process each": ("each", False, 3),
    "controller in a thread": ("one", True, 1),
    "controller in a thread, units in a process each": ("each", True, 2),
}


def own_a_queue(processes: str, in_thread: bool, up: Any) -> None:
    class Local(tq.SequentialSampler):
        """Can't be imported elsewhere, so the controller stays in this process."""

    tq.init({"server_processes": processes, "controller": {"sampler": Local() if in_thread else "SequentialSampler"}})
    up.set()
    signal.pause()


@pytest.mark.parametrize(("processes", "in_thread", "number_of_them"), CONTROLLERS.values(), ids=CONTROLLERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_owner_that_is_ended_leaves_no_process_and_no_directory(
    own_temporary_directory, fork, number, processes, in_thread, number_of_them
):
    up = multiprocessing.get_context("fork").Event()
    owner = fork(own_a_queue, processes, in_thread, up)
    assert up.wait(JOIN_S)
    children = [os.pidfd_open(child.pid) for child in own_processes(owner.pid)]
    os.kill(owner.pid, number)
    assert len(children) == number_of_them
    for child in children:
        assert select.select([child], [], [], JOIN_S)[0] == [child]  # readable: it has ended
        os.close(child)
    owner.join(JOIN_S)
    assert list(own_temporary_directory.glob("tq-*")) == []


@pytest.mark.parametrize("processes", ["one", "each"])
def test_a_shutdown_that_reaches_all_processes_at_once_leaves_no_directory(own_temporary_directory, fork, processes):
    up = multiprocessing.get_context("fork").Event()
    owner = fork(own_a_queue, processes, False, up)
    assert up.wait(JOIN_S)
    children = [(child.pid, os.pidfd_open(child.pid)) for child in own_processes(owner.pid)]
    for pid in (*(pid for pid, _ in children), owner.pid):
        os.kill(pid, signal.SIGTERM)
    for _, child in children:
        assert select.select([child], [], [], JOIN_S)[0] == [child]
        os.close(child)
    owner.join(JOIN_S)
    assert list(own_temporary_directory.glob("tq-*")) == []


# ---- joining ----


@pytest.mark.programs
def test_a_process_finds_the_queue_by_tq_address_and_only_detaches(start, script):
    conf = start()
    code = (
        "import torch, transfer_queue as tq\n"
        "conf = tq.init(); assert len(conf.backend.SimpleStorage.zmq_info) == 1\n"
        "assert conf.controller.zmq_info.to_addr('request_handle_socket') == conf.address\n"
        "tq.kv_put('joined', 'p', {'x': torch.tensor(1)}); tq.close(); tq.close()\n"
        "print(sorted(tq.kv_list()['p'])); tq.close()\n"
        f"import os; del os.environ['TQ_ADDRESS']; tq.init({conf.address!r})\n"
        "print(sorted(tq.kv_list()['p'])); tq.close()"
    )
    assert finished(script(code)) == "['joined']\n['joined']\n"
    assert tq.kv_batch_get("joined", "p")["x"].tolist() == [1]


def put_a_tag() -> None:
    tq.close()  # the client of its parent
    tq.kv_put("k", "p", tag={"a": 1})


def test_a_worker_that_only_calls_kv_functions_joins_by_itself(start, fork):
    start()
    worker = fork(put_a_tag)
    worker.join(JOIN_S)
    assert worker.exitcode == 0
    assert tq.kv_list() == {"p": {"k": {"a": 1}}}


# ---- forks, threads, loops ----


def child_of_a_fork(numbers: list[int]) -> None:
    for number in numbers:
        tq.kv_put(f"k{number}", "p", {"x": torch.tensor(number)})
    tq.close()
    tq.init()  # joins again: the parent owns the queue
    assert tq.kv_batch_get(f"k{numbers[0]}", "p")["x"].tolist() == [numbers[0]]


@pytest.mark.parametrize("used", [False, True], ids=["unused client", "used client"])
def test_a_forked_child_uses_its_parents_client(start, fork, used):
    start()
    if used:
        tq.kv_put("k", "p", {"x": torch.tensor(0)})
    children = [fork(child_of_a_fork, list(range(n, 40, 4))) for n in range(4)]
    for child in children:
        child.join(JOIN_S)
    assert [child.exitcode for child in children] == [0] * 4
    keys = [f"k{n}" for n in range(40)]
    assert tq.kv_batch_get(keys, "p")["x"].tolist() == list(range(40))


def ends_without_close() -> None:
    tq.get_client().put(rows(a=torch.arange(1)), partition_id="p")


def test_a_producer_that_ends_without_close_is_not_taken_for_dead(start, fork):
    start({"controller": {"producer_grace_s": 0.0}})
    worker = fork(ends_without_close)
    worker.join(JOIN_S)
    client = tq.get_client()
    assert client.get_meta(["a"], 1, "p", task_name="t", timeout_s=JOIN_S).size == 1
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["a"], 1, "p", task_name="t", timeout_s=0.1)


@pytest.mark.programs
def test_a_script_needs_no_close_and_is_not_taken_for_dead_at_its_end(start, script):
    start({"controller": {"producer_grace_s": 0.0}})
    code = (
        "import torch, transfer_queue as tq; tq.init()\n"
        "tq.get_client().put({'a': torch.arange(1)}, partition_id='p')\n"
        "tq.kv_put('k', 'keys', {'x': torch.ones(2, 3)}); print(tq.kv_batch_get('k', 'keys')['x'][0].tolist())"
    )
    assert finished(script(code)) == "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n"
    client = tq.get_client()
    assert client.get_meta(["a"], 1, "p", task_name="t").size == 1
    with pytest.raises(tq.BatchTimeoutError):
        client.get_meta(["a"], 1, "p", task_name="t", timeout_s=0.1)


@pytest.mark.programs
def test_after_its_client_was_closed_by_hand_a_process_joins_the_same_queue_again(start, script):
    address = start().address
    use = f"tq.init({address!r}); tq.get_client().close(); print(tq.init().address)"
    assert (
        finished(script(f"import os, transfer_queue as tq; os.environ.pop('TQ_ADDRESS', None); {use}"))
        == address + "\n"
    )


@pytest.mark.programs
def test_a_queue_of_several_servers_ends_silently_whether_it_is_closed_or_not(script):
    use = "tq.init({'server_processes': 'each'}); tq.get_client().put({'a': torch.arange(200)}, partition_id='p')"
    assert finished(script(f"import torch, transfer_queue as tq; {use}; tq.close(); {use}")) == ""


def test_threads_share_one_client(start):
    start()
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for i in range(20):
                meta = tq.get_client().put(rows(a=torch.tensor([worker * 100 + i])), partition_id="p")
                assert tq.get_client().get_data(meta)["a"].tolist() == [worker * 100 + i]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert errors == []
    every = tq.get_client().get_meta(["a"], partition_id="p", mode="force_fetch")
    values = sorted(tq.get_client().get_data(every)["a"].tolist())
    assert values == sorted(worker * 100 + i for worker in range(6) for i in range(20))


def test_a_first_use_by_many_threads_and_coroutines_at_once(start):
    start()
    client = tq.get_client()
    done: list[int] = []

    async def many() -> list[tq.BatchMeta]:
        return await asyncio.gather(*(client.async_put(rows(a=torch.arange(1)), partition_id="p") for _ in range(5)))

    threads = [threading.Thread(target=lambda: done.append(len(asyncio.run(many())))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert done == [5] * 4


def test_loops_come_and_go_without_leaving_descriptors(start):
    start()
    client = tq.get_client()

    async def use() -> None:
        await asyncio.gather(*(client.async_put(rows(a=torch.arange(1)), partition_id="p") for _ in range(4)))

    def descriptors() -> int:
        asyncio.run(use())
        return psutil.Process().num_fds()

    first = max(descriptors() for _ in range(3))
    assert max(descriptors() for _ in range(30)) <= first + 8


def test_clients_that_come_and_go_leave_nothing_in_the_controller(start):
    conf = start()
    controller = psutil.Process(conf.controller.zmq_info.pid)

    def come_and_go() -> int:
        for _ in range(5):
            client = tq.TransferQueueClient("c", conf.controller.zmq_info)
            client.get_partition_list()
            client.close()
        return controller.num_fds()

    first = come_and_go()
    assert max(come_and_go() for _ in range(6)) <= first + 3


def test_a_close_ends_the_calls_that_wait_in_other_threads(start):
    start()
    client = tq.get_client()
    failures: list[BaseException] = []

    def waits() -> None:
        try:
            client.get_meta(["a"], 1, "p", task_name="t", timeout_s=60.0)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    while not client.get_stats()["waiting"]:
        pass
    tq.close()
    thread.join(JOIN_S)
    assert [str(failure)[:22] for failure in failures] == ["this client was closed"]


# ---- samplers of users ----

MINE = """
import os, sys, torch, transfer_queue as tq
from tensordict import TensorDict

class Mine(tq.BaseSampler):
    def __init__(self):
        super().__init__()
        self.calls = []
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        self.calls.append(kwargs["task_name"])
        picked = ready_indexes[-batch_size:]
        return picked, picked
"""


@pytest.mark.programs
def test_a_sampler_defined_in_the_script_picks_and_is_the_very_object(script):
    code = MINE + (
        "mine = Mine(); tq.init({'controller': {'sampler': mine}}); c = tq.get_client()\n"
        "c.put(TensorDict({'a': torch.arange(4)}, batch_size=[4]), partition_id='p')\n"
        "print(c.get_meta(['a'], 2, 'p', task_name='t').global_indexes, mine.calls); tq.close()\n"
        "tq.init({'controller': {'sampler': Mine}}); c = tq.get_client()\n"
        "c.put(TensorDict({'a': torch.arange(4)}, batch_size=[4]), partition_id='p')\n"
        "print(c.get_meta(['a'], 2, 'p', task_name='t').global_indexes)\n"
    )
    assert finished(script(code)) == "[2, 3] ['t']\n[2, 3]\n"


def test_a_sampler_of_a_module_is_named_by_path(start, tmp_path, monkeypatch):
    module = "import transfer_queue as tq\n" + MINE[MINE.index("class Mine") :]
    (tmp_path / "users_samplers.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    start({"controller": {"sampler_modules": ["users_samplers"]}})
    client = tq.get_client()
    client.register_task("t", sampler="users_samplers:Mine")
    meta = client.put(rows(a=torch.arange(4)), partition_id="p")
    assert client.get_meta(["a"], 1, "p", task_name="t").global_indexes == meta.global_indexes[3:]
    assert client.get_meta(["a"], 1, "p", task_name="other").global_indexes == meta.global_indexes[:1]


@pytest.mark.parametrize(
    "sampler",
    [tq.GRPOGroupNSampler(2), tq.SequentialSampler, "GRPOGroupNSampler"],
    ids=["object", "class", "name"],  # not the object's address, which is another in each process that collects
)
def test_built_in_samplers_may_be_given_as_object_class_or_name(start, sampler):
    conf = start(OmegaConf.create({"controller": {"sampler": sampler}}, flags={"allow_objects": True}))
    client = tq.get_client()
    client.put(rows(a=torch.arange(4)), partition_id="p")
    assert client.get_meta(["a"], 2, "p", task_name="t").size == 2
    assert len(servers()) == 1  # the controller is there, not in this process
    assert conf.controller.zmq_info.pid == servers()[0].pid


def test_the_environment_reaches_the_controller_and_the_fetch(start, monkeypatch):
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "8")
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0.05")
    start()
    client = tq.get_client()
    meta = client.put(rows(a=torch.arange(3)), partition_id="p")
    assert (meta.global_indexes, client.get_consumption_status("t", "p")[1].tolist()) == ([0, 1, 2], [0] * 8)
    assert client.check_production_status(["a"], "p") is False
    with pytest.raises(tq.BatchTimeoutError, match=r"waited 0\.[01] s"):
        client.get_meta(["a"], 4, "p", task_name="t")


def test_the_address_is_announced_while_the_queue_runs(start):
    assert "TQ_ADDRESS" not in os.environ
    conf = start()
    assert os.environ["TQ_ADDRESS"] == conf.address
    tq.close()
    assert "TQ_ADDRESS" not in os.environ


def test_a_process_that_forgets_its_queue_may_join_it_again_and_ends_it_with_close(start, monkeypatch):
    conf = start()
    tq.get_client().put(rows(a=torch.arange(4)), partition_id="p")
    for name in ("_TQ_CLIENT", "_TQ_STORAGE", "_TQ_CONTROLLER"):
        monkeypatch.setattr(f"transfer_queue.interface.{name}", None)
    gc.collect()
    assert tq.init().controller.zmq_info == conf.controller.zmq_info
    assert tq.get_client().get_meta(["a"], 4, "p", task_name="t").size == 4
    tq.close()
    assert not psutil.pid_exists(conf.controller.zmq_info.pid)
