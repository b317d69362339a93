# SPDX-License-Identifier: Apache-2.0
"""A causal language model and its tokenizer: downloaded, from a folder, or a tiny one that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from .questions import all_texts

TINY = "tiny"
"""Name of a Qwen2 with two layers and random weights, whose tokenizer is trained on the questions."""


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. Equal in every process that loads it.

    Args:
        name: TINY, a model of the Hugging Face hub, or a folder that ``save_pretrained`` wrote.
    """
    if name == TINY:
        return _tiny_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name: str, tokenizer: Any, lora: bool = False) -> Any:
    """A causal language model in float32. Equal in every process that loads it.

    Args:
        name: See ``load_tokenizer``.
        lora: Freeze the weights, and train low-rank adapters of all linear layers instead. Needs peft.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if name == TINY:
        torch.set_num_threads(1)  # more gain nothing here, and the other processes need the cores
        model = _tiny_model(tokenizer)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    own_ends = model.generation_config.eos_token_id
    # The trainer's probabilities are those of plain sampling. A model's own settings, such as top_p, would change them.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id if own_ends is None else own_ends,  # a model may have several
    )
    return _with_lora(model) if lora else model


def token_log_probs(model: Any, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Tensor:
    """Log-probabilities of the tokens of all responses, row after row: [sum of the responses' lengths] float32.

    Args:
        prompts: [P] int64 for each row, of any lengths.
        responses: [R] int64 for each row.
    """
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    tokens = pad_sequence(rows, batch_first=True)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    attended = positions < torch.tensor([len(row) for row in rows], device=tokens.device)[:, None]
    answered = attended & (positions >= torch.tensor([len(row) for row in prompts], device=tokens.device)[:, None])
    logits = model(input_ids=tokens, attention_mask=attended.long()).logits
    # The logits at a position are about the next token.
    return -cross_entropy(logits[:, :-1][answered[:, 1:]].float(), tokens[:, 1:][answered[:, 1:]], reduction="none")


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different lengths as one tensor, as the queue stores them: without padding."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _tiny_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer().train_new_from_iterator(all_texts(), vocab_size=320, show_progress=False)


def _tiny_model(tokenizer: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
