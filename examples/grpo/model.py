# SPDX-License-Identifier: Apache-2.0
"""The policy: a small decoder-only transformer over characters, with cached sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .vocabulary import EOS, PAD, VOCABULARY_SIZE

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Size of the policy. A checkpoint fits only its own config."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    prompt_width: int = 7
    """Tokens of every prompt, with padding. It is constant, so padding is read like any other token."""
    response_width: int = 4
    """Most tokens of a response, EOS included."""


@dataclass(frozen=True, slots=True)
class Responses:
    """Sampled answers: B prompts with n answers each, answers of one prompt in consecutive rows."""

    tokens: Tensor
    """[B * n, R] int64, PAD after EOS."""
    log_probs: Tensor
    """[B * n, R] float32 under the distribution sampled from; zero after EOS."""
    lengths: Tensor
    """[B * n] int64, EOS included."""


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Read [B, T, W]; with a cache of earlier positions T must be 1."""
        batch, length, width = hidden.shape
        qkv = self.to_qkv(self.norm_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            key, value = torch.cat([cache[0], key], dim=2), torch.cat([cache[1], value], dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        hidden = hidden + self.from_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed(self.norm_feed(hidden)), (key, value)


class Policy(nn.Module):
    """Decoder over fixed-width prompts followed by responses."""

    def __init__(self, config: PolicyConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or PolicyConfig()
        self.token = nn.Embedding(VOCABULARY_SIZE, config.width)
        self.position = nn.Embedding(config.prompt_width + config.response_width, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY_SIZE, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Logits [B, R, V] of each response token, given the prompt [B, P] and the response tokens before it."""
        prompt_width = self._check_prompts(prompts)
        # The prediction after the last response token is not needed.
        hidden, _ = self._read(torch.cat([prompts, responses[:, :-1]], dim=1), start=0, caches=None)
        return self._logits(hidden[:, prompt_width - 1 :])

    def token_log_probs(self, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, R] of the response tokens, and entropy [B, R] of the distributions they came from.

        Positions after EOS are meaningless and must be masked.
        """
        log_probs = torch.log_softmax(self(prompts, responses) / temperature, dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1), entropy

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor,
        *,
        num_answers: int = 1,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Responses:
        """Sample answers to prompts [B, P]; the prompt is read once for all its answers.

        Args:
            temperature: 0 takes the likeliest token; its log-probabilities are those at temperature 1.
            generator: Source of randomness; equal state gives equal answers.
        """
        self._check_prompts(prompts)
        hidden, caches = self._read(prompts, start=0, caches=None)
        logits = self._logits(hidden[:, -1]).repeat_interleave(num_answers, dim=0)
        caches = [(k.repeat_interleave(num_answers, 0), v.repeat_interleave(num_answers, 0)) for k, v in caches]
        running = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        tokens, log_probs = [], []
        for step in range(self.config.response_width):
            token, log_prob = _choose(logits, temperature, generator)
            tokens.append(token.masked_fill(~running, PAD))
            log_probs.append(log_prob.masked_fill(~running, 0.0))
            running = running & (token != EOS)
            if step + 1 < self.config.response_width:
                hidden, caches = self._read(tokens[-1][:, None], self.config.prompt_width + step, caches)
                logits = self._logits(hidden[:, -1])
        stacked = torch.stack(tokens, dim=1)
        return Responses(stacked, torch.stack(log_probs, dim=1), response_mask(stacked).sum(1))

    def _read(self, tokens: Tensor, start: int, caches: list[Cache] | None) -> tuple[Tensor, list[Cache]]:
        hidden = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        grown: list[Cache] = []
        for layer, block in enumerate(self.blocks):
            hidden, cache = block(hidden, caches[layer] if caches is not None else None)
            grown.append(cache)
        return hidden, grown

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _check_prompts(self, prompts: Tensor) -> int:
        if prompts.ndim != 2 or prompts.shape[1] != self.config.prompt_width:
            raise ValueError(
                f"prompts have shape {tuple(prompts.shape)}, the policy reads [B, {self.config.prompt_width}]. "
                "Encode them with encode_prompts and the width of the policy's config."
            )
        return self.config.prompt_width


def response_mask(responses: Tensor) -> Tensor:
    """True for the tokens of responses [B, R] up to and including the first EOS."""
    ends = responses == EOS
    return ends.cumsum(dim=1) - ends.long() == 0


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0.0:
        token = log_probs.argmax(-1)
    else:
        token = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(-1)
    return token, log_probs.gather(-1, token[:, None]).squeeze(-1)
