"""The guard keeps a router from doing worse than the best single arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from routing_simulation import Policy, Simulation, Workload
from routing_workloads import COPY, CPU, EVIDENT, FOUR, JSON, NOISE, PROSE, TOLD

from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.routing.acceptance import RecentAcceptance
from whiflash_agents.engine.routing.base import NONE, Router
from whiflash_agents.engine.routing.cost_aware import CostAwareRouter
from whiflash_agents.engine.routing.guard import Guard
from whiflash_agents.engine.telemetry import RoundRecord

ARMS = tuple(FOUR)


class Liar:
    """A predictor that is wrong about every round, from the first on or later."""

    signals: frozenset[str] = frozenset()

    def __init__(self, lies: Mapping[str, float], honest: int = 0) -> None:
        self._lies = lies
        self._honest = honest  # predictions
        self._truth = RecentAcceptance()

    def bind(self, surroundings: Any) -> None:
        self._truth.bind(surroundings)

    def predict(self, sequences: Sequence[Any], arms: Sequence[str]) -> list[list[float]]:
        self._honest -= 1
        if self._honest >= 0:
            return self._truth.predict(sequences, arms)
        return [[1.0 if a == NONE else self._lies.get(a, 2.0) for a in arms] for _ in sequences]

    def kind(self, sequence: Any) -> int:
        return 0

    def observe(self, sequence: Any, record: RoundRecord) -> None:
        self._truth.observe(sequence, record)

    def close(self, sequence: Any) -> None:
        self._truth.close(sequence)


def liar(lies: Mapping[str, float], honest: int = 0) -> Callable[[], Router]:
    return lambda: CostAwareRouter(ARMS, Liar(lies, honest))


def honest() -> Router:
    return CostAwareRouter(ARMS)


class Flipping(Router):
    """Another arm every few rounds, whatever it yields."""

    name = "flipping"
    arms = ARMS

    def __init__(self) -> None:
        self._rounds = 0

    def route(self, sequences: Sequence[Any]) -> list[str]:
        self._rounds += 1
        return [ARMS[self._rounds // 5 % len(ARMS)]] * len(sequences)


def one(regime: str, acceptance: Mapping[str, float], count: int = 1, **more: Any) -> Workload:
    texts = [[(regime, 1000.0)]] * count
    return Workload(regime, FOUR, {regime: acceptance}, texts, **({"steps": 5000} | more))


def swinging(a: float, b: float, other: Mapping[str, float] = COPY, **more: Any) -> Workload:
    texts = [[("prose", a), ("other", b)]]
    return Workload("swinging", FOUR, {"prose": PROSE, "other": other}, texts, **more)


ADVERSARIAL: dict[str, tuple[Workload, Callable[[], Router]]] = {
    "the worst arm praised": (one("copy", COPY), liar({"eagle3": 9.0})),
    "all arms belittled": (one("copy", COPY), liar(dict.fromkeys(ARMS, 1.0))),
    "useless drafting praised": (one("noise", NOISE, verify=CPU), liar({"eagle3": 12.0})),
    "right at first, then wrong": (one("json", JSON, steps=8000), liar({"lookup": 12.0}, 2000)),
    "wrong for a batch": (one("json", JSON, 3, steps=8000), liar({"lookup": 12.0})),
    "arms in turn": (one("prose", PROSE), Flipping),
    "regimes faster than learning": (swinging(25.0, 25.0, steps=6000), honest),
    "regimes as fast as learning": (swinging(150.0, 150.0), honest),
    "regimes faster than learning on a CPU": (swinging(30.0, 60.0, NOISE, verify=CPU), honest),
}


def best_single(workload: Workload) -> float:
    """Tokens per second of the best arm alone: that does not change with the text's turns."""
    short = replace(workload, steps=3000)
    return max(Simulation(short, Policy(arm)).run().rate for arm in (NONE, *workload.arms))


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_a_guarded_router_loses_at_most_3_percent_against_the_best_single_arm(name: str) -> None:
    workload, make = ADVERSARIAL[name]
    guard = Guard(make())
    result = Simulation(workload, guard).run()
    assert result.rate >= 0.97 * best_single(workload), guard.figures()


@pytest.mark.parametrize("name", list(ADVERSARIAL)[:6])
def test_without_the_guard_these_routers_lose_far_more(name: str) -> None:
    workload, make = ADVERSARIAL[name]
    workload = replace(workload, steps=workload.steps // (1 if "then" in name else 4))
    assert Simulation(workload, make()).run().rate < 0.85 * best_single(workload)


def test_the_guard_says_what_it_pinned_and_for_how_long() -> None:
    workload, make = ADVERSARIAL["the worst arm praised"]
    guard = Guard(make())
    simulation = Simulation(workload, guard)
    told: list[str | None] = []
    observe = guard.observe

    def watched(sequence: Any, record: RoundRecord) -> None:
        told.append(guard.figures()["guard"]["pinned"])
        if told[-1] == record.drafter:
            assert guard.predicted(sequence) == pytest.approx(8.0, abs=2.0)
        observe(sequence, record)

    guard.observe = watched  # type: ignore[method-assign]
    result = simulation.run()
    figures = guard.figures()
    assert figures["guard"]["pinned_rounds"] == sum(arm is not None for arm in told)
    pins = sum(b is not None and a != b for a, b in zip([None, *told], told, strict=False))
    assert figures["guard"]["pins"] in (pins, pins + 1)  # one may begin after the last round
    assert {*told} >= {None, "lookup"}  # released from time to time
    assert figures["rounds"] == result.arms  # and the router's own figures
    rates = figures["guard"]["single_arm_rates"]
    assert max(rates, key=rates.get) == "lookup"


@pytest.mark.parametrize("workload", TOLD[:3], ids=lambda w: w.name)
def test_a_router_that_routes_well_is_left_alone(workload: Workload) -> None:
    free = Simulation(workload, CostAwareRouter(tuple(workload.arms))).run()
    guard = Guard(CostAwareRouter(tuple(workload.arms)))
    guarded = Simulation(workload, guard).run()
    assert guarded.rate > 0.97 * free.rate, guard.figures()["guard"]
    assert guarded.rate > 1.05 * best_single(workload)


@pytest.mark.parametrize("workload", EVIDENT, ids=lambda workload: workload.name)
def test_an_arm_that_was_called_where_it_is_good_is_not_taken_to_be_good_everywhere(
    workload: Workload,
) -> None:
    guard = Guard(CostAwareRouter(tuple(workload.arms)))
    guarded = Simulation(workload, guard).run()
    routed = Simulation(workload, CostAwareRouter(tuple(workload.arms))).run()
    assert routed.arms["lookup"] > 0.1 * sum(routed.arms.values())
    assert guarded.rate > 0.99 * routed.rate, guard.figures()
    # Not told apart by evidence, lookup seemed best, and was pinned for most of the run.
    assert guard.figures()["guard"]["pinned_rounds"] < 0.01 * sum(guarded.arms.values())


def test_it_stands_for_the_router_that_it_watches() -> None:
    router = CostAwareRouter(ARMS)
    guard = Guard(router)
    assert (guard.name, guard.arms, guard.signals) == ("cost-aware", ARMS, router.signals)
    workload = one("copy", COPY, steps=30)
    simulation = Simulation(workload, guard)
    simulation.run()
    sequence = SimpleNamespace(id="s0")
    assert guard.predicted(sequence) == router.predicted(sequence)  # type: ignore[arg-type]
    guard.close(sequence)  # type: ignore[arg-type]
    assert not router._routes


@pytest.mark.parametrize("setting", ["window", "hold"])
def test_numbers_of_steps_below_1_are_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"guard: {setting}=0"):
        Guard(CostAwareRouter(ARMS), **{setting: 0})


class Learning(Flipping):
    """Tries the arm that is dear here a few times, then knows better."""

    def route(self, sequences: Sequence[Any]) -> list[str]:
        self._rounds += 1
        return ["eagle3" if self._rounds <= 2 else "lookup"] * len(sequences)


def test_a_router_may_find_out_about_its_arms_before_one_is_pinned() -> None:
    guard = Guard(Learning())
    Simulation(one("copy", COPY, verify=CPU, steps=60), guard).run()
    assert guard.figures()["guard"]["pins"] == 0
