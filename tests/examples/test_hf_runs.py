# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/hf: a few steps of each, without network; what they learn, as slow tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python

pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")
pytest.importorskip("peft", reason="needs pip install -e '.[hf]'")

from examples.hf.models import TINY, load_model, load_tokenizer


def run(program: str, **options: object) -> str:
    """Run it and return its output."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = run_python("-m", f"examples.hf.{program}", *words, env=environment, timeout=110 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


def change(printed: str, what: str) -> tuple[float, float, int]:
    """First and last value, and the steps between them."""
    match = re.search(rf"^{what} (\S+) -> (\S+) in (\d+) steps$", printed, re.M)
    assert match is not None, printed
    return float(match[1]), float(match[2]), int(match[3])


@pytest.mark.programs
@pytest.mark.filterwarnings("default")  # those of transformers are not ours
def test_fine_tuning_reads_its_stream_to_the_end_and_saves_what_it_trained(tmp_path: Path) -> None:
    printed = run("sft", steps=3, batch_size=8, save=tmp_path)
    assert change(printed, "loss")[2] == 3
    assert printed.count("Which number comes after ") == 3
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.get_vocab() == load_tokenizer(TINY).get_vocab()
    trained, fresh = (load_model(name, tokenizer).state_dict() for name in (str(tmp_path), TINY))
    assert trained.keys() == fresh.keys()
    assert not torch.equal(trained["lm_head.weight"], fresh["lm_head.weight"])


@pytest.mark.programs
def test_grpo_trains_on_answers_of_its_rollout() -> None:
    printed = run("grpo", steps=2, prompts=2, group=4, max_tokens=4)
    assert change(printed, "reward")[2] == 2


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_grpo_trains_adapters_of_a_model_in_a_folder_with_two_rollouts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY)
    tokenizer.save_pretrained(tmp_path)
    load_model(TINY, tokenizer).save_pretrained(tmp_path)
    printed = run("grpo", model=tmp_path, lora="true", steps=2, prompts=2, group=4, max_tokens=4, rollouts=2)
    assert change(printed, "reward")[2] == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_fine_tuning_lowers_the_loss_and_answers_right() -> None:
    printed = run("sft")
    first, last, steps = change(printed, "loss")
    assert steps == 150
    assert first > 5.0
    assert last < 1.0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_grpo_raises_the_reward() -> None:
    first, last, steps = change(run("grpo"), "reward")
    assert steps == 100
    assert first < 0.5
    assert last > 0.9
