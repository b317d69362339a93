# SPDX-License-Identifier: Apache-2.0
"""examples/ppo_cartpole.py: its advantages, a few updates, and whether it solves the game (slow)."""

from __future__ import annotations

import re

import pytest
import torch

from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python

pytest.importorskip("gymnasium", reason="needs pip install -e '.[examples]'")

from examples.ppo_cartpole import DISCOUNT, TRACE, Agent, Games, advantages


def run(**options: int) -> str:
    """Run it and return its output."""
    words = [f"--{name}={value}" for name, value in options.items()]
    done = run_python("-m", "examples.ppo_cartpole", *words, timeout=290 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


def test_an_advantage_sums_the_discounted_surprises_of_its_own_episode() -> None:
    rewards, values = torch.ones(4, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    ends = torch.tensor([[False], [True], [False], [False]])
    after_end = torch.tensor([[0.0], [7.0], [0.0], [0.0]])  # cut off, where 7 more was expected
    surprises = [
        1 + DISCOUNT * 2 - 1,
        1 + DISCOUNT * 7 - 2,  # the next step is of another episode
        1 + DISCOUNT * 4 - 3,
        1 + DISCOUNT * 5 - 4,
    ]
    found = advantages(rewards, values, torch.tensor([5.0]), ends, after_end)
    expected = [
        surprises[0] + DISCOUNT * TRACE * surprises[1], surprises[1],
        surprises[2] + DISCOUNT * TRACE * surprises[3], surprises[3],
    ]  # fmt: skip
    torch.testing.assert_close(found.flatten(), torch.tensor(expected))


def test_games_report_each_episode_once_and_continue_with_the_next() -> None:
    torch.manual_seed(0)
    played = Games(count=2, seed=0).play(Agent().requires_grad_(False), steps=200)
    assert {name: tuple(values.shape) for name, values in played.items()} == {
        "observations": (400, 4), "actions": (400,), "log_probs": (400,), "values": (400,), "advantages": (400,),
        "returns": (400,),
    }  # fmt: skip
    returns = played["returns"].view(200, 2)
    for game in range(2):
        ended = (~returns[:, game].isnan()).nonzero().flatten()
        lengths = torch.diff(ended, prepend=torch.tensor([-1])).float()
        assert len(ended) > 0
        torch.testing.assert_close(returns[ended, game], lengths)  # one point per step


@pytest.mark.programs
def test_players_and_trainer_take_turns_for_a_few_updates() -> None:
    assert "mean return" in run(updates=3, games=2, steps=8, passes=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_share_what_was_played() -> None:
    assert "mean return" in run(updates=3, games=2, steps=8, passes=2, devices=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_solves_the_game() -> None:
    printed = run()
    assert re.search(r"^solved: mean return \d+", printed, re.M), printed
