"""The static router: one arm, always. `none` is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from ..sequence import SequenceState
from .base import NONE, Router


class StaticRouter(Router):
    """Every round of every sequence goes to `arm`."""

    def __init__(self, arm: str) -> None:
        self.name = arm
        self.arms: tuple[str, ...] = () if arm == NONE else (arm,)
        self._arm = arm

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [self._arm] * len(sequences)
