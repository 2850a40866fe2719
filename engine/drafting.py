"""Steps 2 to 4 of a round: the router picks, the chosen drafters catch up, and they draft.

One batched call per drafter that was chosen; nothing runs for the others. What a drafter returns is
checked before it is verified, because a tree that breaks its limits would be written into the next
sequence's part of the KV arena.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .catch_up import CatchUp
from .draft_tree import DraftTree
from .drafters.base import Drafter, DraftLimit
from .drafters.context import draft_context
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


class Drafting:
    """Router and drafters of one engine.

    Args:
        drafters: by arm; what the router may choose beside `none`.
        max_nodes: most drafted tokens of a tree.
        vocab_size: of the target.

    Attributes:
        seconds: time spent so far, with the catching up of drafters that were chosen.
    """

    def __init__(
        self,
        router: Router,
        drafters: Mapping[str, Drafter],
        catch_up: CatchUp,
        *,
        max_nodes: int,
        vocab_size: int,
    ) -> None:
        self.router = router
        self.drafters = drafters
        self.seconds = 0.0
        self._catch_up = catch_up
        self._max_nodes = max_nodes
        self._vocab_size = vocab_size

    def draft(self, decoding: Sequence[SequenceState]) -> list[Draft]:
        """A draft for every decoding sequence, in their order; `none` drafts the root alone.

        Raises:
            WhiFlashError: a router or drafter of someone's own broke its contract.
        """
        arms = self._route(decoding)
        drafts = [Draft(DraftTree(s.tokens[-1]), a) for s, a in zip(decoding, arms, strict=True)]
        for name, drafter in self.drafters.items():
            chosen = [i for i, arm in enumerate(arms) if arm == name]
            if not chosen:
                continue
            sequences = [decoding[i] for i in chosen]
            limits = [DraftLimit(s.num_remaining - 1, self._max_nodes) for s in sequences]
            backlogs = [drafter.backlog(s) for s in sequences]
            started = time.perf_counter()
            context = draft_context(drafter)
            if context is None:
                drafter.catch_up(sequences)
            else:
                self._catch_up.consume(context, sequences)
            caught_up = time.perf_counter()
            trees = drafter.draft(sequences, limits)
            ended = time.perf_counter()
            self.seconds += ended - started
            for i, tree, backlog in zip(chosen, trees, backlogs, strict=True):
                self._check(name, tree, decoding[i])
                drafts[i].tree = tree
                drafts[i].backlog = backlog
                drafts[i].catch_up_seconds = (caught_up - started) / len(chosen)
                drafts[i].draft_seconds = (ended - caught_up) / len(chosen)
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
        return [
            arm if self._serves(arm, s) else NONE for s, arm in zip(decoding, arms, strict=True)
        ]

    def _serves(self, arm: str, sequence: SequenceState) -> bool:
        """Whether the arm can draft for the sequence, which may have outgrown its network."""
        if arm == NONE:
            return True
        context = draft_context(self.drafters[arm])
        return context is None or self._catch_up.available(context, sequence)

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
