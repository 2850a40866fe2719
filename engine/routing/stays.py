"""How long an arm is expected to stay the best one of a sequence, in rounds.

Catching up is paid once when a sequence comes to a drafter and serves all rounds of its stay. So it
counts by its share of the stay that is expected: large backlogs do not hold a sequence off a
drafter for good, and drafters whose turn passes quickly are not called for a few rounds.
"""

from __future__ import annotations

from .acceptance import Mean

_GUESS = 16.0  # rounds, before any stay was seen
_REMEMBERED = 8.0


class Stays:
    """One sequence's: how long each arm was the best, had catching up cost nothing."""

    __slots__ = ("_arm", "_length", "_means")

    def __init__(self) -> None:
        self._arm = -1
        self._length = 0.0
        self._means: dict[int, Mean] = {}

    def note(self, arm: int) -> None:
        """The arm, by index, is the best in this round, had catching up cost nothing."""
        if arm == self._arm:
            self._length += 1.0
            return
        if self._arm >= 0:
            mean = self._means.setdefault(self._arm, Mean(_GUESS, 1.0))
            mean.add_within(self._length, _REMEMBERED)
        self._arm, self._length = arm, 1.0

    def expected(self, arm: int) -> float:
        """Rounds; at least 1. What lasts for long is expected to last as long again."""
        mean = self._means.get(arm)
        rounds = _GUESS if mean is None else mean.value
        return max(rounds, self._length) if arm == self._arm else max(1.0, rounds)
