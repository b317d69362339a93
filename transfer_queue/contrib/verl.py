# SPDX-License-Identifier: Apache-2.0
"""verl's replay buffers, notified of finished rollouts by the queue, without polling. Needs verl; made with 0.9.1.

What is evicted, refilled and sampled stays verl's code. Two steps of it are replaced: listing all keys, and sleeping.
docs/migration.md says how to set it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from omegaconf import OmegaConf

from transfer_queue.contrib.prompt_table import PromptWatch

try:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
except ImportError as error:
    raise ImportError(
        f"transfer_queue.contrib.verl needs verl with its V1 trainers, which can't be imported ({error}): "
        "install verl 0.9.1 or later in the trainer's environment."
    ) from error

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_WITHHELD = {
    "algorithm.filter_groups.enable": "filter_groups_metric",
    "trainer.v1.sampler.sync_refill_failed_groups": "sync_refill_failed_groups",
}
"""verl's settings that change its own samplers, and the argument by which; it gives custom samplers neither."""


def replay_buffer(trainer_mode: str, sampler_kwargs: Any, **verls: Any) -> ReplayBuffer:
    """verl's ``custom_sampler``, of the class that fits the trainer's mode.

    Args:
        sampler_kwargs: More arguments of verl's replay buffer, such as ``filter_groups_metric`` with
            ``train_batch_size``, ``sync_refill_failed_groups``, and ``poll_interval`` (the longest wait at once, 2 s).
        verls: What verl gives a custom sampler.
    Raises:
        ValueError: verl's configuration filters or refills groups, and ``sampler_kwargs`` don't say it.
    """
    own = dict(sampler_kwargs)
    for setting, argument in _WITHHELD.items() if OmegaConf.is_config(sampler_kwargs) else ():
        # These arguments are a part of verl's configuration, at trainer.v1.sampler.
        is_set = OmegaConf.select(sampler_kwargs, f".....{setting}", throw_on_resolution_failure=False)
        if is_set and argument not in own:
            raise ValueError(
                f"verl doesn't tell a custom sampler of {setting}. Set trainer.v1.sampler.sampler_kwargs.{argument} "
                "as well (docs/migration.md of lightning-tq)."
            )
    if own.get("filter_groups_metric") is not None and trainer_mode == "sync" and "train_batch_size" not in own:
        raise ValueError("filter_groups_metric needs train_batch_size in trainer.v1.sampler.sampler_kwargs, too.")
    chosen = WatchingReplayBuffer if trainer_mode == "sync" else WatchingReplayBufferAsync
    arguments = {"gen_batch_size": 1, **verls, **own}  # verl's trainers refill prompts one by one
    return chosen(trainer_mode=trainer_mode, sampler_kwargs=sampler_kwargs, **arguments)


class WatchingReplayBuffer(ReplayBuffer):
    """verl's replay buffer, whose tables of the partition that it samples follow the queue's changes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._followed: dict[str, PromptWatch] = {}
        self._sampled: str | None = None
        self._wanted = 1
        """Prompts that must have ended for what is waited for."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self._sampled, self._wanted = partition_id, batch_size
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)

    def _follow(self, partition: str) -> PromptWatch:
        return self._followed.setdefault(partition, PromptWatch(partition))

    def _sync_metadata_from_transfer_queue(self) -> None:
        if self._sampled is None:  # it is called by itself: nobody said which partition
            super()._sync_metadata_from_transfer_queue()
            return
        table = self._follow(self._sampled).current()
        self.partitions[self._sampled] = table.trajectories
        self.prompt_global_steps[self._sampled] = table.steps
        for status, keys in table.prompts.items():  # pending_keys and so on
            getattr(self, f"{status}_keys")[self._sampled] = keys

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        followed = self._follow(partition_id)
        followed.wait(self._wanted, self.poll_interval)
        if time.time() - last_debug_time <= _LOG_EVERY_S:
            return last_debug_time
        prompts = ", ".join(f"{len(keys)} {status}" for status, keys in followed.table.prompts.items())
        logger.info("waiting for %d prompts of %r to end: %s", self._wanted, partition_id, prompts)
        return time.time()


class WatchingReplayBufferAsync(WatchingReplayBuffer, ReplayBufferAsync):
    """The same for verl's asynchronous trainers."""

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> Any:
        self._sampled = partition_id
        return super().get_sampleable_count(global_steps, partition_id)

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> Any:
        self._sampled, self._wanted = partition_id, target_count
        return super().wait_for_sampleable(global_steps, partition_id, target_count)
