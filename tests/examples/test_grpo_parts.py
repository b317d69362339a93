# SPDX-License-Identifier: Apache-2.0
"""The learning parts of the GRPO example: vocabulary, tasks, policy, warm-up and loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("reasoning_gym")

from examples.grpo.losses import LossConfig, group_advantages, policy_loss
from examples.grpo.model import Policy, PolicyConfig, response_mask
from examples.grpo.tasks import Difficulty, make_tasks, score, split_of
from examples.grpo.vocabulary import BOS, CHARACTERS, EOS, PAD, decode, encode, encode_prompts, encode_responses
from examples.grpo.warmup import WarmupConfig, accuracy, warm_up

SMALL = PolicyConfig(width=32, layers=2, heads=2)


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(SMALL)


@given(st.text(CHARACTERS))
def test_decode_undoes_encode(text):
    assert decode(encode(text)) == text


def test_prompts_end_at_the_right_edge_and_responses_begin_at_the_left():
    assert encode_prompts(["3+5=", "4="], 6).tolist() == [[PAD, BOS, 6, 13, 8, 15], [PAD, PAD, PAD, BOS, 7, 15]]
    assert encode_responses(["8", "-12"], 4).tolist() == [[11, EOS, PAD, PAD], [14, 4, 5, EOS]]


def test_text_after_the_end_token_is_not_decoded():
    assert decode(torch.tensor([11, EOS, 4, 5])) == "8"


def test_a_character_without_token_or_a_text_over_the_width_is_refused():
    with pytest.raises(ValueError, match=r"'3\*5=' holds \['\*'\]"):
        encode("3*5=")
    with pytest.raises(ValueError, match="'3\\+5=' takes 5 tokens, the width is 4"):
        encode_prompts(["3+5="], 4)


def test_tasks_follow_from_their_arguments_alone():
    assert make_tasks("train", 50, seed=3) == make_tasks("train", 50, seed=3)
    assert make_tasks("train", 50, seed=3) == make_tasks("train", 80, seed=3)[:50]
    assert make_tasks("train", 50, seed=3) != make_tasks("train", 50, seed=4)


def test_no_problem_is_in_both_splits_whatever_the_seed():
    train = {task.prompt for seed in range(3) for task in make_tasks("train", 2000, seed)}
    validation = {task.prompt for seed in range(3) for task in make_tasks("validation", 200, seed)}
    assert not train & validation
    assert {split_of(prompt) for prompt in train} == {"train"}


def test_validation_tasks_are_distinct_and_running_out_of_them_is_an_error():
    assert len({task.prompt for task in make_tasks("validation", 400, seed=0)}) == 400
    with pytest.raises(ValueError, match="401 distinct validation tasks requested"):
        make_tasks("validation", 401, seed=0)


@pytest.mark.parametrize("difficulty", [Difficulty(), Difficulty(terms=2), Difficulty(terms=2, digits=2)])
def test_every_task_fits_the_widths_of_its_difficulty(difficulty):
    tasks = make_tasks("train", 300, seed=1, difficulty=difficulty)
    assert encode_prompts([task.prompt for task in tasks], difficulty.prompt_width)[:, 0].eq(BOS).all()
    assert encode_responses([task.answer for task in tasks], difficulty.response_width).eq(EOS).sum() == 300


def test_the_policy_is_built_for_the_default_difficulty():
    config, difficulty = PolicyConfig(), Difficulty()
    assert (config.prompt_width, config.response_width) == (difficulty.prompt_width, difficulty.response_width)


def test_the_right_answer_scores_one_and_others_less():
    for task in make_tasks("validation", 50, seed=0):
        assert eval(task.prompt[:-1]) == int(task.answer)
        assert score(task.entry, task.answer) == 1.0
        assert score(task.entry, task.answer + "1") < 1.0
        assert score(task.entry, "") == 0.0


def test_sampled_log_probs_are_those_of_a_full_forward(policy):
    prompts = encode_prompts([task.prompt for task in make_tasks("train", 6, seed=0)], 7)
    sampled = policy.generate(prompts, num_answers=5, temperature=0.7, generator=torch.Generator().manual_seed(1))
    mask = response_mask(sampled.tokens)
    log_probs, _ = policy.token_log_probs(prompts.repeat_interleave(5, 0), sampled.tokens, temperature=0.7)
    torch.testing.assert_close(sampled.log_probs, log_probs.detach() * mask)
    assert sampled.lengths.equal(mask.sum(1))
    assert sampled.tokens[~mask].eq(PAD).all()


def test_the_same_generator_state_gives_the_same_answers(policy):
    prompts = encode_prompts(["1+2-3=", "9+9+9="], 7)
    first, second = (
        policy.generate(prompts, num_answers=8, generator=torch.Generator().manual_seed(5)) for _ in range(2)
    )
    assert first.tokens.equal(second.tokens)
    assert first.log_probs.equal(second.log_probs)


def test_greedy_answers_are_the_likeliest_tokens(policy):
    prompts = encode_prompts(["1+2-3=", "9+9+9="], 7)
    answers = policy.generate(prompts, temperature=0.0)
    mask = response_mask(answers.tokens)
    assert policy(prompts, answers.tokens).argmax(-1)[mask].equal(answers.tokens[mask])


def test_prompts_of_another_width_are_refused(policy):
    with pytest.raises(ValueError, match=r"shape \(2, 5\), the policy reads \[B, 7\]"):
        policy.generate(torch.zeros(2, 5, dtype=torch.int64))


def test_response_mask_ends_with_the_first_end_token():
    responses = torch.tensor([[EOS, PAD, PAD], [4, EOS, EOS], [4, 5, 6]])
    assert response_mask(responses).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@given(st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_sum_to_zero_in_every_group(groups):
    advantages = group_advantages(torch.tensor(groups).flatten(), num_answers=4).view(-1, 4)
    assert advantages.sum(1).abs().max() < 1e-4
    assert advantages[torch.tensor([len(set(group)) == 1 for group in groups])].abs().sum() == 0


def test_advantages_are_measured_against_the_own_group_only():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5]), num_answers=2)
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0, -1.0, 1.0]) / 2**0.5
    torch.testing.assert_close(advantages, expected, atol=1e-3, rtol=0.0)


def test_rewards_of_incomplete_groups_are_refused():
    with pytest.raises(ValueError, match="not whole groups of 4 answers"):
        group_advantages(torch.zeros(6), num_answers=4)


def test_the_gradient_raises_good_answers_lowers_bad_ones_and_leaves_padding_alone():
    log_probs = torch.full((3, 2), -1.0, requires_grad=True)
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    loss = policy_loss(
        log_probs, torch.full((3, 2), -1.0), torch.tensor([1.0, -1.0, 0.0]), mask, torch.zeros(3, 2)
    ).loss
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-0.2, 0.0], [0.2, 0.2], [0.0, 0.0]]))


def test_an_answer_that_moved_past_the_bound_gets_no_more_gradient_the_same_way():
    log_probs = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    result = policy_loss(
        log_probs, torch.zeros(4, 1), advantages, torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, 1)
    )
    result.loss.backward()
    assert log_probs.grad.sign().flatten().tolist() == [0.0, 0.0, 1.0, -1.0]
    assert result.metrics["clip_fraction"] == 1.0


def test_padding_with_absurd_log_probs_changes_nothing():
    log_probs, mask = torch.tensor([[-1.0, 300.0]], requires_grad=True), torch.tensor([[True, False]])
    result = policy_loss(log_probs, torch.tensor([[-1.0, -300.0]]), torch.tensor([1.0]), mask, torch.zeros(1, 2))
    result.loss.backward()
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]
    assert result.metrics["ratio"] == 1.0


def test_entropy_weight_rewards_indecision():
    entropy = torch.tensor([[0.5]], requires_grad=True)
    ones = torch.ones(1, 1)
    policy_loss(ones, ones, torch.zeros(1), ones.bool(), entropy, LossConfig(entropy_weight=0.1)).loss.backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([[-0.1]]))


def test_warm_up_with_one_seed_gives_one_policy_and_learns():
    def warmed_up(steps: int) -> Policy:
        torch.manual_seed(0)
        made = Policy(SMALL)
        if steps:
            warm_up(made, seed=0, config=WarmupConfig(steps=steps, batch_size=64, learning_rate=3e-3))
        return made

    first, second = (warmed_up(steps=5).state_dict() for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)
    tasks = make_tasks("train", 100, seed=9)
    assert accuracy(warmed_up(steps=100), tasks) > accuracy(warmed_up(steps=0), tasks)
