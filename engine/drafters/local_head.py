"""A local head: what tends to follow the last few tokens, whatever the text is about.

A block drafter says each slot without knowing which tokens it put into the slots before. A small
recurrent network that reads just these corrects it (DeLS-Spec, 2607.07409, as this project seeds
it): `l_dflash + weight * l_local - unigram_weight * l_unigram`. It is trained alone, on token ids.
This module is arithmetic only; `local_chain.py` drafts with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LocalHeadConfig:
    """Sizes of a local head, and what it counts.

    Attributes:
        hidden_size: width of the target's embedding, which it reads.
        vocab_size: the target's.
        depth: tokens that a block of its drafter proposes; its state was never carried further.
        state_size: of the recurrent network.
        rank: of its head over the vocabulary.
        weight, unigram_weight: of its own logits, and of the tokens' frequencies, in the sum.
    """

    hidden_size: int
    vocab_size: int
    depth: int
    state_size: int = 128
    rank: int = 64
    weight: float = 0.3
    unigram_weight: float = 0.3


class LocalHead(nn.Module):
    """A gated recurrent unit over the tokens of a block, and a low-rank head.

    Its logits are what it has learnt plus the log frequencies, so that it begins by knowing how
    frequent tokens are; with equal weights the correction is what the block's tokens tell beyond
    that.

    Attributes:
        unigram: `[vocab]`, log frequencies of tokens in what the target writes.
    """

    unigram: Tensor

    def __init__(self, config: LocalHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.input = nn.Linear(config.hidden_size, 3 * config.state_size)
        self.recurrent = nn.Linear(config.state_size, 3 * config.state_size)
        self.project = nn.Linear(config.state_size, config.rank, bias=False)
        self.vocabulary = nn.Linear(config.rank, config.vocab_size, bias=False)
        self.register_buffer("unigram", torch.zeros(config.vocab_size))

    def begin(self, rows: int) -> Tensor:
        """The state of blocks that nothing was read of, `[rows, state]`."""
        return self.recurrent.weight.new_zeros(rows, self.config.state_size)

    def advance(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Read one more token per row: `[rows, hidden]` of the target's embedding."""
        return self._step(self._gates(embedded), state)

    def forward(self, embedded: Tensor) -> Tensor:
        """Read blocks: `[blocks, tokens, hidden]` of the target's embedding -> the state behind
        each token, `[blocks, tokens, state]`. Differentiable."""
        state, states = self.begin(len(embedded)), []
        for gates in self._gates(embedded).unbind(1):
            state = self._step(gates, state)
            states.append(state)
        return torch.stack(states, 1)

    def logits(self, projected: Tensor) -> Tensor:
        """From `project`'s output `[rows, rank]` to logits `[rows, vocab]`."""
        return self.vocabulary(projected) + self.unigram

    def correction(self, state: Tensor, tokens: Tensor) -> Tensor:
        """What is added to the block drafter's logits of `tokens` `[rows, count]`; float32."""
        config = self.config
        rows = self.vocabulary.weight[tokens].float()  # [rows, count, rank]
        learnt = (rows @ self.project(state).float()[:, :, None])[:, :, 0]
        frequency = self.unigram[tokens].float()
        return config.weight * learnt + (config.weight - config.unigram_weight) * frequency

    def _gates(self, embedded: Tensor) -> Tensor:
        # Embeddings of some targets are tiny, of others not: only their direction is read.
        x = rms_norm(embedded, embedded.shape[-1:], eps=_EPS)
        gates: Tensor = self.input(x.to(self.input.weight.dtype))
        return gates

    def _step(self, gates: Tensor, state: Tensor) -> Tensor:
        reset, update, new = gates.chunk(3, -1)
        own_reset, own_update, own_new = self.recurrent(state).chunk(3, -1)
        update = (update + own_update).sigmoid()
        new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
        return new + update * (state - new)
