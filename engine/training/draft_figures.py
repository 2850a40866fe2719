"""What is reported of drafts while a drafter is trained: accuracies, and tokens per round."""

from __future__ import annotations

from torch import Tensor

Figures = dict[str, tuple[float, float]]


def draft_figures(correct: Tensor, drafted: Tensor) -> Figures:
    """Figures as (sum, count): `accuracy@k`, the share of right tokens at depth k whatever came
    before, and `acceptance_length`, tokens that a round would add, its bonus token included.

    On a text that the target wrote greedily the latter is what drafting a chain would accept, over
    rounds that begin at any position alike.

    Args:
        correct: bool `[drafts, depth]`, whether the drafted token is the target's.
        drafted: bool `[drafts, depth]`, where the text still says what is right.
    """
    right = correct & drafted
    sums, counts = right.sum(0).tolist(), drafted.sum(0).tolist()
    figures = {
        f"accuracy@{depth}": (float(total), float(count))
        for depth, (total, count) in enumerate(zip(sums, counts, strict=True), 1)
        if count
    }
    if len(correct):
        accepted = right.long().cumprod(1).sum().item()
        figures["acceptance_length"] = (float(accepted + len(correct)), float(len(correct)))
    return figures
