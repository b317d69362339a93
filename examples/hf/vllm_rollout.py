# SPDX-License-Identifier: Apache-2.0
"""The rollout process with vLLM: python -m examples.hf.grpo --model Qwen/… --rollout examples.hf.vllm_rollout:rollout

It has not been tried: the machines of this project can't run vLLM. Treat it as a sketch of what to connect.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .models import load_tokenizer
from .rollout import Answers, fill


class VllmEngine:
    """vLLM in this process, on one device. It knows the whole weights only, so not those of adapters."""

    def __init__(self, model: str, max_tokens: int) -> None:
        # The engine's model is then in this process, and takes the weights without a copy to another one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(model=model, generation_config="vllm", enable_prefix_caching=False)
        self._max_tokens = max_tokens

    def load(self, state_dict: dict[str, Tensor]) -> None:
        # The names are those of transformers, and vLLM merges and splits them itself.
        self._llm.apply_model(lambda model: model.load_weights(state_dict.items()))

    def answer(self, prompts: list[list[int]], group: int) -> Answers:
        sampling = self._vllm.SamplingParams(n=group, temperature=1.0, max_tokens=self._max_tokens, logprobs=0)
        results = self._llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        outputs = [output for result in results for output in result.outputs]
        tokens = [torch.tensor(output.token_ids) for output in outputs]
        return Answers(tokens, [_log_probs_of(output) for output in outputs])


def _log_probs_of(output: object) -> Tensor:
    chosen = zip(output.token_ids, output.logprobs, strict=True)
    return torch.tensor([by_token[token].logprob for token, by_token in chosen])


def rollout(model: str, lora: bool, prompts: int, group: int, max_tokens: int, worker: int = 0) -> None:
    """Runs in a process of its own, until training ends."""
    if lora:
        raise ValueError("the vLLM rollout takes whole weights, got lora=True. Train without adapters.")
    fill(VllmEngine(model, max_tokens), load_tokenizer(model), prompts, group, worker)
