"""What a round costs here: measured latencies of verification, drafting and catching up.

A table is measured once when an engine starts (`cost_calibration.py`) and is kept true by running
averages: every step's measured time corrects the prediction that it was chosen by. Times are
seconds. A cost is a function of few numbers: verification of how many tokens over how much context,
drafting for how many sequences, catching up by how many rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

_MEMORY = 0.1  # weight of the newest measurement in running averages
_MOST = 20.0  # how far a correction may go: beyond it, a measurement is a hiccup


@dataclass(slots=True)
class Curve:
    """Seconds over a count, linear between the points measured and beyond them. Without points it
    costs nothing, until the first measurement makes one.

    Attributes:
        counts, seconds: the points, counts rising.
    """

    counts: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def at(self, count: float) -> float:
        """Seconds at `count`; nothing costs nothing. Never below what the first point takes, unless
        `count` is 0."""
        if count <= 0 or not self.counts:
            return 0.0
        if len(self.counts) == 1 or count <= self.counts[0]:
            return self.seconds[0]
        right = min(max(bisect_left(self.counts, count), 1), len(self.counts) - 1)
        x0, x1 = self.counts[right - 1], self.counts[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        return y0 + slope * (count - x0)


@dataclass(slots=True)
class CostTable:
    """The measured points.

    Attributes:
        verify: over tokens in one forward, at little context.
        attention: seconds that a token of a forward takes more per position of its context.
        draft: per arm, over sequences in the call.
        catch_up: per drafting network, over rows.
        machine: where it was measured.
    """

    verify: Curve = field(default_factory=Curve)
    attention: float = 0.0
    draft: dict[str, Curve] = field(default_factory=dict)
    catch_up: dict[str, Curve] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> CostTable:
        """The inverse of `as_dict`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        curves = {
            kind: {name: _curve(points) for name, points in dict(tree[kind]).items()}
            for kind in ("draft", "catch_up")
        }
        return cls(
            _curve(tree["verify"]),
            _seconds(tree["attention"]),
            machine=dict(tree["machine"]),
            **curves,
        )


def _curve(tree: Mapping[str, Any]) -> Curve:
    counts, seconds = list(map(index, tree["counts"])), list(map(_seconds, tree["seconds"]))
    if len(counts) != len(seconds) or sorted({c for c in counts if c > 0}) != counts:
        raise ValueError(f"a curve needs rising counts with a time each, found {counts}, {seconds}")
    return Curve(counts, seconds)


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0.0 <= seconds < math.inf:
        raise ValueError(f"a cost must be a number of seconds, found {number!r}")
    return seconds


@dataclass(slots=True)
class Tracked:
    """One kind of cost: what was measured against what was predicted.

    Attributes:
        correction: what predictions are multiplied with, a running average of measured / predicted.
        error: running average of |measured - predicted| / measured, after correction.
        observations: measurements so far.
    """

    correction: float = 1.0
    error: float = 0.0
    observations: int = 0

    def observe(self, uncorrected: float, measured: float) -> None:
        """Take in one measurement of what the table says takes `uncorrected` seconds."""
        if uncorrected <= 0.0 or measured <= 0.0:
            return
        weight = max(_MEMORY, 1.0 / (self.observations + 1))
        off = abs(measured - uncorrected * self.correction) / measured
        self.error += weight * (off - self.error)
        ratio = min(max(measured / uncorrected, 1.0 / _MOST), _MOST)
        # In logarithms: a hiccup of ten times counts as much as one of a tenth.
        log = math.log(self.correction)
        self.correction = math.exp(log + weight * (math.log(ratio) - log))
        self.observations += 1


class CostModel:
    """Predicted seconds of a round's parts, corrected by what rounds really take.

    Args:
        table: where predictions start from.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.tracked: dict[str, Tracked] = {}

    def verify(self, tokens: float, attended: float) -> float:
        """One forward of `tokens`; `attended` is the sum over them of their context lengths."""
        return self._verify(tokens, attended) * self._correction("verify")

    def draft(self, arm: str, sequences: int) -> float:
        """One call of `arm` for that many sequences."""
        return self._draft(arm, sequences) * self._correction(f"draft {arm}")

    def catch_up(self, network: str, rows: float) -> float:
        """Consuming `rows` in one call."""
        return self._catch_up(network, rows) * self._correction(f"catch-up {network}")

    def observe_verify(self, tokens: int, attended: int, seconds: float) -> None:
        if not self.table.verify.counts:
            self.table.verify = Curve([tokens], [seconds])
        self._track("verify").observe(self._verify(tokens, attended), seconds)

    def observe_draft(self, arm: str, sequences: int, seconds: float) -> None:
        curve = self.table.draft.get(arm)
        if curve is None:  # an arm of someone's own: its first call is its table
            self.table.draft[arm] = Curve([1], [seconds / max(1, sequences)])
        self._track(f"draft {arm}").observe(self._draft(arm, sequences), seconds)

    def observe_catch_up(self, network: str, rows: int, seconds: float) -> None:
        if rows and network not in self.table.catch_up:
            self.table.catch_up[network] = Curve([rows], [seconds])
        self._track(f"catch-up {network}").observe(self._catch_up(network, rows), seconds)

    def as_dict(self) -> dict[str, Any]:
        """Corrections and prediction errors, for metrics."""
        return {name: asdict(tracked) for name, tracked in sorted(self.tracked.items())}

    def _verify(self, tokens: float, attended: float) -> float:
        return self.table.verify.at(tokens) + self.table.attention * attended

    def _draft(self, arm: str, sequences: int) -> float:
        curve = self.table.draft.get(arm)
        return 0.0 if curve is None else curve.at(sequences)

    def _catch_up(self, network: str, rows: float) -> float:
        curve = self.table.catch_up.get(network)
        return 0.0 if curve is None else curve.at(rows)

    def _track(self, name: str) -> Tracked:
        return self.tracked.setdefault(name, Tracked())

    def _correction(self, name: str) -> float:
        tracked = self.tracked.get(name)
        return 1.0 if tracked is None else tracked.correction
