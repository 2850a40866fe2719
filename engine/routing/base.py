"""The `Router` protocol: asked every round which drafter serves each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..sequence import SequenceState

NONE = "none"  # the arm that drafts nothing: plain decoding


class Router(Protocol):
    """Picks an arm per sequence and round.

    Attributes:
        name: as in settings and telemetry.
        arms: the drafters it may choose, `none` aside; the engine opens just these.
    """

    name: str
    arms: tuple[str, ...]

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        """The arm of each sequence's next round: one of `arms`, or `none`."""
