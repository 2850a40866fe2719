"""What a training loop asks of what it trains: the loss of one text.

Texts are the unit: the loop sums losses and weights over the texts of a batch, so that an objective
never pads, and a batch means the same whatever the lengths of its texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from .texts import TrainingText


@dataclass(slots=True)
class Loss:
    """One text's part in the loss of a batch.

    Attributes:
        total: scalar, differentiable: the weighted sum over the positions of the text.
        weight: what such sums are divided by, once they are summed over a batch.
        figures: to report, name to (sum, count), such as accuracies.
    """

    total: Tensor
    weight: float
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)


class Objective(Protocol):
    """A network and what it is to learn.

    Attributes:
        network: what is trained, its weights in float32.
    """

    network: nn.Module

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss of `text`; whatever is drawn at random is drawn from `generator`."""
