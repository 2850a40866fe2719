"""How much may be lost by trying arms that do not look best: a share of all time, and no more.

What rounds take fills an account with that share, and the expected losses of tries empty it. Among
all arms and sequences, the try is made whose arm was idle for longest for what it loses: so every
arm costs about the same, and arms that are nearly as good are tried often, hopeless ones hardly
ever. Free of the account, but counted, is only the first try of each arm in each kind of text.
"""

from __future__ import annotations

from ..errors import SettingsError

Place = tuple[str, int]  # a sequence's id, and the kind of text in its present round


class Exploration:
    """The account, and when each arm was last used.

    Args:
        share: of all time that may be lost.

    Attributes:
        seconds: time that rounds took so far.
        lost: time that tries are expected to have cost.
        tries: rounds that were tries.
        first: of these, first ones of an arm in a kind of text.
        first_lost: what those are expected to have cost.

    Raises:
        SettingsError: a share outside `[0, 1)`.
    """

    def __init__(self, share: float) -> None:
        if not 0.0 <= share < 1.0:
            raise SettingsError(
                f"exploration={share}: expected a share of all time, from 0 to below 1 (0.01: at "
                "most 1 % is lost by trying arms)"
            )
        self.share = share
        self.seconds = 0.0
        self.lost = 0.0
        self.tries = 0
        self.first = 0
        self.first_lost = 0.0
        self._known: set[tuple[str, int]] = set()  # arms and kinds
        self._overall: dict[str, float] = {}  # per arm: `seconds` when it was last used
        self._time: dict[str, dict[int, float]] = {}  # per sequence and kind: seconds in it
        self._used: dict[str, dict[tuple[str, int], float]] = {}

    def unknown(self, arm: str, kind: int) -> bool:
        """Whether the arm was never used in this kind of text."""
        return (arm, kind) not in self._known

    @property
    def account(self) -> float:
        """Seconds that a try may be expected to lose now."""
        return self.share * self.seconds - self.lost + self.first_lost

    def idle(self, arm: str, place: Place) -> float:
        """Seconds since the arm was used: of all, and of those in the place."""
        sequence, kind = place
        local = self._time.get(sequence, {}).get(kind, 0.0)
        local -= self._used.get(sequence, {}).get((arm, kind), 0.0)
        return self.seconds - self._overall.get(arm, 0.0) + local

    def use(self, arm: str, place: Place, loss: float | None = None) -> None:
        """The arm serves a round; `loss` if that is a try: seconds that it is expected to lose."""
        sequence, kind = place
        if loss is not None:
            self.tries += 1
            self.lost += loss
            if self.unknown(arm, kind):
                self.first += 1
                self.first_lost += loss
        self._known.add((arm, kind))
        self._overall[arm] = self.seconds
        here = self._time.get(sequence, {}).get(kind, 0.0)
        self._used.setdefault(sequence, {})[arm, kind] = here

    def spend(self, place: Place, seconds: float) -> None:
        """A round took this long."""
        sequence, kind = place
        self.seconds += seconds
        times = self._time.setdefault(sequence, {})
        times[kind] = times.get(kind, 0.0) + seconds

    def forget(self, sequence: str) -> None:
        """The sequence has ended."""
        self._time.pop(sequence, None)
        self._used.pop(sequence, None)
