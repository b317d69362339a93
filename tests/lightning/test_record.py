# SPDX-License-Identifier: Apache-2.0
"""A record holds what a task was given, whoever ends when; a Trainer that replays it trains the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from producing import fill

import transfer_queue as tq
from lightning_tq import FabricLoader, PartitionSwitch, Producer, PublishWeights, Stream, TQDataModule
from tests.console import lightning_tq
from tests.lightning.conftest import stream
from tests.warm_python import Program, started
from transfer_queue.errors import InvalidRequestError

pytestmark = pytest.mark.timeout(600)


class Noting(LightningModule):
    """Notes all that a step gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data, meta = batch
        heads = None if batch.heads is None else batch.heads["number"].tolist()
        self.noted.append((
            meta.partition_ids, meta.global_indexes, meta.custom_meta, meta.batch_index, meta.heads,
            meta.group_versions, heads, data["x"].tolist(), list(data["text"]),
        ))  # fmt: skip
        loss: torch.Tensor = self.layer(data["x"] / 100).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)


@contextmanager
def run_recorder(address: str, directory: Path, task: str = "learn") -> Iterator[tuple[Program, IO[str]]]:
    """The command in a process, and what it prints."""
    with started("-m", "lightning_tq", "record", address, directory, "--task", task) as (process, said, _):
        yield process, said


@contextmanager
def recorder(address: str, directory: Path, task: str = "learn") -> Iterator[tuple[Program, IO[str]]]:
    """One that has said that it records."""
    with run_recorder(address, directory, task) as (process, said):
        assert said.readline().startswith(f"Recording task {task!r}")
        yield process, said


def weights(model: LightningModule) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def replayed(trainer: Callable[..., Any], directory: Path, **options: Any) -> Noting:
    model = Noting()
    with TQDataModule(train=stream(**options, replay_from=str(directory))) as datamodule:
        trainer(max_epochs=9).fit(model, datamodule)
    return model


PRODUCED = Producer(target="producing:produce_epochs", args={"epochs": 2, "train": 20, "val": 0})


@pytest.mark.programs
def test_a_replay_trains_the_same_batches_to_the_same_weights_without_producers(
    tmp_path: Path, trainer: Callable[..., Any]
) -> None:
    read = {"partition": "train@{epoch}", "micro_batch_size": 2}
    queue = {"units": 1, "total_storage_size": 12}  # so it also stands still where the recorder held it up for ever
    model = Noting()
    datamodule = TQDataModule(train=stream(**read, clear_consumed=True), queue=queue, producers=[PRODUCED])
    with datamodule, recorder(datamodule.address, tmp_path / "record") as (process, out):
        trainer(max_epochs=2).fit(model, datamodule)
        datamodule.close()  # waits for the recorder
        said = out.read()
        process.wait()
    assert "10 batches written" in said
    assert (process.returncode, "missing" in said) == (0, False)
    assert len(model.noted) == 20
    again = replayed(trainer, tmp_path / "record", **read)
    assert again.noted == model.noted
    assert weights(again) == weights(model)


@pytest.mark.programs
def test_groups_are_replayed_with_their_heads_and_versions(tmp_path: Path, trainer: Callable[..., Any]) -> None:
    producers = [
        Producer(target="producing:feed_numbers", args={"count": 8}),
        Producer(target="producing:work_on_groups"),
    ]
    sampler = tq.GroupSampler(groups=2)
    read = {"batch_size": None, "head_fields": ["number"]}
    model = Noting()
    datamodule = TQDataModule(train=stream(**read, sampler=sampler), queue={"units": 1}, producers=producers)
    with datamodule, recorder(datamodule.address, tmp_path / "record") as (process, _):
        trainer().fit(model, datamodule)
        datamodule.close()
        process.wait()
    assert [len(noted[6]) for noted in model.noted] == [2, 2, 2, 2]
    assert replayed(trainer, tmp_path / "record", **read, sampler=sampler).noted == model.noted
    with pytest.raises(InvalidRequestError, match="is of batch_size=None, and this stream has batch_size=16"):
        replayed(trainer, tmp_path / "record", batch_size=16)
    with pytest.raises(InvalidRequestError, match="lacks the head field nunber; it has number"):
        replayed(trainer, tmp_path / "record", batch_size=None, head_fields=["nunber"], sampler=sampler)
    with pytest.raises(InvalidRequestError, match="has batches of 2 groups, and the GroupSampler of this stream draws"):
        replayed(trainer, tmp_path / "record", **read, sampler=tq.GroupSampler(groups=1))


def client_of(data: Callable[..., TQDataModule]) -> tq.TransferQueueClient:
    return data(train=stream()).client


def learning(data: Callable[..., TQDataModule], samples: int) -> tq.TransferQueueClient:
    """The client of a queue with so many samples, and a task that a recorder may follow."""
    client = client_of(data)
    client.register_task("learn", dp_size=1)
    fill(client, "train", samples)
    return client


def take(client: tq.TransferQueueClient, number: int, rank: int = 0) -> Any:
    of = {"dp_rank": rank, "batch_index": number}
    return client.get_meta(["x", "text"], 2, "train", task_name="learn", sampling_config=of, timeout_s=30)


def task_of(client: tq.TransferQueueClient, partition: str) -> dict[str, Any]:
    known = client.get_stats()["partitions"][partition]["tasks"]["learn"]
    return {name: known[name] for name in ("in_flight", "settled", "consumed")}


def test_a_replay_trains_every_recorded_batch_and_leaves_the_live_task_where_it_was(
    tmp_path: Path, data: Callable[..., TQDataModule], trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    read = {"partition": "train@{epoch}", "sampler": tq.SequentialSampler()}
    live = data(train=stream(**read))
    client = live.client
    client.register_task("copy", follows="learn")
    samples = [fill(client, f"train@{epoch}", count) for epoch, count in enumerate((8, 16))]
    trainer(max_epochs=2, max_steps=4).fit(Noting(), live)  # two of four batches of the second epoch
    client.save_batches(tmp_path / "record" / "000000", "copy")
    record = list(tq.RecordedBatches(tmp_path / "record").rounds)
    assert {("train@0", 0), ("train@0", 1), ("train@1", 0), ("train@1", 1)} <= set(record)
    before = [task_of(client, name) for name in ("train@0", "train@1")]
    assert [each["settled"] for each in before] == [2, 2]
    again = Noting()
    replay = TQDataModule(train=stream(read["partition"], clear_consumed=True, replay_from=str(tmp_path / "record")))
    trainer(max_epochs=9, callbacks=[PartitionSwitch(), PublishWeights()]).fit(again, replay)
    assert [(noted[0][0], noted[3]) for noted in again.noted] == record
    assert (
        "training stops after this epoch. For more epochs on the same samples, set Stream(replay=True). The record"
        in caplog.text
    )
    assert client.get_partition_list() == ["train@0", "train@1"], "nothing is cleared or published"
    assert [task_of(client, name) for name in ("train@0", "train@1")] == before
    rest = Noting()
    trainer(max_epochs=2).fit(rest, live)
    assert [index for noted in rest.noted for index in noted[1]] == samples[1][8:]


def test_a_replay_and_records_warn_where_recording_was_interrupted(
    tmp_path: Path, data: Callable[..., TQDataModule], trainer: Callable[..., Any],
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    client, record = data(train=stream()).client, tmp_path / "record"
    client.register_task("learn", dp_size=1)
    client.register_task("copy", follows="learn")
    for epoch in range(2):
        fill(client, f"train@{epoch}", 8)
    for name, number in [("train@0", 0), ("train@0", 1), ("train@1", 0), ("train@1", 1)]:
        of = {"dp_rank": 0, "batch_index": number}
        client.get_meta(["x", "text"], 4, name, task_name="learn", sampling_config=of)
        if (name, number) == ("train@0", 1):
            client.clear_partition(name)
        else:
            client.save_batches(record / f"00000{name[-1]}{number}", "copy", {"gap": (name, number) == ("train@1", 0)})
    assert tq.RecordedBatches(record).may_lack == {"train@0": 0}
    model = Noting()
    trainer(max_epochs=2).fit(model, TQDataModule(train=stream("train@{epoch}", replay_from=str(record))))
    assert [(noted[0][0], noted[3]) for noted in model.noted] == list(tq.RecordedBatches(record).rounds)
    assert "ends batches of 'train@0' with number 0, and may lack later ones" in caplog.text
    for options, warns in (["--step", "0"], False), (["--step", "1"], True), (["--partition", "train@1"], False):
        assert lightning_tq(["records", str(record), *options]) == 0
        assert ("Steps after batch 0 of 'train@0' may have been later ones" in capsys.readouterr().err) == warns
    assert lightning_tq(["records", str(record)]) == 0
    assert "from 1" in capsys.readouterr().out


def test_batches_of_before_a_resume_are_no_part_of_a_record_that_was_interrupted_after_it(
    tmp_path: Path, data: Callable[..., TQDataModule]
) -> None:
    client, record = learning(data, 8), tmp_path / "record"
    client.register_task("copy", follows="learn")
    client.save_checkpoint(tmp_path / "saved")
    for part, numbers in ("000000", (0, 1, 2, 3)), ("000001", (0, 1)):
        for number in numbers:
            take(client, number)
        client.save_batches(record / part, "copy")
        client.load_checkpoint(tmp_path / "saved")
    assert len(tq.RecordedBatches(record).rounds) == 4
    fill(client, "later", 2)
    of = {"dp_rank": 0, "batch_index": 0}
    client.get_meta(["x"], 2, "later", task_name="learn", sampling_config=of)
    client.save_batches(record / "000002", "copy", {"gap": True})
    found = tq.RecordedBatches(record)
    assert (list(found.rounds), found.may_lack) == ([("train", 0), ("train", 1), ("later", 0)], {"train": 1})


@pytest.mark.programs
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_recorder_that_was_stopped_and_is_started_again_notes_that_batches_may_lack(
    tmp_path: Path, data: Callable[..., TQDataModule], is_killed: bool
) -> None:
    client, directory = learning(data, 8), tmp_path / "record"
    for number in range(2):
        if number and is_killed:
            with recorder(tq.init()["address"], directory) as (process, _):
                process.send_signal(signal.SIGKILL)  # before it has written anything
        with recorder(tq.init()["address"], directory) as (process, _):
            client.ack(take(client, 2 * number), "learn")
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
        client.ack(take(client, 2 * number + 1), "learn")
    found = tq.RecordedBatches(directory)
    assert (list(found.rounds), found.may_lack) == ([("train", 0), ("train", 2)], {}), "what lacks within is an error"
    gaps = [tq.describe_checkpoint(directory / name)["metadata"]["gap"] for name in ("000000", "000001")]
    assert gaps == [False, True]


@pytest.mark.programs
def test_what_a_killed_recorder_wrote_is_readable_and_the_next_one_goes_on_without_a_gap(
    tmp_path: Path, data: Callable[..., TQDataModule]
) -> None:
    client, directory = learning(data, 8), tmp_path / "record"
    with recorder(tq.init()["address"], directory) as (process, _):
        client.ack(take(client, 0), "learn")
        while client.get_stats()["partitions"]["train"]["tasks"][f"record:learn:{directory}"]["in_flight"]:
            pass
        process.send_signal(signal.SIGKILL)
    (directory / "000001.tmp").mkdir()  # what it would have left, had it been writing
    assert list(tq.RecordedBatches(directory).rounds) == [("train", 0)]
    given = [take(client, number) for number in (1, 2)]
    for meta in given:
        client.ack(meta, "learn")
    assert client.clear_consumed("train") == 2, "the queue keeps what is not recorded"
    with recorder(tq.init()["address"], directory) as (process, _):
        process.send_signal(signal.SIGHUP)  # its terminal is closed
        assert process.wait() == 0
    found = tq.RecordedBatches(directory)
    assert list(found.rounds) == [("train", 0), ("train", 1), ("train", 2)]
    assert [found.read("train", 0, number)[1].global_indexes for number in (1, 2)] == [
        meta.global_indexes for meta in given
    ]
    assert set(client.get_stats()["partitions"]["train"]["tasks"]) == {"learn"}, "it holds nothing any more"


@pytest.mark.programs
@pytest.mark.parametrize("restored", [True, False])
def test_a_run_goes_on_with_its_record_and_another_one_gets_a_directory_of_its_own(
    tmp_path: Path, data: Callable[..., TQDataModule], restored: bool
) -> None:
    directory = tmp_path / "record"
    for place in ("record", "record" if restored else "record-2"):
        client = learning(data, 8)
        if restored and directory.exists():
            client.load_checkpoint(tmp_path / "queue")
        client.register_task(f"record:learn:{directory}", follows="learn")  # as a recorder had that was killed
        take(client, 0)
        client.save_checkpoint(tmp_path / "queue")
        with recorder(tq.init()["address"], directory) as (process, out):
            process.send_signal(signal.SIGINT)
            said = out.read()
            assert process.wait() == 0
        assert f"1 batch written to {tmp_path / place}\n" in said
        tq.close()
    assert ("holds another run" in said) != restored
    for each in {directory, tmp_path / place}:
        assert list(tq.RecordedBatches(each).rounds) == [("train", 0)]


@pytest.mark.programs
def test_a_recorder_that_can_not_write_keeps_nothing_in_the_queue(
    tmp_path: Path, data: Callable[..., TQDataModule]
) -> None:
    client, directory = learning(data, 8), tmp_path / "record"
    with recorder(tq.init()["address"], directory) as (process, _):
        directory.rmdir()
        directory.write_text("in its way")
        client.ack(take(client, 0), "learn")
        assert process.wait() == 2
    assert set(client.get_stats()["partitions"]["train"]["tasks"]) == {"learn"}
    with run_recorder(tq.init()["address"], directory) as (process, _):
        assert process.wait() == 2, "it notices at its start"


@pytest.mark.programs
def test_what_is_cleared_before_it_was_recorded_is_said_and_counted(
    tmp_path: Path, data: Callable[..., TQDataModule]
) -> None:
    client, directory = learning(data, 7), tmp_path / "record"
    own = f"record:learn:{directory}"
    client.register_task(own, follows="learn")  # as a recorder had that was killed
    client.clear_samples(take(client, 0))
    take(client, 1)
    client.clear_partition("train")  # with three samples that nobody was given
    assert client.get_stats()["dropped"] == {"learn": {"tail": 0, "cleared": 3}, own: {"tail": 0, "cleared": 4}}
    fill(client, "train", 2)
    take(client, 0)
    with run_recorder(tq.init()["address"], directory) as (process, out):
        assert out.readline().startswith("4 samples cleared before written, and may be missing: ")
        process.send_signal(signal.SIGTERM)
        said = out.read()
        assert process.wait() == 1
    assert "1 batch written" in said
    assert list(tq.RecordedBatches(directory).rounds) == [("train", 0)]


def test_each_rank_is_given_its_own_share_again_and_another_number_of_ranks_is_refused(
    tmp_path: Path, data: Callable[..., TQDataModule]
) -> None:
    client = client_of(data)
    client.register_task("learn", "RankAwareSampler", 2, "drop")
    client.register_task("copy", follows="learn")
    fill(client, "train", 8)
    given = [(rank, take(client, number, rank)) for number in (0, 1) for rank in (0, 1)]
    assert client.save_batches(tmp_path / "record" / "000000", "copy") == 4
    record = tq.RecordedBatches(tmp_path / "record")
    for rank in (0, 1):
        dataset = tq.StreamingDataset(
            tq.init(), 2, 2, ["x", "text"], "train", "learn", rank, dp_size=2, fetch_batch_fn=record
        )
        shares = [meta.global_indexes for _, meta in dataset]
        dataset.close()
        assert shares == [meta.global_indexes for own, meta in given if own == rank]
    with pytest.raises(InvalidRequestError, match="of 2 data-parallel ranks, and this run has 1"):
        record.check(["x"], 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 2}, "is of batch_size=4, and this stream has batch_size=2"),
        ({"batch_size": 8}, "is of batch_size=4, and this stream has batch_size=8"),
        ({"fields": ["x", "reward"]}, "lacks the field reward; it has text, x"),
        ({"head_fields": ["number"]}, "lacks the head field number; it has none, as it is of no groups"),
    ],
)
def test_a_stream_that_differs_from_its_record_is_refused(
    recorded: Path, trainer: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    read = {"partition": "train", "task": "learn", "fields": ["x"], "batch_size": 4, **options}
    with (
        pytest.raises(InvalidRequestError, match=said),
        TQDataModule(train=Stream(**read, replay_from=str(recorded))) as datamodule,
    ):
        trainer().fit(Noting(), datamodule)
    with pytest.raises(InvalidRequestError, match=said):
        FabricLoader(Fabric(accelerator="cpu", devices=1), Stream(**read, replay_from=str(recorded)))


def test_a_fabric_loader_replays_without_producers(recorded: Path) -> None:
    with FabricLoader(
        Fabric(accelerator="cpu", devices=1), stream(replay_from=str(recorded)), {"units": 1}, [PRODUCED]
    ) as loader:
        assert [len(meta.global_indexes) for _, meta in loader] == [4, 2]
        assert loader.client.get_partition_list() == []


def test_a_partition_that_was_not_recorded_is_an_error_that_names_those_that_were(
    recorded: Path, trainer: Callable[..., Any]
) -> None:
    with pytest.raises(
        tq.CheckpointError, match=r"has nothing of partition 'other' for rank 0.*partitions \['train'\]"
    ):
        replayed(trainer, recorded, partition="other")


def test_producers_that_would_also_feed_a_stream_that_is_not_replayed_are_refused(
    recorded: Path, trainer: Callable[..., Any]
) -> None:
    train, val = stream(replay_from=str(recorded)), stream("val", "evaluate")
    with (
        pytest.raises(InvalidRequestError, match="'train' replays a record, and 'val' doesn't"),
        TQDataModule(train=train, val=val, producers=[PRODUCED]) as datamodule,
    ):
        trainer().fit(Noting(), datamodule)


def test_a_damaged_record_is_refused(recorded: Path) -> None:
    values = next((recorded / "000000").rglob("*-x.npy"))
    values.write_bytes(values.read_bytes()[:-1] + b"?")
    with pytest.raises(tq.CheckpointError, match="was changed since it was written"):
        tq.RecordedBatches(recorded).read("train", 0, 0)


def test_records_shows_which_samples_a_step_trained(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lightning_tq(["records", str(recorded), "--step", "1", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        {
            "partition": "train", "batch": 1, "rank": 0, "sample": number, "policy_version": 2, "reward": number / 4,
            "text": f"row {number}", "x": [float(number)] * 4,
        }
        for number in (4, 5)
    ]  # fmt: skip
    assert lightning_tq(["records", str(recorded)]) == 0
    assert capsys.readouterr().out.split()[6:] == ["train", "0", "to", "1", "0", "to", "1", "1", "4", "text,", "x"]
    assert lightning_tq(["records", str(recorded), "--step", "7"]) == 2
    assert "has no step 7. It has 2 from 0 on" in capsys.readouterr().err
    for more in ([], ["--step", "0"]):
        assert lightning_tq(["records", str(recorded), "--partition", "nope", *more]) == 2
        assert capsys.readouterr().err == f"error: {recorded} has no partition 'nope'. It has train.\n"
    assert lightning_tq(["records", str(recorded / "nowhere")]) == 2
    assert "no record at" in capsys.readouterr().err
