"""Drafting a chain from a block that a local head corrects, token by token.

The block was computed in one forward; what is sequential is a tiny network and the choice among the
block's likeliest tokens of each slot. Below those the correction is not looked at: it would have to
lift a token over dozens that the block drafter, which knows the whole text, likes better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ..noise import gumbel
from .candidates import Coupling
from .local_head import LocalHead

_CONSIDERED = 64  # likeliest tokens of a slot; as many as coupling perturbs


@torch.inference_mode()
def draft_chains(
    head: LocalHead,
    table: Tensor,
    bonus: Tensor,
    logits: Tensor,
    depths: Sequence[int],
    positions: Tensor,
    coupling: Coupling,
    target_ids: Callable[[Tensor], Tensor],
    *,
    scored: bool = True,
) -> tuple[list[int], list[float]]:
    """The likeliest token of every slot, given those chosen before; the first slots stay as the
    block has them. Samples are coupled to the target's as in `candidates.rank`.

    Args:
        table: the target's embedding, `[vocab, hidden]`.
        bonus: `[sequences]`, the token before each block.
        logits: `[rows, vocab]` over the drafter's vocabulary; rows of a sequence are its slots.
        depths: rows of each sequence, at least 1.
        positions, coupling: of the rows.
        target_ids: maps draft token ids to target token ids.
        scored: whether scores are wanted.

    Returns:
        tokens and scores of all rows, as `candidates.rank` gives them. A score's normaliser is the
        block drafter's own: the correction moves probability among the tokens it looks at.
    """
    temperatures = torch.where(coupling.temperatures > 0, coupling.temperatures, 1.0)[:, None]
    scaled = logits.float()
    if coupling.sampled:
        scaled = scaled / temperatures
    values, ids = scaled.topk(min(_CONSIDERED, scaled.shape[-1]))
    share = torch.zeros_like(temperatures)
    if scored:
        share = values.logsumexp(-1, keepdim=True) - scaled.logsumexp(-1, keepdim=True)
    known = target_ids(ids)
    noise = None
    if coupling.sampled:
        noise = gumbel(coupling.seeds[:, None], positions[:, None], known).float()
    device, longest = logits.device, max(depths)
    starts = torch.tensor([0, *accumulate(depths)][:-1], device=device)
    last = starts + torch.tensor(depths, device=device) - 1
    state = head.advance(embedding(bonus, table), head.begin(len(depths)))
    tokens, scores = [], []
    for depth in range(longest):
        rows = torch.minimum(starts + depth, last)  # sequences that are done are read past
        value = values[rows]
        if depth:
            value = value + head.correction(state, known[rows]) / temperatures[rows]
        score = value.log_softmax(-1) + share[rows]
        if noise is not None:
            perturbed = (score + noise[rows]).log_softmax(-1)
            score = torch.where(coupling.temperatures[rows, None] > 0, perturbed, score)
        best, at = score.max(-1, keepdim=True)
        token = known[rows].gather(1, at)[:, 0]
        tokens.append(token)
        scores.append(best[:, 0])
        if depth + 1 < longest:
            state = head.advance(embedding(token, table), state)
    block = range(len(depths))
    wanted = [depth * len(depths) + i for i in block for depth in range(depths[i])]
    chosen = torch.cat(tokens)[wanted].tolist()
    # Rounding must not make a child likelier than its parent.
    return chosen, torch.cat(scores)[wanted].clamp(max=0.0).tolist() if scored else []
