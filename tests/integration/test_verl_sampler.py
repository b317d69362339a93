# SPDX-License-Identifier: Apache-2.0
"""verl's trainers with the sampler that is told of finished rollouts. Skipped where verl is not installed.

verl's wheel also installs a package named ``tests``, which hides this folder. Remove it from site-packages first.
"""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from streaming_support import WAIT_S, InThread

import transfer_queue as tq
from tests.integration.noticing import until_parked

with warnings.catch_warnings():  # verl warns of each engine that is not installed, and Ray of its own modules
    warnings.simplefilter("ignore")
    verl = pytest.importorskip("verl")
    pytest.importorskip("verl.trainer.ppo.v1.trainer_base")

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from transfer_queue.contrib.verl import WatchingReplayBuffer, WatchingReplayBufferAsync, replay_buffer

# verl's own use of what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Function 'verl:FutureWarning")
NEVER_S = 1000.0
"""A poll interval: what takes less was not polled."""
CUSTOM = ["trainer.v1.sampler.custom_sampler.path=pkg://transfer_queue.contrib.verl",
          "trainer.v1.sampler.custom_sampler.name=replay_buffer"]  # fmt: skip


def uids(count: int) -> list[str]:
    return [uuid.uuid4().hex for _ in range(count)]


def tell(name: str, status: str, uid: str, step: int = 1) -> None:
    tq.kv_put(uid, name, tag={"is_prompt": True, "status": status, "global_steps": step})


def roll_out(name: str, uid: str, rewards: tuple[float, ...] = (0.0, 1.0), status: str = "finished") -> None:
    for session, reward in enumerate(rewards):
        row = {"x": torch.zeros(2), "rm_scores": torch.tensor([0.0, reward])}
        tq.kv_put(f"{uid}_{session}_0", name, row, {"seq_len": 2, "global_steps": 1})
    tell(name, status, uid)


def prompts_of(batch: tq.KVBatchMeta) -> set[str]:
    return {key.split("_")[0] for key in batch.keys}


def sampler(trainer_mode: str = "sync", refill: Any = None, **sampler_kwargs: Any) -> Any:
    return replay_buffer(
        trainer_mode=trainer_mode, trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
        sampler_kwargs={"poll_interval": NEVER_S, **sampler_kwargs}, refill_fn=refill,
    )  # fmt: skip


def configured(*settings: str) -> Any:
    """verl's own configuration with these settings, as its trainer reads it."""
    path = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    return OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist([*CUSTOM, *settings]))


def built(config: Any) -> Any:
    """What verl's trainer makes of its configuration."""
    trainer = SimpleNamespace(
        config=config, trainer_mode=config.trainer.v1.trainer_mode, _add_prompts_to_generate=lambda count: count
    )
    return PPOTrainer._build_replay_buffer(trainer)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_batch_is_sampled_when_its_last_prompt_ends(client, name, mode):
    first, last, other = uids(3)
    for uid in (first, last, other):
        tell(name, "running", uid)
    roll_out(name, first)
    sampling = InThread(lambda: sampler(mode, refill=len).sample(1, name, 2))
    until_parked(client, partition=name)
    roll_out(name, last)
    batch, metrics = sampling.result()
    assert prompts_of(batch) == {first, last}
    assert (len(batch.keys), metrics) == (4, {})
    assert list(tq.kv_list(name, where="is_prompt == true")[name]) == [other]


def test_a_prompt_is_sampled_once(client, name):
    buffer, all_uids = sampler(), uids(6)
    for uid in all_uids:
        roll_out(name, uid)
    found = [key.split("_")[0] for _ in range(3) for key in buffer.sample(1, name, 2)[0].keys]
    assert sorted(found) == sorted(2 * all_uids)


def test_the_tables_are_those_of_verl(client, name):
    ours, theirs = sampler("colocate_async", refill=len), ReplayBuffer("sync", {}, 8, "drop", {})
    for step, (uid, status) in enumerate(zip(uids(6), ["pending", "running", "finished"] * 2, strict=True)):
        tell(name, "pending", uid, step)
        ours.get_sampleable_count(step, name)
        roll_out(name, uid, status=status)
    ours.get_sampleable_count(1, name)
    theirs._sync_metadata_from_transfer_queue()
    for table in ("partitions", "prompt_global_steps", "pending_keys", "running_keys", "finished_keys", "failure_keys"):
        assert getattr(ours, table)[name] == getattr(theirs, table)[name], table


def test_failed_groups_are_refilled_while_the_sampler_waits(client, name):
    good, bad, fresh = uids(3)
    refilled: list[int] = []

    def refill(count: int) -> int:
        refilled.append(count)
        roll_out(name, fresh)
        return count

    for uid in (good, bad):
        tell(name, "running", uid)
    sampling = InThread(lambda: sampler("separate_async", refill).sample(1, name, 2))
    until_parked(client, partition=name)
    tell(name, "failure", bad)
    until_parked(client, partition=name)
    roll_out(name, good)
    batch, metrics = sampling.result()
    assert prompts_of(batch) == {good, fresh}
    assert refilled == [1]
    assert metrics == {"validation/rollout_failure/evicted_samples": 1}  # verl's word for partitions but "train"


def test_groups_of_equal_rewards_are_replaced(client, name):
    equal, mixed, fresh = uids(3)
    roll_out(name, equal, rewards=(1.0, 1.0))
    roll_out(name, mixed)
    buffer = sampler(
        refill=lambda count: roll_out(name, fresh),
        filter_groups_metric="reward",
        train_batch_size=2,
        poll_interval=0.01,
    )
    batch, _ = buffer.sample(1, name, 2)
    assert prompts_of(batch) == {mixed, fresh}


def test_verls_trainer_builds_it_from_its_configuration():
    assert type(built(configured("trainer.v1.trainer_mode=sync"))) is WatchingReplayBuffer
    for mode in ("colocate_async", "separate_async"):
        assert type(built(configured(f"trainer.v1.trainer_mode={mode}"))) is WatchingReplayBufferAsync


@pytest.mark.parametrize(
    ("setting", "argument"),
    [
        ("algorithm.filter_groups.enable=true", "filter_groups_metric"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "sync_refill_failed_groups"),
    ],
)
def test_what_verl_withholds_is_demanded(setting, argument):
    with pytest.raises(ValueError, match=rf"custom sampler of {setting.split('=')[0]}.*sampler_kwargs\.{argument}"):
        built(configured(setting))


def test_what_the_page_says_is_enough():
    filtering = "trainer.v1.sampler.sampler_kwargs.filter_groups_metric=${algorithm.filter_groups.metric}"
    with pytest.raises(ValueError, match="needs train_batch_size"):
        built(configured("trainer.v1.trainer_mode=sync", "algorithm.filter_groups.enable=true", filtering))
    buffer = built(
        configured(
            "trainer.v1.trainer_mode=sync", "algorithm.filter_groups.enable=true", filtering,
            "trainer.v1.sampler.sampler_kwargs.train_batch_size=${data.train_batch_size}", "data.train_batch_size=24",
        )
    )  # fmt: skip
    assert (buffer.filter_groups_metric, buffer.train_batch_size, buffer.gen_batch_size) == ("reward", 24, 1)


def test_the_steps_that_are_replaced_exist():
    for step in ("_sync_metadata_from_transfer_queue", "_wait_for_next_poll"):
        assert callable(getattr(ReplayBuffer, step))
    assert WAIT_S < NEVER_S
