# SPDX-License-Identifier: Apache-2.0
"""Parts of examples/hf: probabilities without padding's influence, answers that end, rewards, adapters."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs pip install -e '.[hf]'")

from examples.hf import vllm_rollout
from examples.hf.models import TINY, load_model, load_tokenizer, token_log_probs
from examples.hf.questions import encode_question, make_questions, reward_of
from examples.hf.rollout import GenerateEngine

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return load_model(TINY, tokenizer).eval()


def test_a_batch_has_the_log_probs_of_each_of_its_rows_alone(model: Any) -> None:
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9]), torch.tensor([3, 4, 5, 6, 8])]
    responses = [torch.tensor([4, 1]), torch.tensor([8, 9, 10]), torch.tensor([1])]
    together = token_log_probs(model, prompts, responses)
    alone = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])
        alone.append(chosen.squeeze(1))
    torch.testing.assert_close(together, torch.cat(alone))


def test_answers_end_with_the_first_end_and_have_the_probabilities_they_were_sampled_with(
    model: Any, tokenizer: Any
) -> None:
    engine = GenerateEngine(TINY, lora=False, max_tokens=6)
    end = tokenizer.eos_token_id
    biased = {name: value.clone() for name, value in model.state_dict().items()}
    biased["model.embed_tokens.weight"][end] = biased["model.embed_tokens.weight"].mean(0) + 0.05  # ends more often
    biased["lm_head.weight"] = biased["model.embed_tokens.weight"]
    engine.load(biased)
    model.load_state_dict(biased)
    prompts = [encode_question(tokenizer, question) for question, _ in make_questions(4, random.Random(0))]
    prompts[1] = prompts[1][:3]  # of another length
    torch.manual_seed(0)
    answers = engine.answer(prompts, group=16)
    assert len(answers.tokens) == len(answers.log_probs) == 64
    assert all(1 <= len(row) <= 6 and end not in row[:-1].tolist() for row in answers.tokens)
    assert all(row[-1] == end for row in answers.tokens if len(row) < 6)
    repeated = [torch.tensor(tokens) for tokens in prompts for _ in range(16)]
    with torch.no_grad():
        expected = token_log_probs(model, repeated, answers.tokens)
    torch.testing.assert_close(torch.cat(answers.log_probs), expected)


def test_every_process_loads_the_same_model(tokenizer: Any) -> None:
    pytest.importorskip("peft")
    first, second = (load_model(TINY, tokenizer, lora=True).state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_adapters_train_with_lora(tokenizer: Any) -> None:
    pytest.importorskip("peft")
    named = load_model(TINY, tokenizer, lora=True).named_parameters()
    trained = [name for name, parameter in named if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_the_tokenizer_reads_what_it_writes(tokenizer: Any) -> None:
    text = "Which number comes after 41?\n42 Ω"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_chat_template_gets_the_question_as_a_message() -> None:
    class WithTemplate:
        chat_template = "..."

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return f"<{messages[0]['role']}>{messages[0]['content']}"

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

    tokens = encode_question(WithTemplate(), "Which number comes after 1?")
    assert bytes(tokens) == b"<user>Which number comes after 1? Answer with the number only."


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), (" 42 ", 1.0), ("it is 42", 0.25), ("", 0.0), ("²", 0.0)])
def test_the_reward_is_the_share_of_digits(answer: str, reward: float) -> None:
    assert reward_of(answer) == reward


@pytest.mark.parametrize(
    ("model", "lora", "said"), [(TINY, True, "whole weights"), (TINY, False, "of the hub or a folder, got 'tiny'")]
)
def test_the_vllm_rollout_refuses_what_vllm_can_not_load(model: str, lora: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vllm_rollout.rollout(model, lora=lora, prompts=1, group=2, max_tokens=2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_the_vllm_rollout_says_that_vllm_is_missing() -> None:
    with pytest.raises(ImportError, match="needs vLLM, which can't be imported here"):
        vllm_rollout.rollout("some/model", lora=False, prompts=1, group=2, max_tokens=2)


def test_the_log_probs_of_an_answer_of_vllm_are_those_of_its_tokens() -> None:
    output = SimpleNamespace(  # of vLLM: by position, the sampled token and maybe likelier ones
        token_ids=[7, 3],
        logprobs=[
            {7: SimpleNamespace(logprob=-0.5)},
            {9: SimpleNamespace(logprob=-0.1), 3: SimpleNamespace(logprob=-2.0)},
        ],
    )
    assert vllm_rollout._log_probs_of(output).tolist() == [-0.5, -2.0]
