"""The policy and its task: given four digits, write them backwards. Replace both by your own."""

import torch
from torch import nn

LENGTH = 4  # digits of a prompt, and of an answer


def all_prompts():
    """All prompts, shuffled: the first 200 are for validation, the others for training."""
    prompts = torch.cartesian_prod(*[torch.arange(10)] * LENGTH)
    return prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))]


class Policy(nn.Module):
    """A small causal transformer."""

    def __init__(self, width=32):
        super().__init__()
        self.token, self.position = nn.Embedding(10, width), nn.Embedding(2 * LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens):
        """Log-probabilities of the digit after each of these."""
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(hidden, mask=mask, is_causal=True)).log_softmax(-1)

    @torch.no_grad()
    def answer(self, prompts, greedy=False):
        """One answer per prompt, sampled or the likeliest, and the log-probability of each of its digits."""
        tokens, log_probs = prompts, []
        for _ in range(LENGTH):
            likely = self(tokens)[:, -1]
            digit = likely.argmax(-1, keepdim=True) if greedy else torch.multinomial(likely.exp(), 1)
            tokens = torch.cat([tokens, digit], dim=1)
            log_probs.append(likely.gather(1, digit))
        return tokens[:, LENGTH:], torch.cat(log_probs, dim=1)
