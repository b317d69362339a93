# SPDX-License-Identifier: Apache-2.0
"""Unplanned ends of a run: everything is closed once, and the error says what happened."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import producing
import psutil
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import Producer, ProducerError, ProducerGroup, TQDataModule
from tests.lightning.conftest import HERE, ROOT, stream
from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python, started
from transfer_queue import BatchTimeoutError, ProducersGoneError
from transfer_queue.errors import InvalidRequestError, NotInitializedError, SamplerError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Closings(TQDataModule):
    """Counts how often it closed a queue."""

    closed = 0

    def close(self) -> None:
        was_open = self._connection.is_open
        super().close()
        self.closed += was_open


@pytest.mark.programs
@pytest.mark.parametrize(("how", "error", "workers"), [("raise", ValueError, 0), ("interrupt", SystemExit, 2)])
def test_an_exception_in_a_step_closes_what_was_started_exactly_once(
    trainer: MakeTrainer, how: str, error: type[BaseException], workers: int
) -> None:
    dm = Closings(train=stream(num_workers=workers), producers=[_endless()])
    with pytest.raises(error):
        trainer(max_epochs=-1).fit(Recorder(fail_at=2, how=how), datamodule=dm)
    assert dm.closed == 1
    assert own_processes() == []
    with pytest.raises(NotInitializedError):
        tq.get_client()
    dm.close()
    assert dm.closed == 1


@pytest.mark.programs
def test_a_fit_after_a_failed_one_starts_at_the_beginning_of_its_new_queue(trainer: MakeTrainer) -> None:
    args = {"partition": "train", "count": 12}
    with TQDataModule(train=stream(), producers=[Producer(target=producing.produce, args=args)]) as dm:
        with pytest.raises(ValueError, match="on request"):
            trainer().fit(Recorder(fail_at=2), datamodule=dm)
        model = Recorder()
        trainer().fit(model, datamodule=dm)
    assert model.indexes() == list(range(12))


class _Nested(Callback):
    """Another Trainer predicts with the data module of the fit, and is refused."""

    def __init__(self, other: Trainer) -> None:
        self.other = other

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            with pytest.raises(InvalidRequestError, match=r"another Trainer is not over. Give each Trainer a"):
                self.other.predict(Recorder(), trainer.datamodule)


def test_a_second_trainer_on_a_data_module_in_use_is_refused_and_does_the_fit_no_harm(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream(), predict=stream(task="predict"))
    indexes = fill(dm.client, "train", 24)
    model = Recorder()
    trainer(callbacks=[_Nested(trainer())]).fit(model, dm)
    assert model.indexes() == indexes
    later = Recorder()
    trainer().predict(later, dm)
    assert later.indexes("predict") == indexes


def _endless(**options: Any) -> Producer:
    args = {"partition": "train", "count": 100, "pid_file": os.devnull}
    return Producer(target=producing.produce_then_stay, args=args, **options)


def test_a_queue_that_existed_before_is_used_and_not_closed(trainer: MakeTrainer) -> None:
    conf = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    indexes = fill(tq.get_client(), "train", 8)
    dm = TQDataModule(train=stream())
    model = Recorder()
    trainer().fit(model, datamodule=dm)
    assert (model.indexes(), dm.address) == (indexes, conf.address)
    dm.close()
    assert tq.get_client().get_partition_list() == ["train"]


@pytest.mark.programs
def test_keep_alive_false_ends_the_queue_with_the_fit(trainer: MakeTrainer) -> None:
    producer = Producer(target=producing.produce, args={"partition": "train", "count": 8})
    dm = Closings(train=stream(), producers=[producer], keep_alive=False)
    model = Recorder()
    trainer().fit(model, datamodule=dm)
    assert (len(model.indexes()), dm.closed) == (8, 1)


@pytest.mark.programs
def test_producers_run_during_the_fit_and_end_with_it(trainer: MakeTrainer, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    args = {"partition": "train", "count": 100, "pid_file": str(pid_file)}
    dm = TQDataModule(
        train=stream(),
        producers=[
            Producer(target="producing:produce_then_stay", args=args),
            Producer(target=["sh", "-c", f"echo $TQ_WORKER/$TQ_NUM_WORKERS > {tmp_path}/command$TQ_WORKER"], count=2),
        ],
    )
    model = Recorder()
    with dm:
        trainer(limit_train_batches=3).fit(model, datamodule=dm)
        assert len(model.indexes()) == 12
        assert not psutil.pid_exists(int(pid_file.read_text()))
    assert [(tmp_path / f"command{worker}").read_text() for worker in range(2)] == ["0/2\n", "1/2\n"]


@pytest.mark.programs
@pytest.mark.parametrize(
    ("target", "says", "workers"),
    [
        (producing.produce_then_fail, r"exit code 1(?s:.*)Traceback(?s:.*)RuntimeError: the reward model fell over", 0),
        (producing.produce_then_die, r"killed by SIGKILL(?s:.*)about to be killed", 2),
    ],
    ids=["raises", "is killed"],
)
def test_a_dead_producer_ends_a_waiting_fit_and_reports_its_traceback(
    trainer: MakeTrainer, target: Callable[..., None], says: str, workers: int
) -> None:
    dm = TQDataModule(
        train=stream(num_workers=workers),
        producers=[Producer(target=target, args={"partition": "train", "count": 2}, name="reward")],
    )
    with pytest.raises(ProducerError, match=rf"producer 'reward' \(process 1 of 1\).*{says}"):
        trainer(max_epochs=-1).fit(Recorder(), datamodule=dm)


_WITHOUT_GUARD = """
import torch
import transfer_queue as tq
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_tq import Producer, Stream, TQDataModule

def produce():
    tq.get_client().put({"x": torch.rand(8, 32)}, partition_id="train")

def main():
    train = Stream(partition="train", task="learn", fields=["x"], batch_size=4)
    dm = TQDataModule(train=train, producers=[Producer(target=produce)])
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "enable_model_summary": False}
    Trainer(max_epochs=1, **options).fit(BoringModel(), datamodule=dm)
"""


@pytest.mark.programs
def test_a_program_that_trains_when_a_producer_imports_it_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{_WITHOUT_GUARD}\nmain()\n")
    done = run_python(script, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120 * SLOW)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count("ProducerError: producer") == 1, done.stderr
    assert "to find '__main__:produce', and got to a training there. Put what trains below 'if __name__" in done.stderr


def test_a_producer_of_a_spawned_process_is_found_in_the_main_program() -> None:
    def produce() -> None: ...

    produce.__module__, produce.__qualname__ = "__mp_main__", "produce"  # as ``multiprocessing`` names them
    assert Producer(target=produce).start_order(0).target == "__main__:produce"


def test_producers_have_names_and_the_programs_arguments_but_nothing_of_its_rank(
    trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("WORLD_SIZE", "1")
    args = {"folder": str(tmp_path)}
    producers = [
        Producer(target=producing.tell_name, args=args, env={"WORLD_SIZE": "3"}),
        Producer(target=producing.tell_name, args=args, name="reward model/2", count=2),
    ]
    with TQDataModule(train=stream(), producers=producers) as dm:
        trainer(limit_train_batches=3).fit(Recorder(), datamodule=dm)
    told = {path.name.rpartition("_")[0]: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(told) == {"tell_name-0", "reward-model-2-0", "reward-model-2-1"}
    assert told.pop("tell_name-0") == [sys.argv, None, "3"], "what its Producer sets is kept"
    assert list(told.values()) == [[sys.argv, None, None]] * 2


@pytest.mark.programs
def test_producers_live_on_when_the_thread_that_started_them_ends(data: Make) -> None:
    args = {"partition": "train", "count": 4, "pid_file": os.devnull}
    group, dm = ProducerGroup([Producer(target=producing.produce_then_stay, args=args)]), data(train=stream())
    starter = threading.Thread(target=group.start, args=(dm.address,))
    starter.start()
    starter.join()
    assert dm.client.get_meta(producing.FIELDS, 4, "train", task_name="learn", timeout_s=60.0).size == 4
    assert group.failure() is None
    assert group.running() != []
    group.end()


@pytest.mark.programs
def test_a_fit_waits_for_its_own_producers_where_those_of_an_earlier_run_have_died(trainer: MakeTrainer) -> None:
    args = {"partition": "train", "count": 4}
    with TQDataModule(
        train=stream(),
        queue={"producer_grace_s": 0.0},
        producers=[Producer(target=producing.produce, args=args)],
    ) as dm:
        earlier = ProducerGroup([Producer(target=producing.produce_then_stay, args={**args, "pid_file": os.devnull})])
        earlier.start(dm.address)
        assert dm.client.get_meta(producing.FIELDS, 4, "train", task_name="probe", timeout_s=60.0).size == 4
        earlier.end()
        with pytest.raises(ProducersGoneError):
            dm.client.get_meta(producing.FIELDS, 4, "train", task_name="probe", timeout_s=60.0)
        model = Recorder()
        trainer().fit(model, datamodule=dm)
        assert len(set(model.indexes())) == 8


@pytest.mark.programs
def test_finished_producers_do_not_end_the_fit(trainer: MakeTrainer) -> None:
    args = {"partition": "train", "count": 4, "seal": False}
    dm = TQDataModule(train=stream(), producers=[Producer(target=producing.produce, args=args, count=2)])
    model = Recorder()
    with dm:
        trainer(limit_train_batches=2).fit(model, datamodule=dm)
    assert len(set(model.indexes())) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_ends_a_fit_that_waits_for_a_batch(trainer: MakeTrainer, workers: int) -> None:
    class TermSoon(Callback):
        def on_train_batch_end(self, *_: Any) -> None:  # the second batch never arrives
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()

    dm = TQDataModule(train=stream(num_workers=workers, num_batches=2))
    with dm:
        dm.client.put(producing.rows(4), partition_id="train")
        with pytest.raises(SIGTERMException):
            trainer(callbacks=[TermSoon()]).fit(Recorder(), datamodule=dm)


def test_a_batch_that_does_not_come_in_time_is_an_error_that_says_what_is_missing(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream(timeout_s=0.3))
    dm.client.put(producing.rows(3), partition_id="train")
    with pytest.raises(BatchTimeoutError, match="3 ready"):
        trainer().fit(Recorder(), datamodule=dm)


def test_a_stage_without_a_stream_is_refused(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream())
    with pytest.raises(InvalidRequestError, match=r"trainer.test needs TQDataModule\(test="):
        trainer().test(Recorder(), datamodule=dm)


def test_a_sampler_that_cannot_serve_the_batch_size_is_refused_before_anything_is_read(
    data: Make, trainer: MakeTrainer
) -> None:
    dm = data(train=stream(sampler=tq.GRPOGroupNSampler(n_samples_per_prompt=3)))
    with pytest.raises(SamplerError):
        trainer().fit(Recorder(), datamodule=dm)


def test_streams_of_one_task_with_different_tails_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="two streams of task 'learn'"):
        TQDataModule(train=stream(tail="pad"), val=stream("val"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"micro_batch_size": 5}, "micro_batch_size 5 is larger than batch_size 4"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ({"partition": "train@{epoc}"}, r"uses \{epoc\}; did you mean 'epoch'"),
        ({"partition": "train@{"}, "malformed"),
        ({"partition": "_train"}, "begins with '_'"),
        ({"fields": "x"}, "fields must be a list"),
        ({"fields": 5}, "fields must be a list"),
        ({"tail": "keep"}, "tail must be one of 'drop', 'pad'"),
        ({"persistent_workers": True}, "needs num_workers"),
        ({"num_batches": 0}, "num_batches must be an int of at least 1"),
    ],
)
def test_an_invalid_stream_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    from lightning_tq import Stream

    base = {"partition": "train", "task": "learn", "fields": ["x"], "batch_size": 4}
    with pytest.raises(ValueError, match=says):
        Stream(**{**base, **options})


@pytest.mark.programs
def test_a_killed_trainer_leaves_no_producer_and_no_server(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
from lightning.pytorch import Trainer
from tests.lightning.conftest import HERE, ROOT, stream
from recorders import Recorder
from lightning_tq import Producer, TQDataModule
args = {{"partition": "train", "count": 8, "pid_file": {str(pid_file)!r}}}
dm = TQDataModule(train=stream(), producers=[Producer(target="producing:produce_then_stay", args=args)])
Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(Recorder({str(tmp_path)!r}), datamodule=dm)
"""
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "TMPDIR": str(tmp_path)}
    trained = tmp_path / "rank0.jsonl"
    deadline = time.monotonic() + 40
    with started(tmp_path / "train.py", env=environment) as (trainer, _, _):
        while not (pid_file.exists() and trained.exists()) and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        children = own_processes(trainer.pid)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert (len(gone), alive) == (2, [])  # controller and units in one process, a producer
