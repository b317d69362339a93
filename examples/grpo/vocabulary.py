# SPDX-License-Identifier: Apache-2.0
"""The character vocabulary: one token per character of an arithmetic task, the same for every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = "0123456789+-="
VOCABULARY_SIZE = 3 + len(CHARACTERS)

_TOKEN_OF = {character: 3 + position for position, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """Turn text into token ids, without BOS or EOS."""
    unknown = sorted(set(text) - set(CHARACTERS))
    if unknown:
        raise ValueError(f"text {text!r} holds {unknown}, which have no token. Use only the characters {CHARACTERS!r}.")
    return [_TOKEN_OF[character] for character in text]


def decode(tokens: Sequence[int] | Tensor) -> str:
    """Turn token ids into text, up to the first EOS and without PAD and BOS."""
    values: list[int] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    end = values.index(EOS) if EOS in values else len(values)
    return "".join(CHARACTERS[token - 3] for token in values[:end] if token > EOS)


def encode_prompts(texts: Sequence[str], width: int) -> Tensor:
    """Encode prompts as [B, width] int64: PAD on the left, then BOS and the characters.

    The width is a constant of the model, so each prompt has exactly one encoding.
    """
    return torch.tensor([_fixed_width([BOS, *encode(text)], width, text, left=True) for text in texts]).view(-1, width)


def encode_responses(texts: Sequence[str], width: int) -> Tensor:
    """Encode responses as [B, width] int64: the characters, EOS, then PAD on the right."""
    return torch.tensor([_fixed_width([*encode(text), EOS], width, text, left=False) for text in texts]).view(-1, width)


def _fixed_width(tokens: list[int], width: int, text: str, *, left: bool) -> list[int]:
    if len(tokens) > width:
        raise ValueError(
            f"text {text!r} takes {len(tokens)} tokens, the width is {width}. Widen it or shorten the text."
        )
    padding = [PAD] * (width - len(tokens))
    return padding + tokens if left else tokens + padding
