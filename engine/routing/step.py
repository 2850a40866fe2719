"""The expected rate of a step, in tokens per second, under any assignment of arms to sequences.

A step verifies all drafts in one forward, and calls each arm once for all sequences that chose it,
so what a choice costs depends on the others' choices. Plain floats: this is asked every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..costs import CostModel


@dataclass(slots=True)
class Choices:
    """What one sequence may choose from; lists are over the step's arms.

    Attributes:
        length: tokens of its context.
        allowed: arms that can serve it, by index.
        yields: tokens that each is expected to make.
        rows: rows that its network has to catch up by in this round.
        verified: tokens that each has verified, the root included.
    """

    length: int
    allowed: list[int]
    yields: list[float]
    rows: list[float]
    verified: list[float]


class Step:
    """One step's costs.

    Args:
        arms: by index; `networks` are theirs, or None.
        overhead: seconds that a step takes beside drafting, catching up and verifying.

    Attributes:
        assignment: the arm of each sequence, by index, once `place` was called.
    """

    def __init__(
        self,
        costs: CostModel,
        arms: Sequence[str],
        networks: Sequence[str | None],
        overhead: float,
        sequences: Sequence[Choices],
    ) -> None:
        self.sequences = sequences
        self._costs = costs
        self._arms = arms
        self._networks = networks
        self._overhead = overhead
        # Verification is linear in what is attended to.
        base = costs.verify(1, 0)
        self._attention = (costs.verify(1, 1e6) - base) * 1e-6
        self._forward: dict[int, float] = {1: base}
        self._draft: dict[tuple[int, int], float] = {}
        self._catch_up: dict[tuple[int, int], float] = {}

    def place(self, assignment: Sequence[int]) -> float:
        """Give each sequence its arm, by index; the rate."""
        self.assignment = list(assignment)
        self._tokens = self._attended = self._yields = 0.0
        self._counts = [0] * len(self._arms)
        self._rows = [0.0] * len(self._arms)
        for choices, arm in zip(self.sequences, assignment, strict=True):
            verified = choices.verified[arm]
            self._tokens += verified
            self._attended += verified * choices.length
            self._yields += choices.yields[arm]
            self._counts[arm] += 1
            self._rows[arm] += choices.rows[arm]
        self._parts = [
            self._arm_seconds(a, self._counts[a], self._rows[a]) for a in range(len(self._arms))
        ]
        return self._yields / max(self._seconds(), 1e-9)

    def ascend(self) -> float:
        """Change one sequence's arm after another's to the best, until none changes; the rate. For
        one sequence, this is exact."""
        rate = 0.0
        unchanged = -1  # in a row; after a change, the others must follow once
        # Rates only rise, so this ends; the bound is for those that differ by rounding alone.
        for turn in range(8 * len(self.sequences)):
            index = turn % len(self.sequences)
            present = self.assignment[index]
            best, rate = present, 0.0
            for arm, tokens, seconds in self.options(index):
                made = tokens / max(seconds, 1e-9)
                # The present arm wins ties: no change for nothing.
                if made > rate * (1.0 + 1e-9) or (arm == present and made >= rate * (1.0 - 1e-9)):
                    best, rate = arm, made
            if best == present:
                unchanged += 1
            else:
                unchanged = 0
                self._move(index, best)
            if unchanged >= len(self.sequences) - 1:
                break
        return rate

    def options(
        self, index: int, rows: Sequence[float] | None = None
    ) -> list[tuple[int, float, float]]:
        """What the step would yield and take with another arm for one sequence: (arm, tokens,
        seconds) for each that it may choose.

        Args:
            rows: that each arm would have to catch up by, instead of the sequence's own.
        """
        choices, present = self.sequences[index], self.assignment[index]
        own_rows, own_yields, verified = choices.rows, choices.yields, choices.verified
        if rows is None:
            rows = own_rows
        tokens = self._tokens - verified[present]
        attended = self._attended - verified[present] * choices.length
        yields = self._yields - own_yields[present]
        counts, parts, sums = self._counts, self._parts, self._rows
        without = self._arm_seconds(present, counts[present] - 1, sums[present] - own_rows[present])
        fixed = self._overhead + sum(parts) - parts[present] + without
        attention, length = self._attention, choices.length
        found = []
        for arm in choices.allowed:
            if arm == present:
                part = (
                    self._arm_seconds(arm, counts[arm], sums[arm] - own_rows[arm] + rows[arm])
                    - without
                )
            else:
                part = self._arm_seconds(arm, counts[arm] + 1, sums[arm] + rows[arm]) - parts[arm]
            seconds = (
                fixed
                + part
                + self._verify(tokens + verified[arm])
                + attention * (attended + verified[arm] * length)
            )
            found.append((arm, yields + own_yields[arm], seconds))
        return found

    def _move(self, index: int, arm: int) -> None:
        choices, left = self.sequences[index], self.assignment[index]
        self.assignment[index] = arm
        for a, sign in ((left, -1), (arm, 1)):
            self._tokens += sign * choices.verified[a]
            self._attended += sign * choices.verified[a] * choices.length
            self._yields += sign * choices.yields[a]
            self._counts[a] += sign
            self._rows[a] += sign * choices.rows[a]
            self._parts[a] = self._arm_seconds(a, self._counts[a], self._rows[a])

    def _seconds(self) -> float:
        return (
            self._overhead
            + self._verify(self._tokens)
            + self._attention * self._attended
            + sum(self._parts)
        )

    def _verify(self, tokens: float) -> float:
        key = round(tokens)
        seconds = self._forward.get(key)
        if seconds is None:
            seconds = self._forward[key] = self._costs.verify(key, 0)
        return seconds

    def _arm_seconds(self, arm: int, count: int, rows: float) -> float:
        """Drafting for `count` sequences, after catching up by `rows`."""
        if count == 0:
            return 0.0
        seconds = self._draft.get((arm, count))
        if seconds is None:
            seconds = self._costs.draft(self._arms[arm], count)
            self._draft[arm, count] = seconds
        network = self._networks[arm]
        if network is None or rows < 0.5:
            return seconds
        key = arm, round(rows)
        catching = self._catch_up.get(key)
        if catching is None:
            catching = self._catch_up[key] = self._costs.catch_up(network, key[1])
        return seconds + catching
