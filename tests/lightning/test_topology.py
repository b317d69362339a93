# SPDX-License-Identifier: Apache-2.0
"""Which data-parallel rank a process is, from a strategy or from what the user says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric import Fabric

from lightning_tq import Topology, fabric_topology, trainer_topology
from transfer_queue.errors import InvalidRequestError


def told(rank: int, world: int, **kwargs: Any) -> Any:
    """A Trainer, as far as topology looks at one."""
    return SimpleNamespace(global_rank=rank, world_size=world, strategy=object(), **kwargs)


def test_a_single_device_is_the_only_rank() -> None:
    assert trainer_topology(told(0, 1, distributed_sampler_kwargs=None)) == Topology(0, 1, True)


def test_the_strategy_knows_the_groups() -> None:
    kwargs = {"num_replicas": 2, "rank": 1}
    assert trainer_topology(told(3, 4, distributed_sampler_kwargs=kwargs)) == Topology(1, 2, True)


def test_dp_size_alone_makes_groups_of_neighbours_with_one_reader_each() -> None:
    kwargs = {"num_replicas": 4, "rank": 0}
    found = [trainer_topology(told(r, 4, distributed_sampler_kwargs=kwargs), dp_size=2) for r in range(4)]
    assert found == [Topology(0, 2, True), Topology(0, 2, False), Topology(1, 2, True), Topology(1, 2, False)]


def test_dp_rank_may_be_a_function_of_the_trainer() -> None:
    trainer = told(3, 4, distributed_sampler_kwargs={"num_replicas": 4, "rank": 3})
    assert trainer_topology(trainer, dp_rank=lambda each: each.global_rank % 2, dp_size=2).dp_rank == 1


@pytest.mark.parametrize(("options", "says"), [({"dp_size": 3}, "doesn't divide"), ({"dp_rank": 4}, "ranks go from 0")])
def test_numbers_that_cannot_be_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        trainer_topology(told(0, 4, distributed_sampler_kwargs={"num_replicas": 4, "rank": 0}), **options)


def test_fabric_has_the_same() -> None:
    assert fabric_topology(Fabric(accelerator="cpu", devices=1)) == Topology(0, 1, True)
