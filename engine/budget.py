"""How much of the drafts is worth verifying (`method.md`, section 7.2).

A node is worth verifying while its probability of being reached and accepted exceeds what its
verification costs in tokens: the rate at which tokens come now, times the time that one more node
takes. One budget is shared by all sequences of a step: the nodes of all trees are taken likeliest
first, as long as the step's expected tokens per second rise. With one sequence on a machine where
verifying is nearly free that is everything; under load it is nothing.

Drafters' own probabilities are too high or too low by a factor that differs between arms; a running
average of accepted over expected nodes corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .costs import CostModel
from .draft_tree import DraftTree

_MEMORY = 0.02  # weight of the newest round in an arm's correction
_UNSCORED = 0.7  # per token, of a drafter that gives no probabilities, until it is known better


@dataclass(slots=True)
class _Arm:
    """Nodes accepted and expected, discounted."""

    accepted: float = 0.0
    expected: float = 0.0

    @property
    def correction(self) -> float:
        # One node of either kind beforehand, so that the first rounds do not swing it.
        return (self.accepted + 1.0) / (self.expected + 1.0)


class VerifyBudget:
    """Cuts trees to what pays.

    Args:
        costs: what verification takes here.

    Attributes:
        drafted, verified: nodes before and after cutting, so far.
    """

    def __init__(self, costs: CostModel) -> None:
        self.drafted = 0
        self.verified = 0
        self._costs = costs
        self._arms: dict[str, _Arm] = {}
        self._expected: dict[str, float] = {}  # by sequence id, of its last cut

    def cut(
        self,
        trees: Sequence[DraftTree],
        arms: Sequence[str],
        ids: Sequence[str],
        contexts: Sequence[int],
        *,
        spent: float,
        prompt_tokens: int,
    ) -> list[DraftTree]:
        """The trees that are worth verifying in this step.

        Args:
            trees, arms, ids, contexts: per sequence: its draft, who made it, its id, and its
                committed positions.
            spent: seconds of this step that do not depend on what is verified.
            prompt_tokens: tokens of prompts that the same forward computes.
        """
        chances = [self._chances(tree, arm) for tree, arm in zip(trees, arms, strict=True)]
        flat = np.concatenate(chances) if trees else np.empty(0)
        order = np.argsort(-flat, kind="stable")  # parents stand before their children
        base = len(trees) + prompt_tokens
        context = float(np.mean(contexts)) if trees else 0.0
        expected = len(trees) + np.concatenate(([0.0], np.cumsum(flat[order])))
        seconds = np.array(
            [
                spent + self._costs.verify(base + n, (base + n) * context)
                for n in range(len(flat) + 1)
            ]
        )
        # Without known costs everything is verified, as without a budget.
        best = int(np.argmax(expected / seconds)) if seconds.min() > 0 else len(flat)
        kept = np.zeros(len(flat), dtype=bool)
        kept[order[:best]] = True
        cut, at = [], 0
        for index, (tree, chance) in enumerate(zip(trees, chances, strict=True)):
            mine = kept[at : at + len(chance)]
            at += len(chance)
            cut.append(tree if mine.all() else tree.pruned(mine.tolist()))
            self._expected[ids[index]] = float(chance[mine].sum())
        self.drafted += len(flat)
        self.verified += best
        return cut

    def observe(self, sequence_id: str, arm: str, accepted: int) -> None:
        """A round ended: so many drafted nodes of the sequence were accepted."""
        expected = self._expected.pop(sequence_id, 0.0)
        state = self._arms.setdefault(arm, _Arm())
        raw = expected / state.correction
        state.accepted += accepted - _MEMORY * state.accepted
        state.expected += raw - _MEMORY * state.expected

    def _chances(self, tree: DraftTree, arm: str) -> np.ndarray:
        """Per drafted node, its probability of being reached and accepted."""
        correction = self._arms[arm].correction if arm in self._arms else 1.0
        if tree.scores is None:
            depths = np.array(tree.depths[1:], dtype=np.float64)
            raw = _UNSCORED**depths
        else:
            raw = np.exp(np.array(tree.scores[1:], dtype=np.float64))
        return np.minimum(raw * correction, 1.0)
