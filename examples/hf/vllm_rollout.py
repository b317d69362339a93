# SPDX-License-Identifier: Apache-2.0
"""The rollout process with vLLM: python -m examples.hf.grpo --model Qwen/… --rollout examples.hf.vllm_rollout:rollout

It has not been run, because vLLM needs a GPU. Its calls were compared with the source of vLLM 0.33.0.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from .models import TINY, load_tokenizer
from .rollout import Answers, fill


class VllmEngine:
    """vLLM in this process, on one device. It knows the whole weights only, so not those of adapters."""

    def __init__(self, model: str, max_tokens: int) -> None:
        # The engine's model is then in this process, and takes the weights without a copy to another one.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._vllm = _import_vllm()
        # "vllm" ignores the sampling defaults that come with a model, and keeps the tokens that end its answers.
        # Cached prefixes were computed with earlier weights.
        self._llm = self._vllm.LLM(model=model, generation_config="vllm", enable_prefix_caching=False)
        self._max_tokens = max_tokens

    def load(self, state_dict: dict[str, Tensor]) -> None:
        # The names are those of transformers. vLLM merges, splits and lays out the weights as its kernels need them.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": state_dict.items()})

    def answer(self, prompts: list[list[int]], group: int) -> Answers:
        # logprobs=0: those of the sampled tokens only, before any setting of the sampler.
        sampling = self._vllm.SamplingParams(n=group, temperature=1.0, max_tokens=self._max_tokens, logprobs=0)
        results = self._llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        outputs = [output for result in results for output in result.outputs]
        tokens = [torch.tensor(list(output.token_ids)) for output in outputs]
        return Answers(tokens, [_log_probs_of(output) for output in outputs])


def _import_vllm() -> ModuleType:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "this rollout needs vLLM, which can't be imported here: install it in an environment with a GPU, or answer "
            "with model.generate (--rollout examples.hf.rollout:rollout)."
        ) from error
    return vllm


def _log_probs_of(output: object) -> Tensor:
    chosen = zip(output.token_ids, output.logprobs, strict=True)
    return torch.tensor([by_token[token].logprob for token, by_token in chosen])


def rollout(model: str, lora: bool, prompts: int, group: int, max_tokens: int, worker: int = 0) -> None:
    """Runs in a process of its own, until training ends."""
    if lora:
        raise ValueError("the vLLM rollout takes whole weights, got lora=True. Train without adapters.")
    if model == TINY:
        raise ValueError(f"the vLLM rollout takes a model of the hub or a folder, got {model!r}.")
    fill(VllmEngine(model, max_tokens), load_tokenizer(model), prompts, group, worker)
