"""What the target's last forward says of a sequence, for routers that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Signals:
    """At the last accepted position, where the bonus token was chosen.

    Attributes:
        entropy: of the next-token distribution before temperature, in nats.
        margin: difference of the two best logits.
        hidden: the vector that entered `lm_head`, `[hidden]`; None unless asked for.
    """

    entropy: float
    margin: float
    hidden: Tensor | None = None


def read_signals(
    logits: Tensor, hidden: Tensor, rows: Sequence[int], *, wanted: frozenset[str]
) -> list[Signals]:
    """Signals of some rows of a forward.

    Args:
        logits: `[rows, vocab]`; hidden: `[rows, hidden]`.
        rows: one per sequence.
        wanted: of `SIGNALS`; entropy and margin come together.
    """
    entropies, margins = [0.0] * len(rows), [0.0] * len(rows)
    if "entropy" in wanted:
        scores = logits[list(rows)].float()
        best = scores.topk(2).values
        # H = log sum exp(z) - sum p z, with the best logit subtracted first: no log of a zero.
        shifted = scores - best[:, :1]
        weights = shifted.exp()
        total = weights.sum(-1)
        entropies = (total.log() - (weights * shifted).sum(-1) / total).tolist()
        margins = (best[:, 0] - best[:, 1]).tolist()
    vectors: list[Tensor | None] = [None] * len(rows)
    if "hidden" in wanted:
        vectors = list(hidden[list(rows)].unbind())
    return [Signals(*parts) for parts in zip(entropies, margins, vectors, strict=True)]
