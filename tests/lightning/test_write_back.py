# SPDX-License-Identifier: Apache-2.0
"""WriteBack: values of a step become fields of its samples, written once, before the next step."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from producing import fill
from recorders import Recorder
from torch.utils.data import DataLoader

import transfer_queue as tq
from lightning_tq import Stream, TQDataModule, WriteBack, put_back
from tests.lightning.conftest import HERE, ROOT, stream
from tests.warm_python import started
from transfer_queue import StorageFullError, TransferQueueClient
from transfer_queue.errors import InvalidRequestError

Make = Callable[..., TQDataModule]
MakeTrainer = Callable[..., Trainer]


class Scorer(Recorder):
    """Returns ``values(data)`` of each batch, in training together with the loss."""

    def __init__(self, values: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.values = values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, **self.values(batch[0])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        return self.values(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        super().test_step(batch, batch_idx)
        return self.values(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        super().predict_step(batch, batch_idx)
        return self.values(batch[0])


def doubled(data: Any) -> dict[str, Any]:
    return {"double": 2 * data["x"][:, 0]}


def stored(client: TransferQueueClient, partition: str, field: str) -> list[Any]:
    """The field of every sample, in index order."""
    meta = client.get_meta([field], partition_id=partition, mode="force_fetch")
    assert meta.is_ready
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in client.get_data(meta)[field]]


@pytest.mark.programs
def test_another_process_that_waits_for_the_field_gets_it_during_training(
    data: Make, trainer: MakeTrainer, tmp_path: Path
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 16)
    output = tmp_path / "output"
    words = (HERE / "wait_for_field_script.py", dm.address, "train", "double", "8", output)

    class Watching(Scorer):
        answered_at: int | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:  # two of four batches are trained
                assert waiting.wait(40) == 0
                self.answered_at = batch_idx
            return super().training_step(batch, batch_idx)

    model = Watching(doubled)
    with started(*words, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}) as (waiting, _, _):
        trainer(callbacks=[WriteBack({"double": "double"}, "train")]).fit(model, datamodule=dm)
    assert (model.answered_at, len(model.indexes())) == (2, 16)
    assert output.read_text() == str([2.0 * row for row in range(8)])


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_every_stage_can_write(data: Make, trainer: MakeTrainer, stage: str) -> None:
    dm = data(train=stream("train"), **{stage: stream("other", task="examine")})
    fill(dm.client, "train", 4)
    fill(dm.client, "other", 6)
    run = trainer(callbacks=[WriteBack(["double"], stage)], num_sanity_val_steps=0)  # type: ignore[arg-type]
    if stage == "val":
        run.fit(Scorer(doubled), datamodule=dm)
    else:
        getattr(run, stage)(Scorer(doubled), datamodule=dm)
    assert stored(dm.client, "other", "double") == [2.0 * row for row in range(6)]
    assert dm.client.get_production_status(["double"], "train") == (None, None)  # another stage's step


def test_micro_batches_of_an_accumulation_write_their_own_rows_without_a_graph(
    data: Make, trainer: MakeTrainer
) -> None:
    def with_graph(data: Any) -> dict[str, Any]:
        weight = torch.ones(4, requires_grad=True)
        return {"log_probs": data["x"] @ weight}

    dm = data(train=stream("train", batch_size=8, micro_batch_size=2))
    fill(dm.client, "train", 16)
    run = trainer(accumulate_grad_batches=3, callbacks=[WriteBack({"old_log_probs": "log_probs"}, "train")])
    run.fit(Scorer(with_graph), datamodule=dm)
    assert (run.global_step, stored(dm.client, "train", "old_log_probs")) == (3, [4.0 * row for row in range(16)])


def test_rows_may_be_jagged_dense_arrays_or_objects_and_padding_is_not_written(
    data: Make, trainer: MakeTrainer
) -> None:
    def all_kinds(data: Any) -> dict[str, Any]:
        counts = [int(number) + 1 for number in data["x"][:, 0]]
        ragged = [torch.full((count,), count) for count in counts]
        return {
            "dense": torch.tensor([[count, count] for count in counts], dtype=torch.bfloat16),
            "array": np.broadcast_to(np.array(counts, dtype=np.int32)[:, None], (len(counts), 2)),  # read-only
            "words": np.array([f"{count} pears" for count in counts]),
            "nested": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "strided": torch.nested.as_nested_tensor([torch.ones(count, 2 * count) for count in counts]),
            "list": ragged,
            "text": [f"{count} apples" for count in counts],
            "objects": [{"counts": [count]} for count in counts],
        }

    names = ["dense", "array", "words", "nested", "strided", "list", "objects"]
    dm = data(predict=stream("samples", task="score", tail="pad"))
    fill(dm.client, "samples", 6)  # the second batch of four has two rows of padding
    fields = {**{name: name for name in names}, "said": "text"}
    trainer(callbacks=[WriteBack(fields)]).predict(Scorer(all_kinds), datamodule=dm)
    found = {name: stored(dm.client, "samples", name) for name in fields}
    counts = range(1, 7)
    assert found == {
        "dense": [[float(n)] * 2 for n in counts],
        "array": [[n] * 2 for n in counts],
        "words": [f"{n} pears" for n in counts],
        "nested": [[n] * n for n in counts],
        "strided": [[[1.0] * 2 * n] * n for n in counts],
        "list": [[n] * n for n in counts],
        "said": [f"{n} apples" for n in counts],
        "objects": [{"counts": [n]} for n in counts],
    }


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(3), "3 rows"),
        (torch.tensor(1.0), "a single Tensor"),
        (["a"] * 5, "5 rows"),
        (1.5, "a single float"),
    ],
)
def test_a_wrong_number_of_rows_is_an_error_that_names_field_rows_and_samples(
    data: Make, trainer: MakeTrainer, value: Any, what: str
) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 4)
    run = trainer(callbacks=[WriteBack(["good", "bad"], "train")])
    with pytest.raises(InvalidRequestError, match=f"field 'bad' has {what} for the 4 samples of the batch"):
        run.fit(Scorer(lambda _: {"good": torch.zeros(4), "bad": value}), datamodule=dm)


def test_a_refused_field_leaves_the_others_unwritten(data: Make) -> None:
    dm = data(train=stream("train"))
    fill(dm.client, "train", 4)
    meta = dm.client.get_meta(["x"], partition_id="train", mode="force_fetch")
    with pytest.raises(InvalidRequestError):
        put_back(dm.client, meta, {"good": torch.zeros(4), "bad": torch.zeros(3)})
    assert dm.client.get_stats()["partitions"]["train"]["fields"] == ["x", "text"]


@pytest.mark.parametrize(
    ("outputs", "found"), [({"loss": 1}, "a mapping with 'loss'"), (None, "NoneType"), (torch.zeros(()), "Tensor")]
)
def test_the_error_for_a_missing_value_says_what_to_return(
    data: Make, trainer: MakeTrainer, outputs: Any, found: str
) -> None:
    class Silent(Recorder):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return outputs

    dm = data(test=stream("samples"))
    fill(dm.client, "samples", 4)
    with pytest.raises(InvalidRequestError, match=f"'log_probs' from test_step, which returned {found}"):
        trainer(callbacks=[WriteBack(["log_probs"], "test")]).test(Silent(), datamodule=dm)


def test_the_sanity_check_writes_nothing(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=stream("val", task="evaluate"))
    fill(dm.client, "train", 4)
    fill(dm.client, "val", 4)
    fields: list[list[str]] = []

    class Asking(Scorer):
        def on_train_start(self) -> None:
            fields.append(dm.client.get_stats()["partitions"]["val"]["fields"])

    trainer(num_sanity_val_steps=1, callbacks=[WriteBack(["double"], "val")]).fit(Asking(doubled), datamodule=dm)
    assert (fields, stored(dm.client, "val", "double")) == ([["x", "text"]], [0.0, 2.0, 4.0, 6.0])


def test_one_loader_of_several_can_be_chosen(data: Make, trainer: MakeTrainer) -> None:
    dm = data(train=stream("train"), val=[stream("a", task="a"), stream("b", task="b")])
    for name in ("train", "a", "b"):
        fill(dm.client, name, 4)
    run = trainer(num_sanity_val_steps=0, callbacks=[WriteBack(["double"], "val", loader=1)])
    run.fit(Scorer(doubled), datamodule=dm)
    assert dm.client.get_stats()["partitions"]["a"]["fields"] == ["x", "text"]
    assert stored(dm.client, "b", "double") == [0.0, 2.0, 4.0, 6.0]


ROW_NBYTES = 1 << 14


def start_small(**limits: Any) -> TransferQueueClient:
    """A queue for 16 such rows, or for 8 with a field written back."""
    storage = {"num_data_storage_units": 1, "capacity_bytes": 16 * ROW_NBYTES, "put_timeout_s": 1.0}
    tq.init({"backend": {"SimpleStorage": {**storage, **limits}}})
    return tq.get_client()


def put_large(client: TransferQueueClient, count: int) -> None:
    client.put({"large": torch.zeros(count, ROW_NBYTES // 4)}, partition_id="train")


class Large(LightningModule):
    """Returns a field as large as its input. ``at[batch]()`` is called within that step."""

    def __init__(self, at: dict[int, Callable[[], Any]]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        data, _ = batch
        if batch_idx in self.at:
            self.at[batch_idx]()
        return {"loss": self.layer(data["large"][:, :1]).mean(), "double": 2 * data["large"]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def large_data(num_batches: int, clear_consumed: bool | list[str]) -> TQDataModule:
    return TQDataModule(
        train=Stream(
            partition="train", task="learn", fields=["large"], batch_size=4, num_batches=num_batches,
            clear_consumed=clear_consumed,
        )
    )  # fmt: skip


def test_a_full_queue_is_an_error_that_says_how_to_keep_space(trainer: MakeTrainer) -> None:
    client = start_small()
    put_large(client, 16)
    with pytest.raises(StorageFullError, match=r"waited 1.0 s for room for 64 KiB: .* Limit the samples"):
        trainer(callbacks=[WriteBack(["double"], "train")]).fit(Large({}), datamodule=large_data(4, True))


def test_a_wait_for_space_clears_what_every_task_is_done_with(trainer: MakeTrainer) -> None:
    client = start_small(put_timeout_s=30.0)
    put_large(client, 8)

    def fill_up_and_criticize() -> None:
        """Fill the last space. Then finish the previous batch in another task."""
        put_large(client, 4)
        client.get_meta(["double"], 4, "train", task_name="criticize", timeout_s=20)

    run = trainer(callbacks=[WriteBack(["double"], "train")])
    run.fit(Large({1: fill_up_and_criticize}), datamodule=large_data(2, ["criticize"]))
    assert (run.global_step, client.get_stats()["partitions"]["train"]["samples"]) == (2, 8)


def test_a_sample_limit_that_fits_the_new_fields_always_leaves_space(trainer: MakeTrainer) -> None:
    client = start_small(total_storage_size=8)
    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(lambda: [put_large(client, 4) for _ in range(10)])
        run = trainer(callbacks=[WriteBack(["double"], "train")])
        run.fit(Large({}), datamodule=large_data(10, True))
        producing.result(20)
    assert run.global_step == 10


def test_invalid_write_back_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one field"):
        WriteBack({})
    for fields in (5, "x", {"x": 1}):
        with pytest.raises(InvalidRequestError, match="fields must name at least one field, as a mapping or a list"):
            WriteBack(fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="loader must be an int of at least 0, got 'x'"):
        WriteBack(["x"], loader="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="one of 'train', 'val', 'test', 'predict', got 'fit'"):
        WriteBack(["x"], "fit")  # type: ignore[arg-type]


@pytest.mark.programs
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "devices", "writers"),
    [("ddp", 2, {0, 1}), pytest.param("model_parallel", 4, {0, 2}, marks=pytest.mark.slow)],
)
def test_each_group_writes_its_own_samples_by_one_of_its_ranks(
    run_ranks: Any, strategy: str, devices: int, writers: set[int], tmp_path: Path
) -> None:
    code, output, _ = run_ranks("callbacks_script.py", "write_back", strategy, str(devices), "LOGS")
    assert code == 0, output
    indexes, ranks, wrote = (eval((tmp_path / "logs" / name).read_text()) for name in ("indexes", "ranks", "wrote"))
    assert len(indexes) == len(ranks) == 24
    assert set(ranks) == writers
    # Each rank recorded what it trained. A sample carries the rank that wrote it.
    assert all(index in wrote[rank] for index, rank in zip(indexes, ranks, strict=True))


@pytest.mark.parametrize("kind", [list, dict])
def test_the_batch_of_the_stream_is_found_among_those_of_other_loaders(
    data: Make, trainer: MakeTrainer, kind: type
) -> None:
    class Both(Scorer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["rl"] if kind is dict else batch[1], batch_idx)

    dm = data(train=stream("train", num_batches=4))
    fill(dm.client, "train", 16)
    own = dm.train_dataloader

    def both() -> CombinedLoader:
        other = DataLoader(range(16), batch_size=4)
        return CombinedLoader({"sft": other, "rl": own()} if kind is dict else [other, own()], "min_size")

    dm.train_dataloader = both
    trainer(callbacks=[WriteBack(["double"], "train")]).fit(Both(doubled), datamodule=dm)
    assert stored(dm.client, "train", "double") == [2.0 * number for number in range(16)]
    assert dm.client.get_stats()["partitions"]["train"]["tasks"]["learn"]["settled"] == 4
