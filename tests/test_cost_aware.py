"""The cost-aware router against the best policy that brute force finds, on scripted workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from routing_simulation import (
    Policy,
    Result,
    Simulation,
    Workload,
    assignments,
    best_policy,
    best_seconds,
    step_rate,
)
from routing_workloads import (
    CPU,
    FOUR,
    GPU,
    JSON,
    LAGGING,
    NOISE,
    PROSE,
    STATIONARY,
    WORKLOADS,
)

from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.routing.acceptance import HOPE, RecentAcceptance
from whiflash_agents.engine.routing.base import NONE
from whiflash_agents.engine.routing.cost_aware import CostAwareRouter
from whiflash_agents.engine.routing.exploration import Exploration
from whiflash_agents.engine.routing.signals import Signals
from whiflash_agents.engine.routing.stays import Stays
from whiflash_agents.engine.routing.step import Choices, Step
from whiflash_agents.engine.telemetry import RoundRecord

NAMES = [workload.name for workload in WORKLOADS]


def named(name: str) -> Workload:
    return WORKLOADS[NAMES.index(name)]


@dataclass
class Run:
    """A workload under the cost-aware router, as it comes."""

    result: Result
    router: CostAwareRouter
    simulation: Simulation
    chosen: list[str] = field(default_factory=list)  # in order
    lost: list[tuple[float, float]] = field(default_factory=list)  # by tries, of how much time


@cache
def run(name: str) -> Run:
    workload = named(name)
    router = CostAwareRouter(tuple(workload.arms))
    simulation = Simulation(workload, router)
    done = Run(Result({}, {}, router), router, simulation)
    observe = router.observe

    def watched(sequence: Any, record: RoundRecord) -> None:
        observe(sequence, record)
        done.chosen.append(record.drafter)
        explored = router._exploration
        done.lost.append((explored.lost - explored.first_lost, explored.seconds))

    router.observe = watched  # type: ignore[method-assign]
    done.result = simulation.run()
    return done


def ratio(workload: Workload, result: Result) -> float:
    """Of the rate achieved to that of the best policy."""
    if workload.catch_up and workload.entropy:
        return result.rate / best_policy(workload)[0]
    return best_seconds(workload, result) / result.seconds


def test_there_are_twenty_workloads_or_more_of_different_names() -> None:
    assert len(WORKLOADS) >= 20
    assert len({*NAMES}) == len(NAMES)


@pytest.mark.parametrize("workload", WORKLOADS, ids=NAMES)
def test_cost_aware_router_is_within_2_percent_of_the_best_policy(workload: Workload) -> None:
    done = run(workload.name)
    figures = done.router.figures()
    assert ratio(workload, done.result) >= 0.98, figures
    assert figures["rounds"] == done.result.arms
    assert figures["explored_loss"] <= 0.006 + figures["first_loss"] + 1e-4


@pytest.mark.parametrize("arm", [NONE, "eagle3", "lookup"])
def test_the_simulation_itself_agrees_with_the_closed_form(arm: str) -> None:
    """What the router is held against is counted right: one arm's rate, simulated and computed."""
    for workload in STATIONARY[2:5]:
        result = Simulation(workload, Policy(arm)).run()
        (regime,) = workload.regimes
        assert result.rate == pytest.approx(
            step_rate(workload, workload.costs(), [regime], [arm]), rel=1e-6
        )


def test_the_best_policy_for_lagging_networks_is_what_simulating_each_policy_finds() -> None:
    workload = named("dear switches worth their while")
    rate, policy = best_policy(workload)
    assert policy == {"prose": "eagle3", "json": "ddtree"}

    class Told(Policy):
        def route(self, sequences: Sequence[Any]) -> list[str]:
            return [policy["prose" if s.signals.entropy > 1.0 else "json"] for s in sequences]

    assert Simulation(workload, Told("eagle3")).run().rate == pytest.approx(rate, rel=0.01)


def test_where_drafting_cannot_help_nothing_is_drafted() -> None:
    result = run("nothing helps on a CPU").result
    assert result.arms[NONE] > 0.98 * sum(result.arms.values())


def test_an_arm_that_gets_slow_loses_its_rounds_and_its_measured_cost_rises() -> None:
    done = run("two arms get slow")
    half = len(done.chosen) // 2
    assert done.chosen[:half].count("eagle3") > 0.9 * half
    assert done.chosen[half:].count("eagle3") < 0.05 * half
    before = done.simulation.workload.costs().draft["eagle3"].at(1)
    assert done.simulation.costs.draft("eagle3", 1) > 3 * before


def test_switches_too_dear_are_not_made_and_cheap_ones_are() -> None:
    def switches(name: str) -> float:
        late = [arm == "eagle3" for arm in run(name).chosen[3000:]]
        return sum(a != b for a, b in pairwise(late)) / len(late)

    assert switches("cheap switches") > 0.04
    assert switches("switches too dear for short spans") < 0.02


# The assignment of a batch -----------------------------------------------------------------------


def flat(workload: Workload, regimes: Sequence[str]) -> Step:
    arms = (NONE, *workload.arms)
    yields = [
        [1.0 if arm == NONE else workload.regimes[regime][arm] for arm in arms]
        for regime in regimes
    ]
    verified = [1.0, *(arm.nodes + 1.0 for arm in workload.arms.values())]
    return Step(
        CostModel(workload.costs()),
        arms,
        [None] * len(arms),
        workload.overhead / 1e3,
        [Choices(10, list(range(len(arms))), y, [0.0] * len(arms), verified) for y in yields],
    )


@pytest.mark.parametrize("verify", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize(
    "regimes",
    [
        ("prose",),
        ("prose", "json"),
        ("noise", "json", "prose"),
        ("json", "noise", "noise", "noise"),
    ],
)
def test_routes_of_a_batch_are_chosen_together(
    verify: dict[int, float], regimes: tuple[str, ...]
) -> None:
    texts = [[(regime, 100.0)] for regime in regimes]
    workload = Workload(
        "batch", FOUR, {"prose": PROSE, "json": JSON, "noise": NOISE}, texts, verify
    )
    router = CostAwareRouter(tuple(FOUR))
    step = flat(workload, regimes)
    rate = router._choose(step, [0] * len(regimes))
    best = max(
        step_rate(workload, workload.costs(), regimes, arms)
        for arms in assignments(workload, len(regimes))
    )
    assert rate == pytest.approx(best, rel=0.005)
    names = [(NONE, *FOUR)[arm] for arm in step.assignment]
    assert rate == pytest.approx(step_rate(workload, workload.costs(), regimes, names), rel=1e-6)


def test_a_drafter_that_is_not_worth_its_call_for_one_sequence_is_for_two_that_share_it() -> None:
    shared = CostModel(
        CostTable(Curve([1, 2], [0.010, 0.010]), draft={"a": Curve([1, 2], [0.012, 0.012])})
    )

    def choose(count: int) -> list[str]:
        choices = [Choices(1, [0, 1], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]) for _ in range(count)]
        step = Step(shared, (NONE, "a"), [None, None], 0.0, choices)
        CostAwareRouter(["a"])._choose(step, [0] * count)
        return [(NONE, "a")[arm] for arm in step.assignment]

    assert choose(1) == [NONE]  # 2 tokens in 22 ms against 1 in 10
    shared.table.draft["a"] = Curve([1, 2], [0.009, 0.009])
    assert choose(1) == ["a"]
    shared.table.draft["a"] = Curve([1, 2], [0.0101, 0.0101])
    assert choose(1) == [NONE]
    assert choose(2) == [NONE, NONE]  # 4 in 20.1 ms against 2 in 10
    shared.table.verify = Curve([1, 2, 4], [0.010, 0.011, 0.011])
    assert choose(2) == ["a", "a"]  # 4 in 21.1 ms against 2 in 11


# Exploration -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["copy", "short spans told by entropy", "four alike"])
def test_tries_never_lose_more_than_their_share_of_time_but_for_first_ones(name: str) -> None:
    done = run(name)
    assert all(lost <= 0.006 * seconds for lost, seconds in done.lost)
    assert done.lost[-1][0] > 0.0045 * done.lost[-1][1]
    figures = done.router.figures()
    kinds = 4 if done.simulation.workload.entropy else 1
    assert 0 < figures["first_tries"] <= kinds * len(done.router.arms)
    assert figures["explored_rounds"] > figures["first_tries"] + 20


def test_without_a_budget_only_first_tries_are_made() -> None:
    router = CostAwareRouter(tuple(FOUR), exploration=0.0)
    Simulation(named("copy"), router).run()
    assert router.figures()["explored_rounds"] == router.figures()["first_tries"] <= len(FOUR)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_of_time_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(SettingsError, match=r"exploration=.*expected a share"):
        Exploration(share)


@pytest.mark.parametrize("arms", [(), ("a", "a"), ("a", NONE), "lookup"])
def test_arms_that_are_no_different_drafters_are_refused(arms: Any) -> None:
    with pytest.raises(SettingsError, match=r"router 'cost-aware': arms are"):
        CostAwareRouter(arms)


# Acceptance --------------------------------------------------------------------------------------


def observe(
    predictor: RecentAcceptance, sequence: Any, arm: str, lengths: Sequence[int], entropy: float
) -> None:
    for length in lengths:
        sequence.signals = Signals(entropy, 1.0)
        predictor.predict([sequence], [arm])
        sequence.signals = Signals(99.0, 1.0)  # that of the round to come
        predictor.observe(sequence, RoundRecord(0, arm, 8, length - 1, length))


def expect(predictor: RecentAcceptance, sequence: Any, entropy: float | None = None) -> float:
    sequence.signals = None if entropy is None else Signals(entropy, 1.0)
    ((none, value),) = predictor.predict([sequence], [NONE, "a"])
    assert none == 1.0
    return value


def new(name: str) -> Any:
    return SimpleNamespace(id=name, tokens=[1], signals=None)


def test_recent_acceptance_hopes_then_learns_per_kind_sequence_and_over_all() -> None:
    predictor = RecentAcceptance()
    first, second = new("1"), new("2")
    assert expect(predictor, first) == HOPE
    observe(predictor, first, "a", [6] * 40, entropy=3.0)
    assert expect(predictor, first, 3.0) == pytest.approx(6.0, abs=0.2)
    assert HOPE < expect(predictor, second, 3.0) < 6.0  # what one sequence says of another
    observe(predictor, first, "a", [2] * 40, entropy=0.01)
    assert expect(predictor, first, 0.01) == pytest.approx(2.0, abs=0.4)
    assert expect(predictor, first, 3.0) == pytest.approx(6.0, abs=1.0)
    observe(predictor, second, "a", [3] * 40, entropy=3.0)
    assert expect(predictor, second, 3.0) == pytest.approx(3.0, abs=0.3)
    before = expect(predictor, first, 3.0)
    predictor.close(first)
    assert expect(predictor, first, 3.0) < before  # its own rounds are forgotten
    assert set(predictor._sequences) == {"1", "2"}


def test_a_change_of_the_text_is_noticed_within_a_few_rounds() -> None:
    predictor = RecentAcceptance()
    sequence = new("1")
    observe(predictor, sequence, "a", [5, 6, 7] * 50, entropy=1.0)
    observe(predictor, sequence, "a", [1, 2, 1, 2, 1, 2, 1, 2], entropy=1.0)
    assert expect(predictor, sequence, 1.0) < 3.5


def test_stays_expect_what_lasted_and_what_lasts() -> None:
    stays = Stays()
    for _ in range(20):
        for arm in (1, 1, 1, 2, 2, 2):
            stays.note(arm)
    assert stays.expected(1) == pytest.approx(3.0, abs=0.5)
    for _ in range(100):
        stays.note(2)
    assert stays.expected(2) == pytest.approx(103.0)
    assert stays.expected(1) == pytest.approx(3.0, abs=0.5)


def test_what_is_kept_for_sequences_goes_with_them() -> None:
    done = run("short sequences")
    router = done.router
    assert done.simulation._made > 50
    kept = (
        router._routes,
        router._predictor._sequences,  # type: ignore[attr-defined]
        router._exploration._time,
        router._exploration._used,
    )
    assert all(len(states) <= 2 for states in kept)


def test_lagging_workloads_have_networks_that_lag() -> None:
    assert all(arm.network for w in LAGGING for n, arm in w.arms.items() if n != "lookup")
