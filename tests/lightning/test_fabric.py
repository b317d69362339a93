# SPDX-License-Identifier: Apache-2.0
"""FabricLoader: epochs, devices, checkpoints and failures, and the example on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from producing import FIELDS, fill

import transfer_queue as tq
from lightning_tq import FabricLoader, Producer, ProducerError
from tests.lightning.conftest import ROOT, stream
from tests.own_processes import SLOW
from tests.warm_python import run_python
from transfer_queue.errors import InvalidRequestError

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def passes(loader: FabricLoader, count: int = 1) -> list[list[list[int]]]:
    """Indexes of the micro-batches, per pass."""
    return [[list(meta.global_indexes) for _, meta in loader] for _ in range(count)]


def test_each_pass_is_an_epoch_and_ends_with_its_partition(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}", micro_batch_size=2), {"units": 1}) as loader:
        first, second = [fill(loader.client, f"train@{epoch}", 4) for epoch in range(2)]
        batches = passes(loader, 2)
    assert batches == [[first[:2], first[2:]], [second[:2], second[2:]]]
    assert loader.epoch == 1


def test_batches_are_on_fabrics_device_and_the_length_is_num_batches(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream(num_batches=2), {"units": 1}) as loader:
        fill(loader.client, "train", 8)
        devices = [data["x"].device for data, _ in loader]
        assert (len(loader), devices) == (2, [fabric.device] * 2)


def test_a_stream_may_be_a_mapping_of_its_options(fabric: Fabric) -> None:
    options = {"partition": "train", "task": "learn", "fields": FIELDS, "batch_size": 4}
    with FabricLoader(fabric, options, {"units": 1}) as loader:
        indexes = fill(loader.client, "train", 4)
        assert passes(loader) == [[indexes]]


def test_a_saved_loader_resumes_after_the_last_delivered_batch(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}) as loader:
        indexes = [fill(loader.client, f"train@{epoch}", 12) for epoch in range(2)]
        passes(loader)
        for _ in loader:
            fabric.save(path, {"loader": loader})
            break
        resumed = FabricLoader(fabric, stream("train@{epoch}"))
        fabric.load(path, {"loader": resumed})
        assert passes(resumed) == [[indexes[1][4:8], indexes[1][8:]]]
        assert resumed.epoch == 1
        resumed.close()  # it had joined the queue, so the queue stays
        assert loader.client.get_partition_list() == ["train@0", "train@1"]


def test_an_ended_epoch_is_an_empty_pass_after_a_resume(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}) as loader:
        indexes = [fill(loader.client, f"train@{epoch}", 4) for epoch in range(2)]
        passes(loader)
        resumed = FabricLoader(fabric, stream("train@{epoch}"))
        resumed.load_state_dict(loader.state_dict())
        assert passes(resumed, 2) == [[], [indexes[1]]]
        resumed.close()


def test_a_loader_that_is_set_back_after_a_pass_reads_the_rest_of_that_pass_again(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}, ack="never") as loader:
        indexes = fill(loader.client, "train@0", 12)
        states = [loader.state_dict() for _ in loader]
        for state, rest in ((states[2], []), (states[0], [indexes[4:8], indexes[8:]])):
            loader.load_state_dict(state)
            assert passes(loader) == [rest]


def test_a_loader_of_a_living_queue_that_is_set_back_keeps_what_it_is_to_read_again(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}) as first:
        indexes = fill(first.client, "train@0", 16)
        with FabricLoader(fabric, stream("train@{epoch}")) as loader:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
            for _ in range(2):
                for _ in range(3):
                    next(batches)
                loader.load_state_dict(state)
                assert loader.state_dict() == state  # this checkpoint acknowledges nothing after its position
                batches = iter(loader)
            assert [list(meta.global_indexes) for _, meta in batches] == [indexes[4:8], indexes[8:12], indexes[12:]]


def test_a_state_from_before_the_first_batch_sets_the_loader_back_to_its_start(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}) as first:
        indexes = fill(first.client, "train@0", 12)
        batches = [indexes[:4], indexes[4:8], indexes[8:]]
        before_all = first.state_dict()
        _, meta = next(iter(first))
        first.client.ack(meta, "learn")
        with FabricLoader(fabric, stream("train@{epoch}")) as loader:
            start = loader.state_dict()
            assert passes(loader) == [batches[1:]]
            loader.load_state_dict(start)
            assert loader.state_dict() == start
            assert passes(loader) == [batches[1:]]
        with FabricLoader(fabric, stream("train@{epoch}")) as other:
            other.load_state_dict(before_all)
            with pytest.raises(InvalidRequestError, match=r"the batches before 1 were acknowledged"):
                passes(other)


@pytest.mark.parametrize("options", [{}, {"replay": True}], ids=["once", "replay"])
def test_a_resumed_pass_holds_the_rest_of_it(fabric: Fabric, options: dict[str, Any]) -> None:
    with FabricLoader(fabric, stream("train@{epoch}", **options), {"units": 1}, ack="never") as loader:
        indexes = [fill(loader.client, f"train@{epoch}", 12) for epoch in range(2)]
        batches = [[rows[at : at + 4] for at in (0, 4, 8)] for rows in indexes]
        states = [loader.state_dict() for _ in loader]
        for done, state in enumerate(states, start=1):
            with FabricLoader(fabric, stream("train@{epoch}", **options), ack="never") as resumed:
                resumed.load_state_dict(state)
                assert passes(resumed, 2) == [batches[0][done:], batches[1]]


@pytest.mark.parametrize("partition", ["train", "train@{epoch}"])
def test_a_resumed_pass_has_num_batches_in_total(fabric: Fabric, partition: str) -> None:
    endless = stream(partition, micro_batch_size=2, num_batches=3)
    with FabricLoader(fabric, endless, {"units": 1}, ack="never") as loader:
        for name in {partition.format(epoch=epoch) for epoch in range(2)}:
            fill(loader.client, name, 40)
        states, batches = [], []
        for _ in range(2):
            for _, meta in loader:
                batches.append(list(meta.global_indexes))
                states.append(loader.state_dict())
        for done, state in enumerate(states, start=1):
            with FabricLoader(fabric, endless, ack="never") as resumed:
                resumed.load_state_dict(state)
                assert resumed.state_dict() == state
                first = (done - 1) // 3
                rest = [each for batches in passes(resumed, 2 - first) for each in batches]
                assert rest == batches[done:], done


def test_a_state_without_taken_is_accepted(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream("train@{epoch}"), {"units": 1}, ack="never") as loader:
        indexes = fill(loader.client, "train@0", 12)
        states = [loader.state_dict() for _ in loader]
        assert states[0].pop("taken") == 1
        with FabricLoader(fabric, stream("train@{epoch}"), ack="never") as resumed:
            resumed.load_state_dict(states[0])
            assert passes(resumed) == [[indexes[4:8], indexes[8:]]]


def test_a_resumed_loader_acknowledges_what_its_state_holds_of_earlier_passes(fabric: Fabric) -> None:
    kept = stream("train@{epoch}", clear_consumed=True)
    with FabricLoader(fabric, kept, {"units": 1}, ack="checkpoint") as loader:
        first, second = (fill(loader.client, f"train@{epoch}", 8) for epoch in range(2))
        assert passes(loader) == [[first[:4], first[4:]]]
        batch = next(iter(loader))[1]
        state = loader.state_dict()
        with FabricLoader(fabric, kept, ack="checkpoint") as resumed:
            resumed.load_state_dict(state)
            assert (list(batch.global_indexes), passes(resumed)) == (second[:4], [[second[4:]]])
            assert resumed.client.get_stats()["partitions"]["train@0"]["samples"] == 0


def in_flight(loader: FabricLoader) -> int:
    return int(loader.client.get_stats()["partitions"]["train"]["tasks"]["learn"]["in_flight"])


def test_a_batch_is_acknowledged_when_the_loop_asks_for_the_next_one(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream(prefetch=False), {"units": 1}) as loader:
        fill(loader.client, "train", 12)
        assert [in_flight(loader) for _ in loader] == [1, 1, 1]
        assert in_flight(loader) == 0


def test_after_the_first_state_dict_batches_wait_for_the_next_one(fabric: Fabric) -> None:
    with FabricLoader(fabric, stream(prefetch=False), {"units": 1}) as loader:
        fill(loader.client, "train", 24)
        held = []
        for number, _ in enumerate(loader):
            held.append(in_flight(loader))
            if number in (1, 4):
                loader.state_dict()
        assert held == [1, 1, 1, 2, 3, 1]
        assert in_flight(loader) == 1


def findings(client: tq.TransferQueueClient) -> list[tq.Finding]:
    """Once the queue has given up the producers of "train"."""
    with pytest.raises(tq.ProducersGoneError):
        client.get_meta(FIELDS, 8, "train", task_name="other", timeout_s=60)
    return tq.diagnose(client.get_stats())


def queue_that_stays() -> tq.TransferQueueClient:
    """The test's own, so that it can be asked after the loader is closed."""
    tq.init({"controller": {"producer_grace_s": 0.1}})
    return tq.get_client()


@pytest.mark.programs
def test_a_producer_that_fails_ends_the_pass_with_its_traceback_and_the_queue_knows_how(fabric: Fabric) -> None:
    producer = Producer(target="producing:produce_then_fail", args={"partition": "train", "count": 2})
    client = queue_that_stays()
    with (
        pytest.raises(ProducerError, match="the reward model fell over"),
        FabricLoader(fabric, stream(), producers=[producer]) as loader,
    ):
        passes(loader)
    (found,) = findings(client)
    assert found.kind == "gone"
    assert re.search(r"pid \d+, ended with exit code 1, .*the reward model fell over", str(found)), found


@pytest.mark.programs
def test_the_end_of_a_producer_by_its_loader_is_no_finding(fabric: Fabric, tmp_path: Path) -> None:
    args = {"partition": "train", "count": 4, "pid_file": str(tmp_path / "pid")}
    client = queue_that_stays()
    with FabricLoader(
        fabric, stream(num_batches=1), producers=[Producer(target="producing:produce_then_stay", args=args)]
    ) as loader:
        assert len(passes(loader)[0]) == 1
    assert findings(client) == []


def test_invalid_templates_acks_and_states_are_refused(fabric: Fabric) -> None:
    with pytest.raises(InvalidRequestError, match="a variable that FabricLoader doesn't know"):
        FabricLoader(fabric, stream("train@{global_step}"))
    with pytest.raises(InvalidRequestError, match="ack must be one of 'auto', 'checkpoint', 'step', 'never', got 'x'"):
        FabricLoader(fabric, stream(), ack="x")  # type: ignore[arg-type]
    with (
        FabricLoader(fabric, stream(), {"units": 1}) as loader,
        pytest.raises(InvalidRequestError, match="not a FabricLoader's state"),
    ):
        loader.load_state_dict({"position": {}})


@pytest.mark.slow
def test_the_example_learns_on_two_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(ROOT / "examples" / "fabric.py", "2", cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"^epoch \d: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < 0.01


_WITHOUT_GUARD = """
import torch
import transfer_queue as tq
from lightning.fabric import Fabric
from lightning_tq import FabricLoader, Producer, Stream

def produce():
    tq.get_client().put({"x": torch.rand(8, 4)}, partition_id="train")

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
train = Stream(partition="train", task="learn", fields=["x"], batch_size=4)
for data, _ in FabricLoader(fabric, train, producers=[Producer(target=produce)]):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]])
def test_ranks_that_a_producer_starts_with_the_main_program_are_an_error(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(_WITHOUT_GUARD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(*launcher, script, cwd=tmp_path, env=environment, timeout=120 * SLOW)
    assert done.returncode == 1, done.stderr
    assert "to find '__main__:produce', and failed there. Put what trains below 'if __name__" in done.stderr


_UNEVEN = """
from lightning.fabric import Fabric
from lightning_tq import FabricLoader, Stream

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    FabricLoader(fabric, Stream(partition="train", task="learn", fields=["x"], batch_size=4, tail="uneven_ok"))
"""


@pytest.mark.programs
def test_a_tail_that_may_end_one_rank_before_the_other_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_UNEVEN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(script, cwd=tmp_path, env=environment, timeout=120 * SLOW)
    assert done.returncode == 1, done.stderr
    assert "InvalidRequestError: stream 'train': tail='uneven_ok' can end the stream on one of 2 ranks" in done.stderr
