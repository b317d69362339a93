# SPDX-License-Identifier: Apache-2.0
"""Peers: the processes of a run's other ranks, watched so that none waits for data after one of them has died."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.errors import TransferQueueError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

Look = Callable[[], BaseException | None]


class RankGoneError(TransferQueueError, RuntimeError):
    """The process of another rank has ended in the middle of a run, so its collectives can't go on."""


@dataclass(frozen=True)
class RankProcess:
    rank: int
    where: str
    """Which kernel and namespace its pid is of."""
    pid: int
    started: str
    """Tells it from a later process with its pid."""

    @classmethod
    def of(cls, rank: int, pid: int | None = None) -> RankProcess:
        """A living process of this host. Default: this one."""
        own = os.getpid() if pid is None else pid
        return cls(rank, _place(), own, _life(own)[1])

    def is_gone(self) -> bool:
        """Has it ended? One that its parent has not asked for yet (a zombie) has."""
        state, started = _life(self.pid)
        return state in "ZX" or started != self.started


def peer_looks(owner: Trainer | Fabric) -> list[Look]:
    """What a ``Watch`` looks at: the other ranks' processes on this host, and the one that started this rank.

    A collective: all ranks must call it. Ranks of other hosts are their launchers' to end (torchrun and SLURM do).
    """
    return [_ranks_look(owner.global_rank, _gathered(owner)), _parent_look(owner.global_rank)]


def _gathered(owner: Trainer | Fabric) -> list[RankProcess]:
    """The processes of the other ranks on this host."""
    import torch.distributed as dist

    own = RankProcess.of(owner.global_rank)
    if owner.world_size == 1 or not own.started or not (dist.is_available() and dist.is_initialized()):
        return []
    told: list[RankProcess] = [own] * owner.world_size
    dist.all_gather_object(told, own)
    return [each for each in told if each.rank != own.rank and each.where == own.where]


def _ranks_look(rank: int, peers: list[RankProcess]) -> Look:
    def look() -> BaseException | None:
        gone = next((peer for peer in peers if peer.is_gone()), None)
        if gone is None:
            return None
        return RankGoneError(
            f"rank {gone.rank} (pid {gone.pid}) has ended in the middle of the run, so rank {rank} ends, too. What "
            f"ended it is in that rank's own output."
        )

    return look


def _parent_look(rank: int) -> Look:
    """A spawned or forked rank outlives the process that started it, and nobody else would tell it."""
    parent = os.getppid()
    is_child = multiprocessing.parent_process() is not None

    def look() -> BaseException | None:
        if not is_child or os.getppid() == parent:
            return None
        return RankGoneError(f"the process that started rank {rank} (pid {parent}) has ended, so the rank ends, too.")

    return look


def _place() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return ""


def _life(pid: int) -> tuple[str, str]:
    """(state, start) of a process as the kernel says them; ("X", "") of one that is gone, or where it doesn't say."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", ""
    after_name = status.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return after_name[0], after_name[19]
