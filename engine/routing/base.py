"""`Router`: asked every round which drafter serves each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from ..costs import CostModel
from ..sequence import SequenceState
from ..telemetry import RoundRecord

NONE = "none"  # the arm that drafts nothing: plain decoding
SIGNALS = ("entropy", "hidden")


class Surroundings(Protocol):
    """What a router may ask of its engine."""

    @property
    def costs(self) -> CostModel:
        """What drafting, verifying and catching up take here."""

    def available(self, arm: str, sequence: SequenceState) -> bool:
        """Whether the arm can serve the sequence (`none` always can)."""

    def network(self, arm: str) -> str | None:
        """The drafting network whose context the arm drafts from, if it has one."""

    def backlog(self, arm: str, sequence: SequenceState) -> int:
        """Rows that the arm would have to catch up by; 0 without a network."""

    def evidence(self, arm: str, sequence: SequenceState) -> int | None:
        """Which of a few classes the arm's next draft is in, 0 being no draft; None of an arm that
        does not know before it drafts."""


class Router(ABC):
    """Picks an arm per sequence and round. Subclasses set `name` and `arms` and define `route`.

    Attributes:
        name: as in settings and telemetry.
        arms: the drafters it may choose, `none` aside; the engine opens just these.
        signals: which of `SIGNALS` it wants to find in `SequenceState.signals`; computed only if
            asked for.
    """

    name: str
    arms: tuple[str, ...] = ()
    signals: frozenset[str] = frozenset()

    def bind(self, surroundings: Surroundings) -> None:  # noqa: B027
        """The engine that will ask; called once, before anything else."""

    @abstractmethod
    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        """The arm of each sequence's next round: one of `arms`, or `none`."""

    def predicted(self, sequence: SequenceState) -> float | None:
        """The acceptance length (bonus token included) that it expected of the arm that it just
        chose; None for a router that expects none."""
        return None

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:  # noqa: B027
        """A round of the sequence has ended, as `record` says."""

    def close(self, sequence: SequenceState) -> None:  # noqa: B027
        """The sequence has ended: drop what is kept for it."""

    def figures(self) -> dict[str, Any]:
        """What it did, for the metrics of the engine."""
        return {}
