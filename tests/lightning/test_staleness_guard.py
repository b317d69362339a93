# SPDX-License-Identifier: Apache-2.0
"""StalenessGuard: no sample over the bound is trained, producers are paced, and samples drop only with drop=True."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from producing import rows
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import Pacer, Producer, PublishWeights, StalenessGuard, StaleSamplesError, TQDataModule
from tests.lightning.conftest import stream
from transfer_queue import EndOfPartitionError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Ages(Callback):
    """Records what the guard logs for each batch: (mean, max, dropped)."""

    def __init__(self) -> None:
        self.logged: list[tuple[float, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        names = ("staleness/mean", "staleness/max", "staleness/dropped")
        self.logged.append(tuple(float(trainer.callback_metrics[name]) for name in names))


class Paced:
    """A thread that puts rows by permit, tagged with the oldest version that may make them."""

    def __init__(self, client: TransferQueueClient, size: int, per_partition: int | None = None) -> None:
        self.admitted: list[tuple[int, int]] = []
        """(samples put before, version) of each admit()."""
        self._client = client
        self._size = size
        self._per_partition = per_partition
        self._thread = threading.Thread(target=self._run, name="paced")
        self._thread.start()

    def _run(self) -> None:
        pacer, count = Pacer(self._client), 0
        try:
            while True:
                version = pacer.admit(self._size, timeout_s=30)
                self.admitted.append((count, version))
                name = "train" if self._per_partition is None else f"train@{count // self._per_partition}"
                data = rows(self._size, start=count % 100)
                self._client.put(data, partition_id=name, tags=[{"policy_version": version}] * self._size)
                count += self._size
                if self._per_partition is not None and count % self._per_partition == 0:
                    self._client.seal_partition(name)
        except EndOfPartitionError:
            return

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def put_of(client: TransferQueueClient, versions: list[Any], partition: str = "train") -> None:
    """Fill a sealed partition with rows of these versions."""
    tags = [{"policy_version": version} for version in versions]
    client.put(rows(len(versions)), partition_id=partition, tags=tags)
    client.seal_partition(partition)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_producer_is_as_far_ahead_as_allowed_and_no_further(data: Make, trainer: MakeTrainer, allowed: int) -> None:
    dm = data(train=stream("train", num_batches=10))
    paced, ages = Paced(dm.client, size=2), Ages()
    trainer(callbacks=[StalenessGuard(max_staleness=allowed), ages]).fit(Recorder(), datamodule=dm)
    paced.join()
    # The tag is the oldest possible policy. The samples of the first steps exist from the start.
    assert ages.logged == [(age, age, 0) for age in map(float, [*range(allowed), *[allowed] * (10 - allowed)])]
    assert all(put < 4 * (version + allowed + 1) for put, version in paced.admitted)


def test_accumulation_makes_a_version_of_several_batches(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train", micro_batch_size=2, num_batches=12))
    paced, ages = Paced(dm.client, size=2), Ages()
    run = trainer(callbacks=[StalenessGuard(max_staleness=1), ages], accumulate_grad_batches=3)
    run.fit(Recorder(), datamodule=dm)
    paced.join()
    assert run.global_step == 4
    # A step takes six rows and the stream draws four. Permits are whole fours, so the ninth batch is not ahead.
    assert [age for _, age, _ in ages.logged] == [0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]


def test_processes_that_read_the_weights_after_their_permits_keep_the_bound(data: Make, trainer: MakeTrainer) -> None:
    producer = Producer(target="producing:produce_paced", args={"partition": "train"}, count=2)
    dm = data(train=stream("train"), producers=[producer])  # with an unknown length, a batch is fetched ahead
    ages, model = Ages(), Recorder()
    run = trainer(callbacks=[PublishWeights(), StalenessGuard(max_staleness=2), ages], max_epochs=-1, max_steps=12)
    run.fit(model, datamodule=dm)
    assert len(model.indexes()) == 48
    assert max(age for _, age, _ in ages.logged) <= 2


def test_samples_left_over_by_an_epoch_are_replaced(data: Make, trainer: MakeTrainer) -> None:
    """Two of ten samples are left over per partition. Without permits to replace them, training would stop."""
    dm = data(train=stream("train@{epoch}", tail="drop"))
    paced, ages, model = Paced(dm.client, size=2, per_partition=10), Ages(), Recorder()
    run = trainer(callbacks=[StalenessGuard(max_staleness=1), ages], max_epochs=6)
    run.fit(model, datamodule=dm)
    paced.join()
    assert (run.global_step, len(model.indexes())) == (12, 48)
    assert max(age for _, age, _ in ages.logged) <= 1


def test_samples_that_are_too_old_are_an_error_unless_they_may_be_dropped(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    put_of(dm.client, [0, 0, 0, 0, -1, 0, -1, 0])
    model = Recorder()
    with pytest.raises(StaleSamplesError, match="2 of 4 samples are more than 1 versions old, the oldest 2"):
        trainer(callbacks=[StalenessGuard(pace=False)]).fit(model, datamodule=dm)
    assert len(model.indexes()) == 4


@pytest.mark.parametrize("num_batches", [None, 2], ids=["unknown length", "two batches"])
def test_dropping_trains_the_other_samples_and_skips_an_empty_batch(
    data: Make, trainer: MakeTrainer, num_batches: int | None
) -> None:
    dm = data(train=stream("train", num_batches=num_batches))
    put_of(dm.client, [0, 0, -1, 0, *[-9] * 4, 1, -1, 0, -9])
    guard, ages, model = StalenessGuard(drop=True, pace=False), Ages(), Recorder()
    run = trainer(callbacks=[guard, ages])
    run.fit(model, datamodule=dm)
    first = model.indexes()[0]
    assert [index - first for index in model.indexes()] == [0, 1, 2, 3, 8, 10]
    assert ages.logged == [(0.25, 1.0, 0.0 if num_batches else 6.0), (0.5, 1.0, 6.0)]
    assert (guard.dropped, run.global_step) == (6, 2)


def test_dropped_samples_are_replaced(data: Make, trainer: MakeTrainer) -> None:
    """Every other put is too old, and training still gets its ten batches."""

    class Late(Paced):
        def _run(self) -> None:
            pacer, count = Pacer(self._client), 0
            try:
                while True:
                    version = pacer.admit(2, timeout_s=30)
                    tag = {"policy_version": version - 3 * (count % 2)}
                    self._client.put(rows(2), partition_id="train", tags=[tag] * 2)
                    count += 1
            except EndOfPartitionError:
                return

    dm = data(train=stream("train", num_batches=10))
    guard, model = StalenessGuard(drop=True), Recorder()
    paced = Late(dm.client, size=2)
    trainer(callbacks=[guard]).fit(model, datamodule=dm)
    paced.join()
    assert [len(batch) for _, batch in model.seen["train"]] == [2] * 10
    assert guard.dropped == 20


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_resumed_trainer_keeps_the_bound_for_the_same_producers(
    trainer: MakeTrainer, tmp_path: Path, a_queue: TransferQueueClient
) -> None:
    dm = TQDataModule(train=stream("train", batch_size=2))
    paced = Paced(a_queue, size=2)
    kept = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    guard = StalenessGuard(max_staleness=1)
    with pytest.raises(ValueError, match="failed on request"):
        trainer(callbacks=[guard, kept], enable_checkpointing=True, max_epochs=-1, max_steps=8).fit(
            Recorder(fail_at=5), datamodule=dm
        )
    ages, model = Ages(), Recorder()
    trainer(callbacks=[StalenessGuard(max_staleness=1), ages], max_epochs=-1, max_steps=8).fit(
        model, datamodule=dm, ckpt_path=tmp_path / "kept" / "step=3.ckpt"
    )
    paced.join()
    assert len(model.indexes()) == 10  # steps 3 to 7
    # The samples that the first trainer permitted until step 5 come from newer policies than the bound requires.
    assert [age for _, age, _ in ages.logged] == [1.0] * 5
    dm.close()


@pytest.fixture
def a_queue() -> Iterator[TransferQueueClient]:
    tq.init()
    yield tq.get_client()
    tq.close()


def test_a_sample_without_its_version_is_refused(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"))
    put_of(dm.client, [0, 0, "new", 0])
    with pytest.raises(
        InvalidRequestError, match="has tag 'policy_version' = 'new', but it must be the policy version"
    ):
        trainer(callbacks=[StalenessGuard(pace=False)]).fit(Recorder(), datamodule=dm)


@pytest.mark.parametrize(
    ("callbacks", "options", "what"),
    [
        ([StalenessGuard()], {"replay": True}, "can't pace a stream that reads its samples again"),
        ([StalenessGuard(max_staleness=0)], {}, "Lightning fetches one ahead. Set max_staleness=1,"),
        ([StalenessGuard(max_staleness=2)], {"batch_size": 8, "micro_batch_size": 2}, "draws 8 at once.*staleness=4,"),
        ([StalenessGuard(), PublishWeights(every_n_steps=3)], {}, "published every 3 steps"),
    ],
    ids=["replay", "look-ahead", "large draws", "rare weights"],
)
def test_contradicting_options_are_refused_before_training(
    data: Make, trainer: MakeTrainer, callbacks: list[Callback], options: dict[str, Any], what: str
) -> None:
    dm = data(train=stream("train", **options))
    with pytest.raises(InvalidRequestError, match=what):
        trainer(callbacks=callbacks).fit(Recorder(), datamodule=dm)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_staleness must be an int of at least 0, got -1"):
        StalenessGuard(max_staleness=-1)
    with pytest.raises(InvalidRequestError, match="samples_per_step must be an int of at least 1, got 0"):
        StalenessGuard(samples_per_step=0)


def test_several_steps_on_one_draw_keep_the_bound_whatever_the_order_within_it(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream("train", batch_size=8, micro_batch_size=2, num_batches=16))
    paced, ages = Paced(dm.client, size=2), Ages()
    run = trainer(callbacks=[StalenessGuard(max_staleness=3), ages])
    run.fit(Recorder(), datamodule=dm)
    paced.join()
    assert [age for _, age, _ in ages.logged] == [0, 1, 2, 3] * 4
    assert run.global_step == 16


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [pytest.param("ddp", 2, marks=pytest.mark.programs), pytest.param("model_parallel", 4, marks=pytest.mark.slow)],
)
def test_ranks_drop_together_and_agree_on_how_many(run_ranks: Any, strategy: str, devices: int, tmp_path: Path) -> None:
    code, output, _ = run_ranks("callbacks_script.py", "staleness", strategy, str(devices), "LOGS")
    assert code == 0, output
    logs = tmp_path / "logs"
    trained, steps = (eval((logs / name).read_text()) for name in ("trained", "steps"))
    dropped = [int((logs / f"dropped{rank}").read_text()) for rank in range(devices)]
    groups = [trained[rank] for rank in range(0, devices, devices // 2)]
    assert trained == [groups[rank * 2 // devices] for rank in range(devices)]
    # One rank would keep nothing of rows 8 to 11, so the other rank also skips rows 12 to 15.
    assert sorted(index for group in groups for index in group) == [*range(8), 16, 17, 19, 20, 21, 22, 23]
    assert (dropped, steps) == ([9] * devices, 4)


@pytest.mark.programs
@pytest.mark.timeout(200)
def test_ranks_and_paced_producers_keep_the_bound_together(run_ranks: Any) -> None:
    code, output, ranks = run_ranks("callbacks_script.py", "pacing", "ddp", "2", "LOGS")
    assert code == 0, output
    ((first_ages, first),), ((second_ages, second),) = ranks
    assert max(first_ages + second_ages) <= 2
    assert len(first) == len(second) == 24  # twelve steps of two rows
    assert len({*first, *second}) == 48
