# SPDX-License-Identifier: Apache-2.0
"""Policies through a real queue: a follower needs only what comes with the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch

import transfer_queue as tq
from examples.grpo.model import Policy, PolicyConfig
from examples.grpo.weights import Plan, PolicyFollower
from lightning_tq.producers.model_weights import WEIGHTS_PARTITION, WeightsSnapshot

SMALL = PolicyConfig(width=8, layers=1, heads=1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init()
    yield tq.get_client()
    tq.close()


def plan(epoch: int) -> Plan:
    return Plan(epoch=epoch, steps_per_epoch=4, answers_per_step=8, answers_per_prompt=4, seed=0)


def put(version: int) -> Policy:
    """Publish a policy, as part of the epoch of that number."""
    torch.manual_seed(version)
    policy, snapshot = Policy(SMALL), WeightsSnapshot()
    weights = policy.state_dict()
    for name, view in snapshot.prepare(weights, None, pinned=False).items():
        view.copy_(weights[name])
    snapshot.put(WEIGHTS_PARTITION, version, {"plan": asdict(plan(version)), "policy": asdict(SMALL)})
    return policy


def same(first: Policy, second: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_follower_builds_the_newest_policy_and_knows_its_plan(client):
    policies = [put(version) for version in range(3)]
    follower = PolicyFollower(client, "rollout-0")
    assert same(follower.follow(), policies[2])
    assert (follower.version, follower.plan, follower.follow().config) == (2, plan(2), SMALL)


def test_a_newer_version_goes_into_the_same_policy(client):
    put(0)
    follower = PolicyFollower(client, "rollout-0")
    policy = follower.follow()
    newest = put(1)
    assert follower.follow(least=1) is policy
    assert same(policy, newest)


def test_each_follower_sees_every_version(client):
    put(0)
    followers = [PolicyFollower(client, f"rollout-{worker}") for worker in range(2)]
    assert [follower.follow() and follower.version for follower in followers] == [0, 0]


def test_before_the_first_policy_there_is_no_plan(client):
    with pytest.raises(RuntimeError, match=r"call follow\(\) first"):
        PolicyFollower(client, "rollout-0").plan  # noqa: B018
