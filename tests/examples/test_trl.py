# SPDX-License-Identifier: Apache-2.0
"""examples/trl_async.py: TRL's own trainer loses nothing when a worker dies, and learns; attention over packed rows."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch

from tests.own_processes import SLOW, own_processes
from tests.warm_python import run_python

pytest.importorskip("trl", reason="needs pip install -e '.[hf]' with Python 3.11 or newer")


def run(**options: int) -> str:
    """Run it and return its output."""
    words = [f"--{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = run_python("-m", "examples.trl_async", *words, env=environment, timeout=580 * SLOW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert own_processes() == []
    return done.stdout


def table(printed: str) -> list[tuple[int, float, int]]:
    """Step, reward and staleness of each line."""
    found = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d+)$", printed, re.M)
    return [(int(step), float(reward), int(staleness)) for step, reward, staleness in found]


@pytest.mark.programs
@pytest.mark.timeout(600)
def test_a_killed_worker_loses_no_prompt_of_trls_trainer() -> None:
    printed = run(steps=6, kill_at=2)
    assert re.search(r"^row/\d+: attempt 2, \[\"worker 'work-0_\S+' died\"\]$", printed, re.M), printed
    assert "56 of 56 prompts read, each once: True" in printed  # 7 batches of 8, of which TRL trains 6
    lines = table(printed)
    assert [step for step, _, _ in lines] == [1, 2, 3, 4, 5, 6]
    assert max(staleness for _, _, staleness in lines) <= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trls_trainer_raises_the_reward() -> None:
    printed = run()
    (_, first, _), *_, (last_step, last, _) = table(printed)
    assert last_step == 50
    assert first < 0.2
    assert last > 0.8


@pytest.mark.programs
@pytest.mark.filterwarnings("default")  # those of trl and transformers are not ours
def test_packed_samples_have_the_log_probs_that_they_have_alone() -> None:
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

    from examples.hf.models import TINY, load_model, load_tokenizer, token_log_probs
    from examples.trl_on_cpu import let_trl_run_on_cpu

    let_trl_run_on_cpu()
    register_tree_attention()
    model = load_model(TINY, load_tokenizer(TINY)).eval()
    samples = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2, 3], [5, 6, 4], [11, 12]]  # a tree with branches, and another root
    expected = token_log_probs(
        model, [torch.tensor(row[:1]) for row in samples], [torch.tensor(row[1:]) for row in samples]
    )

    row = TreeRow()
    for number, tokens in enumerate(samples):
        mask, log_probs = np.array([0] + [1] * (len(tokens) - 1)), np.zeros(len(tokens))
        row.add({
            "input_ids": np.array(tokens), "completion_mask": mask, "old_log_probs": log_probs, "advantage": 0.0,
            "group_id": number,
        })  # fmt: skip
    packed = row.pack()
    assert len(packed["input_ids"]) < sum(map(len, samples))
    model.set_attn_implementation(TREE_ATTENTION)
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    logits = model(
        input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None],
        **{name: packed[name] for name in names}, tree_max_seqlen_q=0, tree_max_seqlen_k=0,
    ).logits  # fmt: skip
    targets = torch.tensor([token for tokens in samples for token in tokens[1:]])
    found = -torch.nn.functional.cross_entropy(logits[0, packed["token_index"]], targets, reduction="none")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
