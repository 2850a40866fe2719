"""The `ddtree` drafter: a best-first tree over what one DFlash block says of each position.

Training-free (Ringel and Romano, 2604.12989): the block gives a distribution per position,
independent of one another, so a path's probability is a product, and the most probable paths are
found by a heap. It shares network, context and block forward with `dflash`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ..draft_tree import DraftTree
from ..errors import SettingsError
from ..sequence import SequenceState
from .base import DraftLimit
from .candidates import rank
from .context import ContextDrafter
from .dflash import DFlashContext
from .dflash_model import DFlashModel


@dataclass(frozen=True, slots=True)
class Pick:
    """One node: below node `parent` (-1: the root), `depth` from 1, the `rank`-th token there."""

    parent: int
    depth: int
    rank: int
    score: float


def best_first(scores: Sequence[Sequence[float]], budget: int) -> list[Pick]:
    """The `budget` most probable paths, each as the node at its end, likeliest first.

    A path picks one token per position from the first on; its score is the sum of theirs. With
    scores of at most 0, a path is found before every longer one and every less likely sibling, so
    the heap holds at most two entries per node: O(budget log budget).

    Args:
        scores: per position, log-probabilities of its tokens, falling.
    """
    picks: list[Pick] = []
    if not scores or not scores[0]:
        return picks
    heap: list[tuple[float, int, int, int, float]] = []  # (-score, parent, depth, rank, above)

    def push(parent: int, depth: int, rank: int, above: float) -> None:
        if depth <= len(scores) and rank < len(scores[depth - 1]):
            score = above + scores[depth - 1][rank]
            heapq.heappush(heap, (-score, parent, depth, rank, above))

    push(-1, 1, 0, 0.0)
    while heap and len(picks) < budget:
        negative, parent, depth, rank_, above = heapq.heappop(heap)
        picks.append(Pick(parent, depth, rank_, -negative))
        push(parent, depth, rank_ + 1, above)
        push(len(picks) - 1, depth + 1, 0, -negative)
    return picks


class DDTreeDrafter(ContextDrafter):
    """Best-first trees from a DFlash block.

    Args:
        model: the network, or the context that it shares with `dflash`.
        nodes: node budget of a tree, without the root.

    Raises:
        SettingsError: a budget below 1.
    """

    name = "ddtree"
    context: DFlashContext

    def __init__(self, model: DFlashModel | DFlashContext, *, nodes: int = 32) -> None:
        if not isinstance(nodes, int) or nodes < 1:
            raise SettingsError(f"ddtree: nodes={nodes!r}; expected an integer of at least 1")
        self.context = model if isinstance(model, DFlashContext) else DFlashContext(model)
        self.nodes = nodes

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        most = self.context.model.config.num_drafted
        budgets = [min(self.nodes, limit.nodes) for limit in limits]
        depths = [min(most, limit.depth, n) for limit, n in zip(limits, budgets, strict=True)]
        trees = [DraftTree(s.tokens[-1]) for s in sequences]
        able = [i for i, depth in enumerate(depths) if depth > 0]
        if not able:
            return trees
        block = self.context.block([sequences[i] for i in able], [depths[i] for i in able])
        width = min(self.nodes, block.logits.shape[-1])  # whatever the others in the batch need
        ranked = rank(block.logits, width, block.positions, block.coupling, self.context.target_ids)
        scores, tokens = (part.tolist() for part in ranked)
        at = 0
        for i, depth in zip(able, block.depths, strict=True):
            rows = slice(at, at + depth)
            _grow(trees[i], best_first(scores[rows], budgets[i]), tokens[rows])
            at += depth
        return trees


def _grow(tree: DraftTree, picks: Sequence[Pick], tokens: Sequence[Sequence[int]]) -> None:
    nodes: list[int] = []
    for pick in picks:
        parent = 0 if pick.parent < 0 else nodes[pick.parent]
        nodes.append(tree.add(parent, tokens[pick.depth - 1][pick.rank]))
    tree.scores = [0.0, *(pick.score for pick in picks)]
