# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of three nodes on this machine, which the tests of a module share. Skips where Ray isn't installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import transfer_queue as tq
from tests.own_processes import SLOW

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
NODES = 3
WAIT_S = 120.0 * SLOW


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "on_ray":
            item.add_marker(pytest.mark.timeout(600.0 * SLOW))
            for kind in ("ResourceWarning", "FutureWarning", "DeprecationWarning", "UserWarning"):  # of Ray itself
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Nodes "n0" to "n2", of which the first has a CPU: fewer than there are storage units."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(request.module)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"n0": 10}})
    try:
        for number in range(1, NODES):
            made.add_node(num_cpus=0, resources={f"n{number}": 10})
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        tq.close()
        ray.shutdown()
        made.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def queue(cluster: Any) -> Iterator[Any]:
    """A queue of the test's own; the value is its configuration."""
    yield tq.init({"backend": {"SimpleStorage": {"memory": "192MiB"}}})
    tq.close()
    assert "ray" in sys.modules


def on(number: int) -> dict[str, Any]:
    """Options of a task or an actor on this node."""
    return {"num_cpus": 0, "resources": {f"n{number}": 1}}
