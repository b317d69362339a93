# SPDX-License-Identifier: Apache-2.0
"""Policies on their way through a real queue: who gets which version, who waits, how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import transfer_queue as tq
from examples.grpo.model import Policy, PolicyConfig
from examples.grpo.weights import WEIGHTS, Plan, PolicyFollower, put_policy

SMALL = PolicyConfig(width=8, layers=1, heads=1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tq.TransferQueueClient]:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init()
    yield tq.get_client()
    tq.close()


def plan(version: int) -> Plan:
    return Plan(version=version, epoch=0, steps_per_epoch=4, answers_per_step=8, answers_per_prompt=4, seed=0)


def put(client: tq.TransferQueueClient, version: int) -> Policy:
    torch.manual_seed(version)
    policy = Policy(SMALL)
    put_policy(client, policy, plan(version))
    return policy


def same(first: Policy, second: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_follower_takes_the_newest_version_and_builds_the_policy_from_the_sample(client):
    policies = [put(client, version) for version in range(3)]
    follower = PolicyFollower(client, "rollout-0")
    assert same(follower.follow(), policies[2])
    assert (follower.plan, follower.follow().config) == (plan(2), SMALL)


def test_a_follower_waits_for_a_version_that_is_new_enough(client):
    put(client, 0)
    follower = PolicyFollower(client, "rollout-0")
    follower.follow()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(follower.follow, least=2)
        put(client, 1)
        newest = put(client, 2)
        assert same(waiting.result(timeout=20), newest)
    assert follower.version == 2


def test_each_follower_sees_every_version(client):
    put(client, 0)
    followers = [PolicyFollower(client, f"rollout-{worker}") for worker in range(2)]
    assert [follower.follow() and follower.version for follower in followers] == [0, 0]


def test_a_version_cleared_while_it_was_fetched_is_skipped_for_the_next(client):
    put(client, 0)
    follower = PolicyFollower(client, "rollout-0")
    stale = follower._newest()
    client.clear_samples(stale)
    follower._load(stale)
    assert follower.version == -1
    newest = put(client, 1)
    assert same(follower.follow(), newest)


def test_sealed_weights_tell_a_waiting_follower_that_training_has_ended(client):
    put(client, 0)
    follower = PolicyFollower(client, "rollout-0")
    follower.follow()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(follower.follow, least=1)
        client.seal_partition(WEIGHTS)
        with pytest.raises(tq.EndOfPartitionError):
            waiting.result(timeout=20)
