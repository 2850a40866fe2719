"""Rounds without a model: scripted arms over scripted text, with a clock of their own.

Text has regimes; in each, every arm has a true acceptance length, around which a round draws one.
Costs follow a true table; the router's own table may start wrong and sees the times with noise, as
in the engine. What a run achieved is counted in expectation over draws and noise, so that a ratio
shows the choices alone and not the luck of the draw.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.routing.base import NONE, Router
from whiflash_agents.engine.routing.signals import Signals
from whiflash_agents.engine.telemetry import RoundRecord


@dataclass(frozen=True)
class ScriptedArm:
    """Milliseconds: `fixed` per call, `each` per further sequence in it. A draft has `nodes`
    tokens, of which at most `depth` can be accepted."""

    fixed: float
    each: float = 0.0
    nodes: int = 8
    depth: int = 8
    network: str | None = None


@dataclass
class Workload:
    """What is drafted, and what it costs.

    Attributes:
        arms: by name.
        regimes: per regime, each arm's true acceptance length.
        texts: per sequence, its segments: (regime, tokens), over and over.
        verify: milliseconds over tokens in the forward, by points.
        catch_up: per network, milliseconds per call and per row.
        max_backlog: rows behind at which a network catches up whether chosen or not.
        entropy: per regime, nats, around which a round's entropy lies; empty: no signals.
        evidence: of arms that have some, by regime.
        overhead: milliseconds of a step that no cost knows.
        wrong: factor by which the router's table is off at first, per kind of cost or arm.
        slowed: from half of the steps on, factors on arms' draft times.
        chains: whether the first draft that fails ends a round, one chance for each (acceptance
            then varies as much as it is long); else every draft has its chance.
        lifetime: tokens after which a sequence ends and another takes its place.
    """

    name: str
    arms: Mapping[str, ScriptedArm]
    regimes: Mapping[str, Mapping[str, float]]
    texts: Sequence[Sequence[tuple[str, float]]]
    verify: Mapping[int, float] = field(default_factory=lambda: {1: 20.0, 64: 24.0, 512: 60.0})
    catch_up: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    max_backlog: int = 512
    entropy: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    overhead: float = 1.0
    wrong: Mapping[str, float] = field(default_factory=dict)
    slowed: Mapping[str, float] = field(default_factory=dict)
    chains: bool = False
    lifetime: float = math.inf
    steps: int = 4500

    def costs(self, late: bool = False) -> CostTable:
        """The truth, in seconds, before or after what is slowed has become slow."""
        most = len(self.texts)
        draft = {}
        for name, arm in self.arms.items():
            factor = self.slowed.get(name, 1.0) if late else 1.0
            counts = list(range(1, most + 1))
            draft[name] = Curve(
                counts, [(arm.fixed + arm.each * (n - 1)) * factor / 1e3 for n in counts]
            )
        return CostTable(
            Curve(list(self.verify), [ms / 1e3 for ms in self.verify.values()]),
            0.0,
            draft,
            {
                name: Curve([1, 1001], [(fixed + each) / 1e3, (fixed + 1001 * each) / 1e3])
                for name, (fixed, each) in self.catch_up.items()
            },
        )

    def believed(self) -> CostModel:
        """What a router starts from."""
        table = self.costs()
        for curve, name in [
            (table.verify, "verify"),
            *((curve, name) for name, curve in table.draft.items()),
        ]:
            factor = self.wrong.get(name, 1.0)
            curve.seconds = [seconds * factor for seconds in curve.seconds]
        return CostModel(table)


@cache
def chance(mean: float, depth: int) -> float:
    """Per token, so that a chain of `depth` has `mean` accepted ones."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(1, depth + 1)) < mean:
            low = middle
        else:
            high = middle
    return low


@dataclass
class _Text:
    """One sequence: where in its segments it is."""

    sequence: Any
    segments: Sequence[tuple[str, float]]
    segment: int = 0
    left: float = 0.0
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def regime(self) -> str:
        return self.segments[self.segment][0]

    def advance(self, tokens: int) -> None:
        self.sequence.tokens = range(len(self.sequence.tokens) + tokens)
        self.left -= tokens
        while self.left <= 0:
            self.segment = (self.segment + 1) % len(self.segments)
            self.left += self.segments[self.segment][1]


@dataclass
class Result:
    """Of a run, in expectation. Seconds and tokens.

    Attributes:
        by_state: (late, regimes of all sequences) -> (tokens, seconds).
        arms: rounds per arm.
    """

    by_state: dict[tuple[bool, tuple[str, ...]], tuple[float, float]]
    arms: dict[str, int]
    router: Router

    @property
    def tokens(self) -> float:
        return sum(tokens for tokens, _ in self.by_state.values())

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.by_state.values())

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Simulation:
    """The engine's part: the router's surroundings, and the rounds."""

    def __init__(self, workload: Workload, router: Router, seed: int = 0) -> None:
        self.workload = workload
        self.router = router
        self.costs = workload.believed()
        self._random = random.Random(seed)
        self._texts: dict[str, _Text] = {}
        self._made = 0
        router.bind(self)

    # Surroundings ------------------------------------------------------------------------------

    def available(self, arm: str, sequence: Any) -> bool:
        return True

    def network(self, arm: str) -> str | None:
        return None if arm == NONE else self.workload.arms[arm].network

    def backlog(self, arm: str, sequence: Any) -> int:
        network = self.network(arm)
        if network is None:
            return 0
        return len(sequence.tokens) - self._texts[sequence.id].rows.get(network, 0)

    def evidence(self, arm: str, sequence: Any) -> int | None:
        tell = self.workload.evidence.get(arm)
        return None if tell is None else tell[self._texts[sequence.id].regime]

    # Rounds ------------------------------------------------------------------------------------

    def run(self) -> Result:
        workload = self.workload
        texts = [self._new(segments) for segments in workload.texts]
        result = Result({}, dict.fromkeys((NONE, *workload.arms), 0), self.router)
        truth = workload.costs()
        for step in range(workload.steps):
            late = bool(workload.slowed) and 2 * step >= workload.steps
            if late and 2 * (step - 1) < workload.steps:
                truth = workload.costs(late=True)
            state = late, tuple(text.regime for text in texts)
            tokens, seconds = self._step(texts, truth, result)
            before = result.by_state.get(state, (0.0, 0.0))
            result.by_state[state] = before[0] + tokens, before[1] + seconds
            for i, text in enumerate(texts):
                if len(text.sequence.tokens) > workload.lifetime:
                    self.router.close(text.sequence)
                    del self._texts[text.sequence.id]
                    texts[i] = self._new(text.segments)
        return result

    def _new(self, segments: Sequence[tuple[str, float]]) -> _Text:
        sequence = SimpleNamespace(id=f"s{self._made}", tokens=range(1), signals=None)
        self._made += 1
        text = self._texts[sequence.id] = _Text(sequence, segments, left=segments[0][1])
        self._signal(text)
        return text

    def _signal(self, text: _Text) -> None:
        if self.workload.entropy:
            around = self.workload.entropy[text.regime]
            text.sequence.signals = Signals(around * self._random.lognormvariate(0.0, 0.2), 1.0)

    def _step(
        self, texts: Sequence[_Text], truth: CostTable, result: Result
    ) -> tuple[float, float]:
        """One round of every sequence: expected tokens, and expected seconds."""
        workload, noise, costs = self.workload, self._noise, self.costs
        names = self.router.route([text.sequence for text in texts])
        forward, attended, seconds = 0, 0, workload.overhead / 1e3
        shares: dict[str, tuple[float, float]] = {}
        backlogs = [0] * len(texts)
        for name in dict.fromkeys(names):
            chosen = [i for i, other in enumerate(names) if other == name]
            result.arms[name] += len(chosen)
            forward += len(chosen) * (1 if name == NONE else 1 + workload.arms[name].nodes)
            if name == NONE:
                continue
            network, catching = workload.arms[name].network, 0.0
            if network is not None:
                for i in chosen:
                    backlogs[i] = self.backlog(name, texts[i].sequence)
                    texts[i].rows[network] = len(texts[i].sequence.tokens)
                rows = sum(backlogs[i] for i in chosen)
                if rows:
                    catching = truth.catch_up[network].at(rows)
                    costs.observe_catch_up(network, rows, catching * noise())
            drafting = truth.draft[name].at(len(chosen))
            costs.observe_draft(name, len(chosen), drafting * noise())
            seconds += catching + drafting
            shares[name] = catching / len(chosen), drafting / len(chosen)
        for name, text in zip(names, texts, strict=True):
            nodes = 1 if name == NONE else 1 + workload.arms[name].nodes
            attended += nodes * len(text.sequence.tokens)
        verifying = truth.verify.at(forward)
        costs.observe_verify(forward, attended, verifying * noise())
        seconds += verifying
        together = (verifying + workload.overhead / 1e3) * noise()
        expected, records = 0.0, []
        for i, (name, text) in enumerate(zip(names, texts, strict=True)):
            nodes = 0 if name == NONE else workload.arms[name].nodes
            mean = 0.0 if name == NONE else workload.regimes[text.regime][name] - 1.0
            expected += 1.0 + mean
            accepted = self._accepted(name, mean)
            catching, drafting = shares.get(name, (0.0, 0.0))
            own = (catching + drafting) * noise()
            position = len(text.sequence.tokens)
            records.append(
                RoundRecord(
                    position,
                    name,
                    nodes,
                    accepted,
                    accepted + 1,
                    backlogs[i],
                    catching,
                    drafting,
                    own + together * (nodes + 1) / forward,
                )
            )
            text.advance(accepted + 1)
            seconds += self._bound(text, truth)
            self._signal(text)
        for record, text in zip(records, texts, strict=True):
            self.router.observe(text.sequence, record)
        return expected, seconds

    def _bound(self, text: _Text, truth: CostTable) -> float:
        """Let networks that are too far behind catch up; what it takes."""
        seconds = 0.0
        for network in self.workload.catch_up:
            behind = len(text.sequence.tokens) - text.rows.get(network, 0)
            if behind > self.workload.max_backlog:
                text.rows[network] = len(text.sequence.tokens)
                seconds += truth.catch_up[network].at(behind)
        return seconds

    def _accepted(self, arm: str, mean: float) -> int:
        if mean <= 0.0:
            return 0
        depth = self.workload.arms[arm].depth
        if self.workload.chains:
            p = chance(mean, depth)
            return min(depth, int(math.log(self._random.random()) / math.log(p)))
        p, draw = mean / depth, self._random.random
        return sum(draw() < p for _ in range(depth))

    def _noise(self) -> float:
        return self._random.lognormvariate(0.0, 0.05)


class Policy(Router):
    """One arm, always."""

    name = "policy"

    def __init__(self, arm: str) -> None:
        self.arms = () if arm == NONE else (arm,)
        self._arm = arm

    def route(self, sequences: Sequence[Any]) -> list[str]:
        return [self._arm] * len(sequences)


# The best by brute force ------------------------------------------------------------------------


def step_rate(
    workload: Workload, costs: CostTable, regimes: Sequence[str], arms: Sequence[str]
) -> float:
    """Expected tokens per second of a step; every drafter in use is up to date but for the last
    round's tokens."""
    forward = sum(1 if a == NONE else 1 + workload.arms[a].nodes for a in arms)
    yields = [
        1.0 if a == NONE else workload.regimes[r][a] for r, a in zip(regimes, arms, strict=True)
    ]
    seconds = workload.overhead / 1e3 + costs.verify.at(forward)
    for name in {*arms} - {NONE}:
        seconds += costs.draft[name].at(sum(a == name for a in arms))
        network = workload.arms[name].network
        if network is not None:
            rows = sum(y for y, a in zip(yields, arms, strict=True) if a == name)
            seconds += costs.catch_up[network].at(rows)
    return sum(yields) / seconds


def assignments(workload: Workload, count: int) -> Iterator[tuple[str, ...]]:
    return product((NONE, *workload.arms), repeat=count)


def best_seconds(workload: Workload, result: Result) -> float:
    """What the tokens of a run take under the best assignment in every state, where coming to a
    drafter costs nothing beside what it costs in every round. Networks that are not in use catch
    up when they are too far behind."""
    seconds = 0.0
    for (late, regimes), (tokens, _) in result.by_state.items():
        costs = workload.costs(late)
        best = math.inf
        for arms in assignments(workload, len(regimes)):
            spent = tokens / step_rate(workload, costs, regimes, arms)
            used = {workload.arms[arm].network for arm in arms if arm != NONE}
            for network, curve in costs.catch_up.items():
                if network not in used:
                    spent += tokens / workload.max_backlog * curve.at(workload.max_backlog)
            best = min(best, spent)
        seconds += best
    return seconds


def best_policy(workload: Workload) -> tuple[float, dict[str, str]]:
    """Rate and arms of the best map from regimes to arms for one sequence, with what coming back to
    a drafter costs: two turns of the text, of which the second counts."""
    (segments,) = workload.texts
    costs = workload.costs()
    best: tuple[float, dict[str, str]] = 0.0, {}
    for chosen in assignments(workload, len(workload.regimes)):
        policy = dict(zip(workload.regimes, chosen, strict=True))
        tokens = seconds = position = 0.0
        consumed: dict[str, float] = {}
        for turn in range(2):
            for regime, length in segments:
                arm = policy[regime]
                each = 1.0 if arm == NONE else workload.regimes[regime][arm]
                spent = length / step_rate(workload, costs, [regime], [arm])
                network = None if arm == NONE else workload.arms[arm].network
                if network is not None:
                    behind = position - consumed.get(network, 0.0)
                    curve = costs.catch_up[network]
                    spent += max(0.0, curve.at(behind) - curve.at(each))
                    consumed[network] = position + length - each
                position += length
                for lagging, curve in costs.catch_up.items():
                    while position - consumed.get(lagging, 0.0) > workload.max_backlog:
                        consumed[lagging] = consumed.get(lagging, 0.0) + workload.max_backlog
                        spent += curve.at(workload.max_backlog)
                if turn:
                    tokens += length
                    seconds += spent
        best = max(best, (tokens / seconds, policy), key=lambda found: found[0])
    return best
