"""The cost-aware router: all arms, in tokens per second of the whole step.

For one sequence it is `argmax AL - lambda * (c + s)`: the acceptance length that an arm is expected
to have, less its draft and verify time and its catch-up time at the sequence's present rate. For a
batch the arms of all sequences are chosen together, because a drafter's call is shared by those who
chose it and the forward by all. Times are measured where it runs; drafting nothing is always a
choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingsError
from ..sequence import SequenceState
from ..telemetry import RoundRecord
from .acceptance import AcceptancePredictor, Mean, RecentAcceptance
from .base import NONE, Router, Surroundings
from .exploration import Exploration, Place
from .stays import Stays
from .step import Choices, Step
from .step_parts import predicted_seconds

_VERIFIED = 64.0  # rounds that the mean size of an arm's drafts remembers
_STEPS = 50.0  # steps that the mean overhead remembers
_GUESS_DRAFTED = 16.0  # of an arm that has not drafted yet
_UNIFORM_STARTS = 2  # of assignments of one arm to all, how many are improved upon
_LOOK_AGAIN = 4  # steps after which it is decided anew which try to save for
_LEAST_LOSS = 0.02  # of a sequence's share of a step: what a try is at least taken to lose


@dataclass(slots=True)
class _Route:
    """One sequence's present round, and what outlasts it."""

    stays: Stays = field(default_factory=Stays)
    arm: int = 0
    expected: float = 1.0
    place: Place = ("", 0)
    evidence: list[int] = field(default_factory=list)  # of each arm; -1 if it has none to tell
    length: int = 0
    loss: float | None = None  # seconds that the round is expected to lose, if it is a try


class CostAwareRouter(Router):
    """Maximises expected tokens per second.

    Args:
        arms: the drafters it may choose; `none` is always among its choices.
        predictor: what each arm would yield; without, recent acceptance.
        exploration: share of all time that may be lost by trying arms that do not look best.

    Raises:
        SettingsError: no arms, an arm twice, `none` among them, a share outside `[0, 1)`.
    """

    name = "cost-aware"

    def __init__(
        self,
        arms: Sequence[str],
        predictor: AcceptancePredictor | None = None,
        exploration: float = 0.006,
    ) -> None:
        if isinstance(arms, str) or not arms or len({*arms, NONE}) != len(arms) + 1:
            raise SettingsError(
                f"router 'cost-aware': arms are {arms!r}; expected names of different drafters, "
                "without 'none', which is always a choice"
            )
        self.arms = tuple(arms)
        self._predictor = RecentAcceptance() if predictor is None else predictor
        self.signals = self._predictor.signals
        self._names = (NONE, *self.arms)  # by index
        self._drafted: dict[tuple[int, int], Mean] = {(0, -1): Mean(0.0, 1.0)}  # arm and evidence
        self._exploration = Exploration(exploration)
        self._routes: dict[str, _Route] = {}
        self._overhead = Mean()
        self._step: list[tuple[RoundRecord, int]] = []  # rounds since the last choice, and lengths
        self._rounds = [0] * len(self._names)
        self._steps = 0
        self._saving_for = 0.0
        self._error = 0.0
        self._judged = 0

    def bind(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._predictor.bind(surroundings)
        self._networks = [surroundings.network(arm) for arm in self._names]
        self._lagging = any(network is not None for network in self._networks)

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self._learn_overhead()
        routes = [self._routes.setdefault(s.id, _Route()) for s in sequences]
        predicted = self._predictor.predict(sequences, self._names)
        choices, backlogs = [], []
        for sequence, route, yields in zip(sequences, routes, predicted, strict=True):
            allowed, backlog = self._allowed(sequence, route)
            rows = self._share(route, yields, backlog)
            verified = [
                self._drafts(arm, told).value + 1.0 for arm, told in enumerate(route.evidence)
            ]
            choices.append(Choices(len(sequence.tokens), allowed, yields, rows, verified))
            backlogs.append(backlog)
            route.place = sequence.id, self._predictor.kind(sequence)
        step = Step(
            self._surroundings.costs,
            self._names,
            self._networks,
            max(0.0, self._overhead.value),
            choices,
        )
        rate = self._choose(step, [route.arm for route in routes])
        if self._lagging:
            self._note_stays(step, routes)
        assignment = list(step.assignment)
        found = self._find_try(step, routes, backlogs, rate)
        if found is not None:
            assignment[found[0]] = found[1]
        for index, (route, choice) in enumerate(zip(routes, choices, strict=True)):
            route.arm = assignment[index]
            route.expected = choice.yields[route.arm]
            route.length = choice.length
            route.loss = None if found is None or found[0] != index else found[2]
        return [self._names[arm] for arm in assignment]

    def predicted(self, sequence: SequenceState) -> float | None:
        return self._routes[sequence.id].expected

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        self._predictor.observe(sequence, record)
        route = self._routes.get(sequence.id)
        if route is None or record.drafter not in self._names:
            return
        arm = self._names.index(record.drafter)
        self._rounds[arm] += 1
        self._step.append((record, route.length))
        chosen = arm == route.arm  # else someone else's choice: a guard's, or a drafter's limit
        if arm:
            told = route.evidence[arm]
            self._drafts(arm, told).add_within(record.drafted, _VERIFIED)
            self._exploration.use(record.drafter, route.place, route.loss if chosen else None)
        if chosen:
            self._exploration.spend(route.place, record.round_seconds)
            self._error += abs(route.expected - record.accepted - 1.0)
            self._judged += 1

    def close(self, sequence: SequenceState) -> None:
        self._routes.pop(sequence.id, None)
        self._exploration.forget(sequence.id)
        self._predictor.close(sequence)

    def figures(self) -> dict[str, Any]:
        """Rounds per arm; rounds that were tries, how many of these were an arm's first in a kind
        of text, and the shares of time that all tries and first ones are expected to have cost;
        mean absolute error of predicted acceptance lengths; seconds that a step takes beside its
        known parts."""
        explored = self._exploration
        return {
            "rounds": dict(zip(self._names, self._rounds, strict=True)),
            "explored_rounds": explored.tries,
            "first_tries": explored.first,
            "explored_loss": explored.lost / explored.seconds if explored.seconds else 0.0,
            "first_loss": explored.first_lost / explored.seconds if explored.seconds else 0.0,
            "acceptance_error": self._error / self._judged if self._judged else 0.0,
            "overhead_seconds": max(0.0, self._overhead.value),
        }

    def _drafts(self, arm: int, told: int) -> Mean:
        """Nodes of an arm's drafts with such evidence."""
        mean = self._drafted.get((arm, told))
        if mean is None:
            mean = self._drafted[arm, told] = Mean(_GUESS_DRAFTED, 0.0)
        return mean

    def _allowed(self, sequence: SequenceState, route: _Route) -> tuple[list[int], list[float]]:
        """Arms that have something for the sequence, and each one's backlog."""
        surroundings = self._surroundings
        allowed, backlog = [0], [0.0] * len(self._names)
        route.evidence = [-1] * len(self._names)
        for arm in range(1, len(self._names)):
            name = self._names[arm]
            if surroundings.available(name, sequence):
                told = surroundings.evidence(name, sequence)
                route.evidence[arm] = -1 if told is None else told
                if told == 0:
                    continue  # it would draft nothing
                allowed.append(arm)
                if self._networks[arm] is not None:
                    backlog[arm] = float(surroundings.backlog(name, sequence))
        return allowed, backlog

    def _share(
        self, route: _Route, yields: Sequence[float], backlog: Sequence[float]
    ) -> list[float]:
        """Rows to catch up by that count in this round: what every round of a stay has, and a part
        of what comes before the first."""
        return [
            rows if rows <= usual else usual + (rows - usual) / route.stays.expected(arm)
            for arm, (rows, usual) in enumerate(zip(backlog, yields, strict=True))
        ]

    def _choose(self, step: Step, previous: list[int]) -> float:
        """Leave `step` with the best assignment found from the previous one and from all alike; its
        rate."""
        starts = [
            [a if a in s.allowed else 0 for a, s in zip(arms, step.sequences, strict=True)]
            for arms in (previous, *([arm] * len(previous) for arm in range(len(self._names))))
        ]
        if len(previous) == 1:
            step.place(starts[0])
            return step.ascend()
        # Ascending costs most: only from where a start is new, the better ones first.
        best, best_rate = starts[0], -1.0
        ranked = sorted(starts[1:], key=step.place, reverse=True)
        for start in (starts[0], *ranked[:_UNIFORM_STARTS]):
            step.place(start)
            rate = step.ascend()
            if rate > best_rate * (1.0 + 1e-9):
                best, best_rate = step.assignment, rate
        step.place(best)
        return best_rate

    def _note_stays(self, step: Step, routes: Sequence[_Route]) -> None:
        """Which arm each sequence would have if no drafter had to catch up first."""
        for index, route in enumerate(routes):
            found = step.options(index, step.sequences[index].yields)
            rates = {arm: tokens / max(seconds, 1e-9) for arm, tokens, seconds in found}
            best = max(rates, key=rates.__getitem__)
            route.stays.note(best)

    def _find_try(
        self,
        step: Step,
        routes: Sequence[_Route],
        backlogs: Sequence[Sequence[float]],
        rate: float,
    ) -> tuple[int, int, float] | None:
        """Another arm for one sequence, both by index, and the seconds that its try is expected to
        lose, if that can be paid."""
        exploration = self._exploration
        new = [
            any(exploration.unknown(arm, route.place[1]) for arm in self.arms) for route in routes
        ]
        self._steps += 1
        waiting = exploration.account < self._saving_for and self._steps % _LOOK_AGAIN
        if waiting and not any(new):
            return None
        best, best_priority = None, 0.0
        for index, (route, backlog) in enumerate(zip(routes, backlogs, strict=True)):
            if waiting and not new[index]:
                continue
            present = step.assignment[index]
            found = {arm: rest for arm, *rest in step.options(index, backlog)}
            tokens_now, seconds_now = found[present]
            least = _LEAST_LOSS * seconds_now / len(routes)
            for arm, (tokens, seconds) in found.items():
                if arm in (0, present):
                    continue
                loss = seconds - seconds_now + (tokens_now - tokens) / max(rate, 1e-9)
                loss = max(loss, least)
                name = self._names[arm]
                if new[index] and exploration.unknown(name, route.place[1]):
                    return index, arm, loss
                priority = exploration.idle(name, route.place) / loss
                if priority > best_priority:
                    best, best_priority = (index, arm, loss), priority
        self._saving_for = 0.0 if best is None else best[2]
        return None if best is None or best[2] > exploration.account else best

    def _learn_overhead(self) -> None:
        """What the last step took beyond what its parts are predicted to take."""
        if not self._step:
            return
        seconds = sum(record.round_seconds for record, _ in self._step)
        seconds -= predicted_seconds(self._surroundings, self._step)
        self._overhead.add_within(seconds, _STEPS)
        self._step.clear()
