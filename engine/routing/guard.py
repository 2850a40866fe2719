"""The guard: where a router does worse than the best single arm would, that arm is pinned.

What routed rounds really yield per second is held against what each arm alone would have made of
the same steps, by its own recent rounds and measured costs. An arm is pinned when it would have
been faster by more than chance explains, and released after a while, to see whether the router has
learnt: each time that it has not, the pin holds twice as long. How an arm did where the router
chose it need not be how it does elsewhere, so a pin is a trial first: one that does not beat the
router ends soon, and the next one has to wait, twice as long each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError
from ..sequence import SequenceState
from ..telemetry import RoundRecord
from .acceptance import HOPE, Mean
from .base import NONE, Router, Surroundings
from .exploration import Exploration
from .step_parts import predicted_seconds

_MARGIN = 0.005  # by which a rate must be better, beside what chance explains
_REMEMBERED = 1000.0  # rounds of an arm
_VARIATION = 0.5  # of acceptance lengths, before much is known of it: standard deviation / mean
_SHAPES = 32.0  # steps whose number of sequences and contexts single arms are judged by
_GRACE = 10.0  # steps' worth of time that a router may lose at first, to find out about its arms
_SOON = 4  # steps after which a pin or a release may end
_PINNED_WINDOW = 200.0  # steps over which a pinned arm's rate is taken
_PATIENCE = (64, 1024)  # steps that the next pin waits after one that failed: at first, at most
_PROBES = 0.01  # share of pinned time that may be lost by trying the other arms
_LEAST_LOSS = 0.1  # tokens that a probe is at least taken to lose
_LONGEST = 8  # times the first hold


@dataclass(slots=True)
class _Rate:
    """Tokens per second over recent steps, and how sure that is."""

    steps: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float, window: float) -> None:
        keep = 1.0 - 1.0 / window
        self.steps = self.steps * keep + 1.0
        self.tokens = self.tokens * keep + tokens
        self.squares = self.squares * keep + tokens * tokens
        self.seconds = self.seconds * keep + seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def doubt(self) -> float:
        """Standard deviation of the rate, as a share of it."""
        if self.steps < 2.0 or not self.tokens:
            return 1.0
        mean = self.tokens / self.steps
        variance = max(0.0, self.squares / self.steps - mean * mean)
        return math.sqrt(variance / self.steps) / mean


class _Class:
    """What those of an arm's rounds were like that had the same evidence."""

    __slots__ = ("accepted", "drafted", "square")

    def __init__(self) -> None:
        self.accepted = Mean()
        self.square = Mean()
        self.drafted = Mean()

    def add(self, record: RoundRecord) -> None:
        length = record.accepted + 1.0
        self.accepted.add_within(length, _REMEMBERED)
        self.square.add_within(length * length, _REMEMBERED)
        self.drafted.add_within(record.drafted, _REMEMBERED)

    @property
    def surely(self) -> float:
        """Acceptance length, less one standard deviation of the mean."""
        mean = self.accepted.value
        weight = self.accepted.weight
        guess = (_VARIATION * mean) ** 2  # counts like four rounds: few say little of a variance
        variance = max(0.0, self.square.value - mean * mean)
        variance = (weight * variance + 4.0 * guess) / (weight + 4.0)
        return max(1.0, mean - math.sqrt(variance / weight))


class _Arm:
    """What an arm's rounds would be like if it had all of them.

    A router calls an arm that knows how good its draft will be where that is good. So its own
    rounds count by how often their class of evidence is met in all rounds, and it yields one token
    where it has nothing to draft, or was never seen with such evidence.
    """

    __slots__ = ("_classes", "_met")

    def __init__(self) -> None:
        self._classes: dict[int | None, _Class] = {}
        self._met: dict[int | None, float] = {}

    def add(self, record: RoundRecord, evidence: int | None) -> None:
        """A round that the arm had."""
        self._classes.setdefault(evidence, _Class()).add(record)

    def meet(self, evidence: int | None) -> None:
        """A round that the arm could have had."""
        for known in self._met:
            self._met[known] *= 1.0 - 1.0 / _REMEMBERED
        self._met[evidence] = self._met.get(evidence, 0.0) + 1.0

    @property
    def is_known(self) -> bool:
        return bool(self._classes)

    @property
    def accepted(self) -> float:
        """Acceptance length."""
        return self._mean(lambda rounds: rounds.accepted.value, 1.0)

    @property
    def surely(self) -> float:
        """Acceptance length, less one standard deviation of the mean."""
        return self._mean(lambda rounds: rounds.surely, 1.0)

    @property
    def drafted(self) -> float:
        return self._mean(lambda rounds: rounds.drafted.value, 0.0)

    def _mean(self, of: Callable[[_Class], float], otherwise: float) -> float:
        total = sum(self._met.values())
        if not total:
            return otherwise
        known = self._classes
        return (
            sum(
                count * (of(known[told]) if told in known else otherwise)
                for told, count in self._met.items()
            )
            / total
        )


class Guard(Router):
    """Routes like the router that it watches, as long as that is worth it.

    Args:
        router: what to watch.
        window: steps over which rates are compared.
        hold: steps that the first pin holds.

    Raises:
        SettingsError: a window or hold below 1.
    """

    def __init__(self, router: Router, window: int = 1000, hold: int = 256) -> None:
        for name, value in (("window", window), ("hold", hold)):
            if value < 1:
                raise SettingsError(f"guard: {name}={value}; expected a number of steps, 1 or more")
        self.router = router
        self.name = router.name
        self.arms = router.arms
        self.signals = router.signals
        self._window = float(window)
        self._first_hold = self._hold = hold
        self._known = {arm: _Arm() for arm in self.arms}
        self._told: dict[str, dict[str, int | None]] = {}  # evidence, by sequence and arm
        self._alone = {arm: _Rate() for arm in (NONE, *self.arms)}  # on the same steps
        self._own = _Rate()  # since the last pin or release
        self._routed = 0.0  # rate before the pin
        self._overhead = Mean()
        self._probing = Exploration(_PROBES)
        self._pinned: str | None = None
        self._grace = _GRACE
        self._patience = 0
        self._steps = 0  # since the last pin or release
        self._step: list[tuple[RoundRecord, int]] = []
        self._probe: tuple[str, str, float] | None = None  # sequence, arm, expected loss
        self._pins = 0
        self._rounds_pinned = 0

    def bind(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self.router.bind(surroundings)

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self._settle()
        ask = self._surroundings.evidence
        self._told = {s.id: {arm: ask(arm, s) for arm in self.arms} for s in sequences}
        # Asked in any case: what it learns from a round, it learns for the state that it saw.
        chosen = self.router.route(sequences)
        self._probe = None
        if self._pinned is None:
            return chosen
        self._find_probe(sequences)
        return [self._serving(s) for s in sequences]

    def predicted(self, sequence: SequenceState) -> float | None:
        if self._pinned is None:
            return self.router.predicted(sequence)
        arm = self._serving(sequence)
        if arm == NONE:
            return 1.0
        known = self._known[arm]
        return known.accepted if known.is_known else HOPE

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        self.router.observe(sequence, record)
        told = self._told.get(sequence.id, {})
        for arm, known in self._known.items():
            known.meet(told.get(arm))
            if arm == record.drafter:
                known.add(record, told.get(arm))
        self._step.append((record, len(sequence.tokens)))
        if self._pinned is None:
            return
        self._rounds_pinned += 1
        if self._probe is not None and self._probe[0] == sequence.id:
            self._probing.use(self._probe[1], ("", 0), self._probe[2])
        else:
            self._probing.spend(("", 0), record.round_seconds)

    def close(self, sequence: SequenceState) -> None:
        self.router.close(sequence)

    def figures(self) -> dict[str, Any]:
        """The router's own; how often an arm was pinned, which one is, and the rounds that were;
        tokens per second of what it does now, and by estimate of each arm alone."""
        return self.router.figures() | {
            "guard": {
                "pins": self._pins,
                "pinned": self._pinned,
                "pinned_rounds": self._rounds_pinned,
                "rate": self._own.value,
                "single_arm_rates": {arm: rate.value for arm, rate in self._alone.items()},
            }
        }

    def _serving(self, sequence: SequenceState) -> str:
        arm = self._pinned
        if self._probe is not None and self._probe[0] == sequence.id:
            arm = self._probe[1]
        assert arm is not None
        return arm if self._surroundings.available(arm, sequence) else NONE

    def _settle(self) -> None:
        """Weigh the step that has ended."""
        if not self._step:
            return
        seconds = sum(record.round_seconds for record, _ in self._step)
        tokens = sum(record.accepted + 1.0 for record, _ in self._step)
        left = seconds - predicted_seconds(self._surroundings, self._step)
        self._overhead.add_within(left, 50.0)
        self._own.add(tokens, seconds, self._window if self._pinned is None else _PINNED_WINDOW)
        count = len(self._step)
        length = sum(length for _, length in self._step) / count
        for arm, rate in self._alone.items():
            yields, spent = self._single(arm, count, length)
            if yields:
                rate.add(yields, spent, _SHAPES)
        if self._pinned is None:
            best = max(rate.value for rate in self._alone.values())
            self._grace -= max(0.0, seconds * best / tokens - 1.0)
        self._step.clear()
        self._steps += 1
        if self._steps >= _SOON:
            self._judge()

    def _single(self, arm: str, count: int, length: float) -> tuple[float, float]:
        """Tokens and seconds of a step of `count` sequences that all have the arm; nothing of an
        arm that is not known."""
        costs, overhead = self._surroundings.costs, max(0.0, self._overhead.value)
        if arm == NONE:
            return float(count), overhead + costs.verify(count, count * length)
        known = self._known[arm]
        if not known.is_known:
            return 0.0, 0.0
        verified = count * (known.drafted + 1.0)
        yields = count * known.surely
        seconds = overhead + costs.verify(verified, verified * length) + costs.draft(arm, count)
        network = self._surroundings.network(arm)
        if network is not None:
            seconds += costs.catch_up(network, yields)
        return yields, seconds

    def _judge(self) -> None:
        """Pin, release, or go on."""
        best = max(self._alone, key=lambda arm: self._alone[arm].value)
        own, doubt = self._own.value, self._own.doubt
        # Half of it: the estimate is cautious itself, and a pin is only a trial.
        worth = self._alone[best].value * (1.0 - _MARGIN - doubt / 2.0)
        if self._pinned is None:
            if worth > own and self._steps >= self._patience and self._grace <= 0.0:
                self._routed = own
                self._turn_to(best)
            elif self._steps > 4 * self._hold:  # the router has learnt
                self._hold, self._patience = self._first_hold, 0
        elif own < self._routed * (1.0 - _MARGIN - doubt):
            self._fail()
        elif self._steps >= self._hold:
            if own > self._routed * (1.0 + _MARGIN):
                self._hold = min(2 * self._hold, _LONGEST * self._first_hold)
                self._patience = 0
                self._turn_to(None)
            else:
                self._fail()
        elif best != self._pinned and worth > own:
            self._turn_to(best)

    def _fail(self) -> None:
        """The pinned arm is no better than the router was."""
        least, most = _PATIENCE
        self._patience = min(max(2 * self._patience, least), most)
        self._turn_to(None)

    def _turn_to(self, arm: str | None) -> None:
        self._pins += arm is not None
        self._pinned = arm
        self._steps = 0
        self._own = _Rate()

    def _find_probe(self, sequences: Sequence[SequenceState]) -> None:
        """Try another arm on one sequence, if what that is expected to lose can be paid."""
        rate = self._own.value
        if self._probing.account <= 0.0 or not sequences or not rate:
            return
        sequence = sequences[self._steps % len(sequences)]
        best = 0.0
        for arm in self.arms:
            if arm == self._pinned or not self._surroundings.available(arm, sequence):
                continue
            tokens, seconds = self._difference(arm, len(sequences), len(sequence.tokens))
            loss = max(seconds - tokens / rate, _LEAST_LOSS / rate)
            network = self._surroundings.network(arm)
            if network is not None:
                backlog = self._surroundings.backlog(arm, sequence)
                loss += self._surroundings.costs.catch_up(network, backlog)
            priority = self._probing.idle(arm, ("", 0)) / loss
            if priority > best:
                best, self._probe = priority, (sequence.id, arm, loss)
        if self._probe is not None and self._probe[2] > self._probing.account:
            self._probe = None

    def _difference(self, arm: str, count: int, length: int) -> tuple[float, float]:
        """Tokens and seconds more in a step of `count` sequences if one of them leaves the pinned
        arm for another."""
        costs, pinned = self._surroundings.costs, self._pinned
        assert pinned is not None
        own, other = self._known.get(pinned), self._known[arm]
        before = 1.0 if own is None else own.drafted + 1.0
        after = other.drafted + 1.0
        seconds = costs.draft(arm, 1)
        if own is not None:
            seconds += costs.draft(pinned, count - 1) - costs.draft(pinned, count)
        seconds += costs.verify(before * (count - 1) + after, after * length)
        seconds -= costs.verify(before * count, before * length)
        kept = 1.0 if own is None else own.accepted
        tokens = (other.accepted if other.is_known else HOPE) - kept
        return tokens, seconds
