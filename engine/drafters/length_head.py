"""AdaFlash's adaptive length head (2607.19223): how much of a block will be accepted.

A small network over the block's last hidden states, their mean and the last one, predicts the share
of the block, its bonus token included, that the target will agree with. It truncates what is
verified, never the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

# Drafted tokens verified beyond the predicted ones in a plain cut: a prediction is a mean, and half
# of the blocks are better than that.
_SPARE = 1
_SHARPEST = 6.0  # log2 of how far a prediction may raise or lower a drafter's probabilities


class LengthHead(nn.Module):
    """The network, with the names of AdaFlash's tensors.

    Args:
        hidden_size: of the drafter.
        bottleneck: its inner width.
    """

    def __init__(self, hidden_size: int, bottleneck: int = 256) -> None:
        super().__init__()
        self.down = nn.Linear(2 * hidden_size, bottleneck)
        self.res = nn.Sequential(nn.Linear(bottleneck, bottleneck), nn.SiLU())
        self.out = nn.Linear(bottleneck, 1)

    def forward(self, slots: Tensor) -> Tensor:
        """The final norm's output at all slots, `[blocks, block_size, hidden]` -> the logit of the
        share, `[blocks]`."""
        pooled = torch.cat((slots.mean(1), slots[:, -1]), -1)
        hidden = silu(self.down(pooled.to(self.down.weight.dtype)))
        logits: Tensor = self.out(hidden + self.res(hidden))
        return logits[:, 0]


def share_of(accepted: Tensor, num_drafted: int) -> Tensor:
    """What the head is to say where `accepted` drafted tokens of `num_drafted` are right."""
    return (accepted + 1) / (num_drafted + 1)


def predicted(logits: Tensor, num_drafted: int) -> Tensor:
    """Drafted tokens that will be accepted, by the head's output: float32, from 0 to
    `num_drafted`."""
    return (logits.float().sigmoid() * (num_drafted + 1) - 1).clamp(0.0, float(num_drafted))


def worth_verifying(accepted: float) -> int:
    """How deep to verify where so many drafted tokens are predicted to be accepted."""
    return math.ceil(accepted) + _SPARE


def adjusted(scores: Sequence[float], accepted: float) -> list[float]:
    """A chain's scores, such that as many of its tokens are expected to be accepted as predicted.

    Log-probabilities are scaled by one factor: order and bounds stay, and what was certain stays
    certain.

    Args:
        scores: per drafted token, the log-probability that it is reached and accepted; falling.
        accepted: predicted.
    """
    low, high = -_SHARPEST, _SHARPEST
    wanted = min(accepted, float(len(scores)))
    for _ in range(24):
        middle = (low + high) / 2
        if sum(math.exp(score * 2.0**middle) for score in scores) > wanted:
            low = middle
        else:
            high = middle
    return [score * 2.0**high for score in scores]
