"""Steps 2 to 4 of a round: the router picks, the chosen drafters catch up, and they draft.

One batched call per drafter that was chosen; nothing runs for the others. What a drafter returns is
checked before it is verified, because a tree that breaks its limits would be written into the next
sequence's part of the KV arena.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .budget import VerifyBudget
from .catch_up import CatchUp
from .clock import now
from .costs import CostModel
from .draft_tree import DraftTree
from .drafters.base import Drafter, DraftLimit
from .drafters.context import ContextDrafter, DraftContext, draft_context
from .errors import WhiFlashError
from .routing.base import NONE, Router
from .sequence import SequenceState


@dataclass(slots=True)
class Draft:
    """What was decided for one sequence's round. Times in seconds, this sequence's share."""

    tree: DraftTree
    drafter: str
    backlog: int = 0
    catch_up_seconds: float = 0.0
    draft_seconds: float = 0.0
    predicted: float | None = None


class Drafting:
    """Router and drafters of one engine; the router's surroundings.

    Args:
        drafters: by arm; what the router may choose beside `none`.
        max_nodes: most drafted tokens of a tree.
        budget: cuts drafts to what is worth verifying; None verifies all.
        vocab_size: of the target.
        device: where the drafters compute.

    Attributes:
        costs: kept true by what drafting and catching up really take.
        seconds: time spent so far, with the catching up of drafters that were chosen.
        route_seconds: time spent choosing them.
    """

    def __init__(
        self,
        router: Router,
        drafters: Mapping[str, Drafter],
        catch_up: CatchUp,
        costs: CostModel,
        *,
        max_nodes: int,
        vocab_size: int,
        device: torch.device,
        budget: VerifyBudget | None = None,
    ) -> None:
        self.router = router
        self.drafters = drafters
        self.costs = costs
        self.seconds = 0.0
        self.route_seconds = 0.0
        self._catch_up = catch_up
        self._max_nodes = max_nodes
        self._vocab_size = vocab_size
        self._device = device
        self.budget = budget
        for drafter in drafters.values():
            if isinstance(drafter, ContextDrafter):
                drafter.scores = budget is not None
        router.bind(self)

    # What a router may ask -------------------------------------------------------------------

    def available(self, arm: str, sequence: SequenceState) -> bool:
        if arm == NONE:
            return True
        context = draft_context(self.drafters[arm])
        return context is None or self._catch_up.available(context, sequence)

    def network(self, arm: str) -> str | None:
        context = None if arm == NONE else draft_context(self.drafters[arm])
        return None if context is None else context.name

    def backlog(self, arm: str, sequence: SequenceState) -> int:
        context = None if arm == NONE else draft_context(self.drafters[arm])
        return 0 if context is None else context.backlog(sequence)

    def evidence(self, arm: str, sequence: SequenceState) -> int | None:
        tell = getattr(self.drafters.get(arm), "evidence", None)
        return None if tell is None else tell(sequence)

    # Steps 2 to 4 ----------------------------------------------------------------------------

    def draft(self, decoding: Sequence[SequenceState], *, prompt_tokens: int = 0) -> list[Draft]:
        """A draft for every decoding sequence, in their order; `none` drafts the root alone.

        Args:
            prompt_tokens: tokens of prompts that the same step computes.

        Raises:
            WhiFlashError: a router or drafter of someone's own broke its contract.
        """
        began = time.perf_counter()
        arms = self._route(decoding)
        drafts = [
            Draft(DraftTree(s.tokens[-1]), arm, predicted=self.router.predicted(s))
            for s, arm in zip(decoding, arms, strict=True)
        ]
        self.route_seconds += time.perf_counter() - began
        for name, drafter in self.drafters.items():
            chosen = [i for i, arm in enumerate(arms) if arm == name]
            if not chosen:
                continue
            sequences = [decoding[i] for i in chosen]
            limits = [DraftLimit(s.num_remaining - 1, self._max_nodes) for s in sequences]
            backlogs = [drafter.backlog(s) for s in sequences]
            started = now(self._device)
            context = draft_context(drafter)
            if context is None:
                drafter.catch_up(sequences)
            else:
                self._catch_up.consume(context, sequences)
            caught_up = now(self._device)
            trees = drafter.draft(sequences, limits)
            ended = now(self._device)
            self.seconds += ended - started
            if any(limit.depth > 0 for limit in limits):  # else nothing was drafted
                self._observe(name, context, backlogs, caught_up - started, ended - caught_up)
            for i, tree, backlog in zip(chosen, trees, backlogs, strict=True):
                self._check(name, tree, decoding[i])
                drafts[i].tree = tree
                drafts[i].backlog = backlog
                drafts[i].catch_up_seconds = (caught_up - started) / len(chosen)
                drafts[i].draft_seconds = (ended - caught_up) / len(chosen)
        if self.budget is not None and drafts:
            trees = self.budget.cut(
                [d.tree for d in drafts],
                arms,
                [s.id for s in decoding],
                [s.num_cached for s in decoding],
                spent=time.perf_counter() - began,
                prompt_tokens=prompt_tokens,
            )
            for draft, tree in zip(drafts, trees, strict=True):
                draft.tree = tree
        return drafts

    def _route(self, decoding: Sequence[SequenceState]) -> list[str]:
        arms = self.router.route(decoding) if decoding else []
        if len(arms) != len(decoding) or not all(isinstance(arm, str) for arm in arms):
            raise WhiFlashError(
                f"router {self.router.name!r} returned {arms!r} for {len(decoding)} sequences; "
                "expected the name of one arm for each"
            )
        if strange := set(arms) - self.drafters.keys() - {NONE}:
            raise WhiFlashError(
                f"router {self.router.name!r} chose {', '.join(map(repr, sorted(strange)))}, which "
                f"is not among its arms ({', '.join(self.router.arms)}) nor {NONE!r}"
            )
        # A sequence may have outgrown the network that the router names.
        return [
            arm if self.available(arm, s) else NONE for s, arm in zip(decoding, arms, strict=True)
        ]

    def _observe(
        self,
        arm: str,
        context: DraftContext | None,
        backlogs: Sequence[int],
        catch_up: float,
        draft: float,
    ) -> None:
        """Tell the cost model what a call took; a lookup catches up as it drafts."""
        if context is None:
            draft += catch_up
        elif any(backlogs):
            self.costs.observe_catch_up(context.name, sum(backlogs), catch_up)
        self.costs.observe_draft(arm, len(backlogs), draft)

    def _check(self, drafter: str, tree: DraftTree, sequence: SequenceState) -> None:
        most = self._max_nodes
        if tree.num_drafted > most or max(tree.depths) >= sequence.num_remaining:
            raise WhiFlashError(
                f"drafter {drafter!r} proposed {tree.num_drafted} nodes of depth "
                f"{max(tree.depths)} for request {sequence.id!r}; its limit was {most} nodes of "
                f"depth {sequence.num_remaining - 1}"
            )
        if not 0 <= min(tree.tokens) <= max(tree.tokens) < self._vocab_size:
            raise WhiFlashError(
                f"drafter {drafter!r} proposed tokens {min(tree.tokens)} to {max(tree.tokens)} for "
                f"request {sequence.id!r}; the target's vocabulary has {self._vocab_size}"
            )
        if tree.tokens[0] != sequence.tokens[-1]:
            raise WhiFlashError(
                f"drafter {drafter!r} rooted its tree at token {tree.tokens[0]}, the last token of "
                f"request {sequence.id!r} is {sequence.tokens[-1]}"
            )
