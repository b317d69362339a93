# SPDX-License-Identifier: Apache-2.0
"""A worker: it leases episodes, plays them turn by turn, and goes on with those that a dead worker has begun."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import torch

import transfer_queue as tq
from examples.agents.game import Episode
from examples.agents.policy import Policy
from lightning_tq import WeightsReader


def work(turns_to_live: int = 0) -> None:
    """Play until no group needs an episode.

    Args:
        turns_to_live: About how many turns it plays until it is killed, in the middle of an episode. 0: it lives on.
    """
    torch.set_num_threads(1)
    client, weights, policy = tq.get_client(), WeightsReader(), Policy()
    chance = random.Random()  # textarena seeds the global one
    # by="part": several workers share a group. keep="all": turns of a dead worker stay, and the next one goes on.
    for lease in client.leases("train", n=4, by="part", keep="all", lease_s=10.0):
        policy.load_state_dict(weights.latest().state_dict)
        turns = lease.members
        guesses = client.get_data(turns, layout="dense")["guess"].tolist() if turns.size else []
        with lease:
            play(
                lease,
                Episode(int(lease.head["seed"]), guesses),
                policy,
                lambda: turns_to_live > 0 and chance.random() < 1 / turns_to_live,
            )


def play(lease: tq.Lease, episode: Episode, policy: Policy, dies: Callable[[], bool]) -> None:
    """Put each turn as a row of the group; the last one closes the episode."""
    while not episode.is_over:
        state = episode.state
        with torch.no_grad():
            log_probs = policy(state[None])[0]
        guess = int(torch.multinomial(log_probs.exp(), 1))
        episode.play(guess)
        row = {
            "state": state[None],
            "guess": torch.tensor([guess]),
            "log_prob": log_probs[[guess]],
            "part": torch.tensor([lease.part]),
            "reward": torch.tensor([episode.reward if episode.is_over else 0.0]),
        }
        tags = [{"worker": os.getpid(), "won": episode.won}]
        if episode.is_over:
            lease.close(row, tags)
        else:
            lease.put(row, tags)
            if dies():
                os.kill(os.getpid(), signal.SIGKILL)  # as if its machine had failed
