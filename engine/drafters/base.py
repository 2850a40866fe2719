"""The `Drafter` protocol: how every drafter, retrieving or neural, meets the drafting loop.

The loop calls a drafter only for the sequences that chose it, once per step: one batched
`catch_up`, then one batched `draft`. Nothing runs for a drafter that was not chosen, so it may lag
behind a sequence by any number of tokens (lazy catch-up, WhiFlash 2606.07710, section 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..draft_tree import DraftTree
from ..sequence import SequenceState


@dataclass(frozen=True, slots=True)
class DraftLimit:
    """What the loop can still verify for one sequence, both without the root."""

    depth: int
    nodes: int


class Drafter(Protocol):
    """Proposes draft trees. State is kept per sequence, from `open` to `close`.

    A drafter that knows before drafting, at next to no cost, how good its draft will be has a
    method `evidence(sequence) -> int`: a class of drafts that fare alike, 0 if it has nothing to
    draft. Routers ask for it (`routing/base.py`).

    A neural drafter also has an attribute `context`, a `DraftContext`: the engine then gives it
    target features and a plane of the KV arena, and keeps its state per sequence.
    """

    name: str

    def open(self, sequence: SequenceState) -> None:
        """A sequence starts: make its state. Must be cheap; work belongs into `catch_up`."""

    def close(self, sequence: SequenceState) -> None:
        """The sequence ended: drop its state (and learn from its output, if that is the idea)."""

    def backlog(self, sequence: SequenceState) -> int:
        """Tokens of the sequence that this drafter has not consumed yet."""

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        """Consume the backlog of each sequence."""

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        """A tree below the last token of each sequence, within its limit (no drafts: root only)."""
