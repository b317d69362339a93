# SPDX-License-Identifier: Apache-2.0
"""Programs about groups and leases: workers that die, episodes of several turns, images that a group shares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python


def run(*words: str) -> str:
    """Run it with Python and return its output."""
    done = run_python(*words, timeout=280 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_every_prompt_is_trained_once_although_workers_are_killed() -> None:
    printed = run("examples/05_workers_that_die.py")
    found = re.search(r"^(\d+) workers killed; 60 prompts trained, each once: True$", printed, re.M)
    assert found is not None, printed
    assert int(found[1]) > 0
    for prompt in (7, 27, 47):  # their first answer is empty
        assert re.search(rf"^prompt {prompt}: trained in attempt [2-9], .*'the answer was empty'", printed, re.M), (
            printed
        )


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_an_image_in_the_head_is_held_once() -> None:
    held = re.findall(r"(\d+) rows, (\S+) MB held, mean error (\S+)", run("-m", "examples.vision.shared_images"))
    (rows, shared, error), (also, copied, same) = held
    assert rows == also == "128"
    assert error == same
    assert 8 < float(copied) / float(shared) < 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_episodes_of_killed_workers_are_continued(tmp_path: Path) -> None:
    pytest.importorskip("textarena", reason="needs pip install -e '.[examples]'")
    pytest.importorskip("matplotlib", reason="needs pip install -e '.[examples]'")
    printed = run("-m", "examples.agents.train", "--steps=3", "--turns-to-live=100", f"--folder={tmp_path}")
    assert "episodes            192, of" in printed  # 3 steps of 8 groups of 8
    found = re.search(r"workers killed +(\d+); (\d+) episodes were continued", printed)
    assert found is not None, printed
    assert int(found[1]) >= int(found[2]) > 0
    assert (tmp_path / "agents.png").read_bytes().startswith(b"\x89PNG")


def test_a_game_goes_on_from_its_guesses() -> None:
    pytest.importorskip("textarena", reason="needs pip install -e '.[examples]'")
    from examples.agents.game import Episode

    first = Episode(seed=3, guesses=[9, 4])
    second = Episode(seed=3, guesses=[9])
    second.play(4)
    assert first.state.tolist() == second.state.tolist()
    assert (first.turns, first.is_over) == (2, second.is_over)


def test_advantages_compare_whole_episodes_within_their_group() -> None:
    pytest.importorskip("textarena", reason="needs pip install -e '.[examples]'")
    from examples.agents.policy import episode_advantages

    rewards = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.5])  # two turns, one turn; then a group of equal episodes
    found = episode_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 1]))
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, -1.0, 0.0, 0.0]), atol=1e-3, rtol=0.0)
