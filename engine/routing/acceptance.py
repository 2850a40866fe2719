"""Predicting acceptance lengths, tokens per round with the bonus token: what an arm would yield.

`RecentAcceptance` needs no weights. It keeps discounted means and lets each be drawn towards a
coarser one by how little it has seen: an arm's rounds in this sequence at this entropy, towards its
rounds of all sequences at this entropy, towards all its rounds, towards a hopeful guess.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..sequence import SequenceState
from ..telemetry import RoundRecord
from .base import NONE, Surroundings

HOPE = 4.0  # acceptance length expected of an arm that nobody has tried
_BINS = (0.1, 0.6, 1.8)  # nats, between entropies that are told apart
_MEMORY = 150.0  # rounds of a sequence after which a round counts 1/e
_ALL = 50.0  # rounds of an arm that its means over all sequences remember
_PULL_HOPE, _PULL_ARM = 1.0, 1.0  # rounds that the coarser mean weighs like
_PULL_ALL = (1.5, 8.0)  # likewise, where sequences differ much and where they are alike
_LEAST_SHARE = 0.1  # of a round of a sequence that is known, in the means over all
_TELLING = 8.0  # rounds after which a sequence tells how far it is from others

# A change shows in the mean error of the last rounds: soon where it is large, later where it is
# small. The variance of a running mean of weight w is w / (2 - w) of that of one round.
_WINDOWS = tuple((w, 4.2 * math.sqrt(w / (2.0 - w))) for w in (1.0 / 6.0, 1.0 / 30.0))
_BEFORE_ALARM = 4


class AcceptancePredictor(Protocol):
    """What a router that weighs tokens against time asks about tokens."""

    @property
    def signals(self) -> frozenset[str]:
        """Which signals it reads, where there are some."""

    def bind(self, surroundings: Surroundings) -> None:
        """Whom to ask for the evidence of arms that have some. Without, none has."""

    def predict(self, sequences: Sequence[SequenceState], arms: Sequence[str]) -> list[list[float]]:
        """Acceptance length of each arm in each sequence's next round: `[sequences][arms]`. That of
        `none` is 1."""

    def kind(self, sequence: SequenceState) -> int:
        """Which of a few kinds of text the round is in, over all sequences. A try in one kind says
        little of another."""

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        """A round has ended."""

    def close(self, sequence: SequenceState) -> None:
        """The sequence has ended."""


@dataclass(slots=True)
class Mean:
    """A running mean that knows how much it has seen.

    Attributes:
        value: the mean.
        weight: rounds that it is worth, as of the last one.
        at: when that was.
    """

    value: float = 0.0
    weight: float = 0.0
    at: int = 0

    def add(self, value: float, at: int, memory: float) -> None:
        """Take in a value of time `at`. What is older by `memory` counts 1/e. Only then: a mean
        that nothing is added to stays what it was, as there is nothing better."""
        self.weight = self.weight * math.exp((self.at - at) / memory) + 1.0
        self.value += (value - self.value) / self.weight
        self.at = at

    def add_within(self, value: float, limit: float, share: float = 1.0) -> None:
        """Take in a value that counts like `share` of one; remember about the last `limit`."""
        self.weight = min(self.weight + share, limit)
        self.value += (value - self.value) * share / self.weight

    def towards(self, coarse: float, pull: float) -> float:
        """The mean, drawn towards a coarser estimate that counts like `pull` rounds."""
        return (self.weight * self.value + pull * coarse) / (self.weight + pull)


@dataclass(slots=True)
class _History:
    """One sequence's rounds."""

    means: dict[tuple[str, int], Mean] = field(default_factory=dict)
    rounds: int = 0
    kind: int = 0  # at the last prediction
    evidence: dict[str, int] = field(default_factory=dict)  # likewise, of arms that have some
    arm: str = ""  # of the last round
    errors: list[float] = field(default_factory=lambda: [0.0] * len(_WINDOWS))
    """Running means of realised - predicted while the arm stays."""
    stay: int = 0  # rounds that the arm has

    def place(self, arm: str) -> int:
        """Which of its rounds the arm's present one is like."""
        told = self.evidence.get(arm)
        return self.kind if told is None else len(_BINS) + told


class RecentAcceptance:
    """Acceptance as it lately was, per arm, sequence and, where the router's signals tell it,
    entropy; of arms that know how good their draft will be, by their evidence instead."""

    signals = frozenset({"entropy"})

    def __init__(self) -> None:
        self._arms: dict[str, Mean] = {}
        self._bins: dict[tuple[str, int], Mean] = {}
        self._squares: dict[str, Mean] = {}
        self._apart: dict[str, Mean] = {}  # squared distance of a sequence's mean from others'
        self._pulls: dict[str, float] = {}
        self._sequences: dict[str, _History] = {}
        self._surroundings: Surroundings | None = None

    def bind(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def predict(self, sequences: Sequence[SequenceState], arms: Sequence[str]) -> list[list[float]]:
        return [self._predict(sequence, arms) for sequence in sequences]

    def kind(self, sequence: SequenceState) -> int:
        return _bin(sequence)

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        history = self._history(sequence)
        history.rounds += 1
        arm, realised = record.drafter, record.accepted + 1.0
        if arm == NONE:
            return
        # What the prediction was made from: signals and evidence are the next round's by now.
        key = arm, history.place(arm)
        error = realised - self._expected(arm, history)
        self._watch(history, arm, error)
        mean = history.means.setdefault(key, Mean())
        # The more of a sequence is known, the less one more round of it says about others.
        share = max(_LEAST_SHARE, 1.0 / (1.0 + mean.weight))
        told = mean.weight >= _TELLING
        mean.add(realised, history.rounds, _MEMORY)
        if not told and mean.weight >= _TELLING:
            self._compare(key, mean)
        self._bins.setdefault(key, Mean()).add_within(realised, _ALL, share)
        self._arms.setdefault(arm, Mean()).add_within(realised, _ALL, share)
        self._squares.setdefault(arm, Mean(1.0, 1.0)).add_within(error * error, _ALL)

    def close(self, sequence: SequenceState) -> None:
        self._sequences.pop(sequence.id, None)

    def _predict(self, sequence: SequenceState, arms: Sequence[str]) -> list[float]:
        history = self._history(sequence)
        history.kind = _bin(sequence)
        if (surroundings := self._surroundings) is not None:
            for arm in arms:
                if arm != NONE and (told := surroundings.evidence(arm, sequence)) is not None:
                    history.evidence[arm] = told
        return [1.0 if arm == NONE else self._expected(arm, history) for arm in arms]

    def _expected(self, arm: str, history: _History) -> float:
        if history.evidence.get(arm) == 0:
            return 1.0  # it has nothing to draft
        overall = self._arms.get(arm)
        if overall is None:
            return HOPE
        key = arm, history.place(arm)
        value = overall.towards(HOPE, _PULL_HOPE)
        if (over_bin := self._bins.get(key)) is not None:
            value = over_bin.towards(value, _PULL_ARM)
        if (own := history.means.get(key)) is not None:
            value = own.towards(value, self._pulls.get(arm, _PULL_ALL[0]))
        return value

    def _compare(self, key: tuple[str, int], own: Mean) -> None:
        """How much a sequence's first rounds say of it is a matter of how much sequences differ,
        against how much rounds do."""
        arm = key[0]
        apart = self._apart.setdefault(arm, Mean())
        apart.add_within((own.value - self._bins[key].value) ** 2, 20.0)
        rounds = self._squares[arm].value
        sequences = max(apart.value - rounds / _TELLING, 1e-3)
        self._pulls[arm] = min(max(rounds / sequences, _PULL_ALL[0]), _PULL_ALL[1])

    def _watch(self, history: _History, arm: str, error: float) -> None:
        """When the arm in use no longer yields what it did, the text has changed: what was seen of
        all arms in this sequence counts little from then on."""
        if arm != history.arm:
            history.arm, history.stay = arm, 0
            history.errors = [0.0] * len(_WINDOWS)
        history.stay += 1
        spread = math.sqrt(square.value) if (square := self._squares.get(arm)) else 1.0
        changed = rounds = 0.0
        for i, (weight, alarm) in enumerate(_WINDOWS):
            history.errors[i] += weight * (error - history.errors[i])
            if not changed and abs(history.errors[i]) > alarm * max(spread, 0.3):
                changed, rounds = history.errors[i], 1.0 / weight
        if not changed or history.stay < _BEFORE_ALARM:
            return
        for (name, _), mean in history.means.items():
            if name == arm:
                mean.value = max(1.0, mean.value + changed)
                mean.weight = min(mean.weight, rounds)
            else:
                mean.weight = min(mean.weight, 0.5)
        history.errors, history.stay = [0.0] * len(_WINDOWS), 0

    def _history(self, sequence: SequenceState) -> _History:
        history = self._sequences.get(sequence.id)
        if history is None:
            history = self._sequences[sequence.id] = _History()
        return history


def _bin(sequence: SequenceState) -> int:
    return 0 if sequence.signals is None else bisect(_BINS, sequence.signals.entropy)
