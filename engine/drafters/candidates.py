"""Ranking the tokens that a neural drafter thinks of, coupled to the target's own noise.

At temperature 0 tokens are ranked by the drafter's log-probability. At temperature > 0 the target
takes the argmax of its logits plus Gumbel noise that depends on seed, position and token only, so
the drafter adds the same noise to its own logits: where the two models agree, so do their samples
(Daliri, Musco and Suresh, 2024). Noise is computed for the drafter's top tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..noise import fold_seed, gumbel
from ..sequence import SequenceState

_NOISED = 64  # top tokens per row that are perturbed


@dataclass(slots=True)
class Coupling:
    """Temperature and seed of each row to rank, `[rows]` tensors on the drafter's device."""

    temperatures: Tensor
    seeds: Tensor
    sampled: bool

    @classmethod
    def of(cls, sequences: Sequence[SequenceState], device: torch.device) -> Coupling:
        """One row per sequence; `repeat` widens it."""
        temperatures = [s.request.sampling.temperature for s in sequences]
        return cls(
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.tensor([fold_seed(s.seed) for s in sequences], device=device),
            any(temperatures),
        )

    def repeat(self, rows: int) -> Coupling:
        """Every row `rows` times in a row."""
        return Coupling(
            self.temperatures.repeat_interleave(rows),
            self.seeds.repeat_interleave(rows),
            self.sampled,
        )


def rank(
    logits: Tensor,
    count: int,
    positions: Tensor,
    coupling: Coupling,
    target_ids: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row.

    Args:
        logits: `[rows, vocab]` over the drafter's vocabulary.
        positions: `[rows]`, absolute position of the token that each row drafts.
        target_ids: maps draft token ids to target token ids.

    Returns:
        scores `[rows, count]` (float32, falling, at most 0) and target token ids `[rows, count]`.
        A score is the log-probability; in sampled rows, that of being the perturbed argmax's peer:
        the perturbed log-probabilities, normalised over the top tokens.
    """
    temperatures = torch.where(coupling.temperatures > 0, coupling.temperatures, 1.0)
    scaled = logits.float() / temperatures[:, None]
    width = min(logits.shape[-1], max(count, _NOISED) if coupling.sampled else count)
    scores, draft_ids = scaled.topk(width)
    scores = scores - scaled.logsumexp(-1, keepdim=True)
    tokens = target_ids(draft_ids)
    if coupling.sampled:
        noise = gumbel(coupling.seeds[:, None], positions[:, None], tokens)
        perturbed = (scores + noise.float()).log_softmax(-1)
        scores = torch.where(coupling.temperatures[:, None] > 0, perturbed, scores)
        scores, order = scores.topk(count)
        tokens = tokens.gather(-1, order)
    # Rounding must not make a child likelier than its parent.
    return scores.clamp(max=0.0), tokens
