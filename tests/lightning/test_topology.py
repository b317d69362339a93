# SPDX-License-Identifier: Apache-2.0
"""Topology: the data-parallel rank of a process, from the strategy or from the user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, SingleDeviceStrategy
from producing import rows

import transfer_queue as tq
from lightning_tq import Topology, TQDataModule, fabric_topology, trainer_topology
from lightning_tq.topology import check_dp_ranks, run_on_rank_zero
from tests.lightning.conftest import stream
from transfer_queue.errors import ConfigError, InvalidRequestError, RemoteError


def at(rank: int, world: int, strategy: Any) -> Any:
    """A Trainer on one of several ranks, with the attributes that topology uses."""
    return SimpleNamespace(global_rank=rank, world_size=world, strategy=strategy)


def reporting(rank: int, num_replicas: int) -> Any:
    """A strategy that reports its replica."""
    return SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": rank})


def started(strategy: Any, rank: int, world: int) -> Any:
    """A strategy of Lightning, as after the start of its processes, two on each node."""
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_global_rank(rank)
    strategy.cluster_environment.set_world_size(world)
    strategy.num_nodes = world // 2
    return strategy


class DeepSpeedStrategy(ParallelStrategy):  # type: ignore[misc]
    """Like Lightning's, which needs deepspeed: it counts every process as a replica."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


DeepSpeedStrategy.__abstractmethods__ = frozenset()


def installed_deepspeed(config: dict[str, Any]) -> Any:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from lightning.pytorch.strategies import DeepSpeedStrategy as Installed

    return Installed(config=config)


class Plugged(ParallelStrategy):  # type: ignore[misc]  # of a third party, without its own groups
    parallel_devices = (torch.device("cpu"),) * 2
    global_rank = 3


Plugged.__abstractmethods__ = frozenset()


def test_a_single_device_is_the_only_rank() -> None:
    assert trainer_topology(at(0, 1, SingleDeviceStrategy("cpu"))) == Topology(0, 1, True)
    assert trainer_topology(Trainer(accelerator="cpu", devices=1, logger=False)) == Topology(0, 1, True)


def test_the_strategy_reports_the_groups() -> None:
    assert [trainer_topology(at(rank, 4, reporting(rank // 2, 2))) for rank in range(4)] == [
        Topology(0, 2, True), Topology(0, 2, False), Topology(1, 2, True), Topology(1, 2, False)
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy])
def test_every_process_of_all_nodes_is_a_rank_under_ddp_and_fsdp(strategy: Any) -> None:
    found = [trainer_topology(at(rank, 4, started(strategy(), rank, 4))) for rank in range(4)]
    assert found == [Topology(rank, 4, True) for rank in range(4)]


def test_the_inherited_count_of_one_nodes_devices_is_ignored() -> None:
    assert Plugged.distributed_sampler_kwargs.fget(Plugged) == {"num_replicas": 2, "rank": 3}
    assert trainer_topology(at(3, 4, Plugged.__new__(Plugged))) == Topology(3, 4, True)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({"zero_optimization": {"stage": 3}}, [0, 1, 2, 3]),
        ({"tensor_parallel": {"autotp_size": 2}}, [0, 0, 1, 1]),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, [0, 0, 1, 1]),
        ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}, [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, installed_deepspeed])
def test_deepspeed_ranks_that_split_a_model_or_a_sequence_share_their_batches(
    strategy: Any, config: dict[str, Any], groups: list[int]
) -> None:
    found = [trainer_topology(at(rank, 4, started(strategy(config), rank, 4))) for rank in range(4)]
    assert [each.dp_rank for each in found] == groups
    assert {each.dp_size for each in found} == {max(groups) + 1}
    assert [each.is_reader for each in found] == [rank == groups.index(group) for rank, group in enumerate(groups)]


def test_dp_size_alone_makes_groups_of_neighbours_with_one_reader_each() -> None:
    found = [trainer_topology(at(rank, 4, reporting(rank, 4)), dp_size=2) for rank in range(4)]
    assert found == [Topology(0, 2, True), Topology(0, 2, False), Topology(1, 2, True), Topology(1, 2, False)]


def test_dp_rank_may_be_a_function_of_the_trainer() -> None:
    trainer = at(3, 4, reporting(3, 4))
    assert trainer_topology(trainer, dp_rank=lambda each: each.global_rank % 2, dp_size=2).dp_rank == 1


@pytest.mark.parametrize(("options", "says"), [({"dp_size": 3}, "doesn't divide"), ({"dp_rank": 4}, "ranks go from 0")])
def test_impossible_numbers_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        trainer_topology(at(0, 4, reporting(0, 4)), **options)


@pytest.mark.parametrize(
    ("ranks", "size", "fits"),
    [
        ([0, 1, 0, 1], 2, True),
        ([0, 0, 1, 1], 4, False),  # without dp_size, every process counts as a group
        ([0, 0, 0, 1], 2, False),
        ([1, 1, 2, 2], 2, False),
    ],
)
def test_each_dp_rank_must_have_equally_many_processes(ranks: list[int], size: int, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(InvalidRequestError, match="set dp_size too"):
        check_dp_ranks(ranks, size)


def test_fabric_reports_the_same() -> None:
    assert fabric_topology(Fabric(accelerator="cpu", devices=1)) == Topology(0, 1, True)


def test_a_fabric_must_be_launched_before_its_ranks_are_known() -> None:
    with pytest.raises(InvalidRequestError, match=r"Call fabric.launch\(\) first"):
        fabric_topology(Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn"))


class TwoRanks:
    """Rank 0 or 1 of two, one after the other. What rank 0 broadcasts is there when rank 1 asks for it."""

    def __init__(self) -> None:
        self.is_global_zero = True
        self.strategy = self
        self.sent: list[Any] = []

    def broadcast(self, value: Any, src: int) -> Any:
        if self.is_global_zero:
            self.sent.append(value)
        return self.sent[-1]


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (ConfigError("no such key"), ConfigError),
        (ValueError("a sampler of the user"), InvalidRequestError),
        (ZeroDivisionError("a bug"), RemoteError),
    ],
)
def test_an_error_of_rank_zero_is_raised_on_every_rank(raised: Exception, reported: type[Exception]) -> None:
    def fail() -> str:
        raise raised

    ranks: Any = TwoRanks()
    with pytest.raises(type(raised), match=str(raised)):
        run_on_rank_zero(ranks, fail)
    ranks.is_global_zero = False
    with pytest.raises(reported, match=str(raised)):
        run_on_rank_zero(ranks, fail)
    assert len(ranks.sent) == 1


def test_a_result_of_rank_zero_is_returned_on_every_rank() -> None:
    ranks: Any = TwoRanks()
    results = [run_on_rank_zero(ranks, lambda: "ipc:///here")]
    ranks.is_global_zero = False
    results.append(run_on_rank_zero(ranks, lambda: "elsewhere"))
    assert results == ["ipc:///here"] * 2


@pytest.mark.parametrize("sampler", ["SeqlenBalancedSampler", tq.SeqlenBalancedSampler(), "SequentialSampler", None])
def test_a_sampler_follows_the_ranks_whether_it_is_named_or_given(
    data: Callable[..., TQDataModule], sampler: tq.BaseSampler | str | None
) -> None:
    client = data(train=stream()).client
    stream("train", batch_size=2, sampler=sampler).register(client, dp_size=2)
    client.put(rows(8), partition_id="train", tags=[{"total_lengths": 1 + number} for number in range(8)])
    given: list[int] = []
    for rank in range(2):
        of = {"dp_rank": rank, "dp_size": 2, "batch_index": 0}
        given += client.get_meta(["x"], 2, "train", task_name="learn", sampling_config=of, timeout_s=30).global_indexes
    assert sorted(given) == [0, 1, 2, 3]
