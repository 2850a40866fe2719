"""Oracles against every route there is, on rows small enough to try them all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.routing.labels import RoundLabels
from whiflash_agents.engine.routing.oracle import Oracle, Route, round_seconds, route_taken
from whiflash_agents.engine.telemetry import RoundRecord

ARMS = ("a", "b", "c")


def labels(table: Sequence[Sequence[int]], drafted: int = 4, num_prompt: int = 10) -> RoundLabels:
    """Rounds that emit as many tokens as `table` `[rounds][arms]` says."""
    count, arms = len(table), len(table[0]) if table else len(ARMS)
    acceptance = torch.tensor(table, dtype=torch.int64).view(count, arms)
    return RoundLabels(
        "row",
        num_prompt,
        ARMS[:arms],
        acceptance,
        torch.full((count, arms), drafted),
        torch.zeros(count),
        torch.zeros(count),
        torch.zeros(count, 3),
    )


def random_row(salt: int, rounds: int, arms: int = 3) -> RoundLabels:
    source = random.Random(salt)
    return labels(
        [[source.randint(1, min(4, rounds - at)) for _ in range(arms)] for at in range(rounds)]
    )


def ways(row: RoundLabels, arms: Sequence[str], at: int = 0) -> Iterator[dict[int, str]]:
    """Every route from position `at`, with no arm where it does not come to."""
    if at == row.num_rounds:
        yield {}
        return
    for column, arm in enumerate(arms):
        emitted = int(row.acceptance_of(arms)[at, column])
        for rest in ways(row, arms, at + emitted):
            yield {at + 1: arm, **rest}


@pytest.mark.parametrize("salt", range(5))
@pytest.mark.parametrize("timed", [False, True])
def test_nothing_beats_the_oracle_per_round(salt: int, timed: bool) -> None:
    row = random_row(salt, 9)
    arms = (*ARMS, "none")
    seconds = None
    if timed:
        generator = torch.Generator().manual_seed(salt)
        seconds = [0.5 + torch.rand(9, 4, generator=generator, dtype=torch.float64)]
    oracle = Oracle([row], arms, seconds=seconds)
    best = oracle.follow(oracle.per_round())
    every = [oracle.follow([way]) for way in ways(row, arms)]
    assert len(every) > 100
    assert all(outcome.tokens == best.tokens == 9 for outcome in every)
    if timed:
        assert best.seconds == pytest.approx(min(o.seconds or 0.0 for o in every))
    else:
        assert best.rounds == min(o.rounds for o in every)


@pytest.mark.parametrize("timed", [False, True])
def test_oracles_of_fewer_choices_are_the_best_of_their_kind(timed: bool) -> None:
    rows = [random_row(salt, 5 + salt) for salt in range(6)]
    categories = ["x", "y", "x", "z", "y", "x"]
    seconds = None
    if timed:
        generator = torch.Generator().manual_seed(1)
        seconds = [0.2 + torch.rand(r.num_rounds, 3, generator=generator) for r in rows]
    oracle = Oracle(rows, ARMS, categories=categories, seconds=seconds)

    def cost(routes: Sequence[Route]) -> float:
        outcome = oracle.follow(routes)
        return float(outcome.rounds) if outcome.seconds is None else outcome.seconds

    def all_routes(arm_of: Sequence[str]) -> list[Route]:
        singles = {arm: oracle.single(arm) for arm in ARMS}
        return [singles[arm][row] for row, arm in enumerate(arm_of)]

    def product(groups: Sequence[object]) -> Iterator[list[str]]:
        names = sorted(set(map(str, groups)))
        for number in range(len(ARMS) ** len(names)):
            arm = {n: ARMS[number // len(ARMS) ** i % len(ARMS)] for i, n in enumerate(names)}
            yield [arm[str(group)] for group in groups]

    for found, groups in (
        (oracle.best_single(), ["one"] * 6),
        (oracle.per_task(), categories),
        (oracle.per_prompt(), list(range(6))),
    ):
        assert cost(found) == pytest.approx(min(cost(all_routes(c)) for c in product(groups)))
    costs = [
        cost(routes)
        for routes in (
            oracle.per_round(),
            oracle.per_prompt(),
            oracle.per_task(),
            oracle.best_single(),
        )
    ]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    assert cost(oracle.per_round()) <= cost(oracle.greedy())


def test_the_greedy_oracle_takes_the_longest_step_and_may_lose_by_it() -> None:
    # The long step of `a` ends where steps are short; after the short one of `b`, `b` leaps.
    row = labels([[3, 1], [1, 5], [1, 1], [1, 1], [1, 1], [1, 1]])
    oracle = Oracle([row], ("a", "b"))
    assert oracle.greedy()[0][1] == "a"
    assert oracle.per_round()[0][1] == "b"
    assert oracle.follow(oracle.greedy()).rounds == 4
    assert oracle.follow(oracle.per_round()).rounds == 2
    assert oracle.follow(oracle.single("b")).rounds == 2


def test_with_seconds_the_greedy_oracle_takes_the_best_rate_of_the_round() -> None:
    row = labels([[4, 2], [1, 1], [1, 1], [1, 1]])
    oracle = Oracle([row], ("a", "b"), seconds=[torch.tensor([[3.0, 1.0]] * 4)])
    assert oracle.greedy()[0][1] == "b"
    assert Oracle([row], ("a", "b")).greedy()[0][1] == "a"


def test_of_equally_good_arms_the_first_is_taken() -> None:
    row = labels([[2, 2], [1, 1]])
    for arms in (("a", "b"), ("b", "a")):
        oracle = Oracle([row], arms)
        for routes in (
            oracle.best_single(),
            oracle.per_prompt(),
            oracle.greedy(),
            oracle.per_round(),
        ):
            assert routes[0][1] == arms[0]


def test_outcomes_count_tokens_rounds_arms_and_seconds() -> None:
    row = labels([[2, 1], [3, 1], [1, 2], [1, 1]])
    seconds = torch.tensor([[0.5, 0.25]] * 4)
    oracle = Oracle([row, row], ("a", "b"), seconds=[seconds, 2 * seconds])
    route = {1: "a", 3: "b"}
    outcome = oracle.follow([route, route])
    assert (outcome.tokens, outcome.rounds) == (8, 4)
    assert outcome.mean_acceptance_length == 2.0
    assert outcome.by_arm == {"a": 2, "b": 2}
    assert outcome.seconds == pytest.approx(0.75 + 1.5)
    assert outcome.tokens_per_second == pytest.approx(8 / 2.25)
    assert outcome.as_dict()["rounds_by_arm"] == {"a": 2, "b": 2}


def test_a_run_is_followed_by_its_records() -> None:
    row = labels([[2, 1], [3, 1], [1, 2], [1, 1]])
    rounds = [RoundRecord(1, "b", 4, 0, 1), RoundRecord(2, "a", 4, 2, 3)]
    outcome = Oracle([row], ("a", "b")).follow([route_taken(rounds)])
    assert (outcome.tokens, outcome.rounds) == (4, 2)
    with pytest.raises(SettingsError, match="output position 2 and has no arm"):
        Oracle([row], ("a", "b")).follow([{1: "b"}])


def test_seconds_of_a_round_are_those_of_drafting_and_verifying() -> None:
    table = CostTable(
        verify=Curve([1, 11], [0.010, 0.020]),
        attention=1e-4,
        draft={"a": Curve([1], [0.003])},
        catch_up={"a": Curve([1], [9.0])},
    )
    row = labels([[2], [1], [1]], drafted=5, num_prompt=20)
    got = round_seconds(row, ("none", "a"), CostModel(table))
    for at in range(3):
        # 20 + at tokens are in the cache; each token of the forward counts for the whole length.
        assert got[at, 0].item() == pytest.approx(0.010 + 1e-4 * (20 + at + 1))
        assert got[at, 1].item() == pytest.approx(0.015 + 1e-4 * 6 * (20 + at + 6) + 0.003)
    oracle = Oracle([row], ("none", "a"), costs=CostModel(table))
    assert oracle.follow(oracle.single("none")).seconds == pytest.approx(got[:, 0].sum().item())


def test_an_arm_that_costs_more_than_it_yields_is_left_alone() -> None:
    slow, fast = Curve([1], [1.0]), Curve([1], [0.001])
    table = CostTable(verify=Curve([1], [0.01]), draft={"a": slow, "b": fast})
    row = labels([[4, 2], [3, 2], [2, 2], [1, 1]])
    oracle = Oracle([row], ("none", "a", "b"), costs=CostModel(table))
    figures = oracle.as_dict()
    assert figures["minimises"] == "seconds"
    assert figures["round"]["rounds_by_arm"] == {"b": 2}
    assert set(figures["single"]) == {"none", "a", "b"}
    assert figures["single"]["a"]["mean_acceptance_length"] == 4.0
    assert figures["best_single"] == figures["single"]["b"]


def test_rows_without_rounds_and_no_rows_at_all_cost_nothing() -> None:
    for rows in ([], [labels([])]):
        oracle = Oracle(rows, ARMS, costs=CostModel(CostTable(verify=Curve([1], [1.0]))))
        outcome = oracle.follow(oracle.per_round())
        assert (outcome.tokens, outcome.rounds, outcome.seconds) == (0, 0, 0.0)
        assert outcome.mean_acceptance_length == 0.0
        assert outcome.tokens_per_second is None
        assert oracle.as_dict()["task"]["rounds"] == 0


def test_what_does_not_fit_is_refused() -> None:
    row = labels([[1, 1]])
    second = torch.ones(1, 2)
    with pytest.raises(SettingsError, match="one or more"):
        Oracle([row], ())
    with pytest.raises(SettingsError, match="each of them once"):
        Oracle([row], ("a", "a"))
    with pytest.raises(SettingsError, match="no labels for 'c'"):
        Oracle([row], ("a", "c"))
    with pytest.raises(SettingsError, match="not both"):
        Oracle([row], ("a", "b"), costs=CostModel(CostTable()), seconds=[second])
    with pytest.raises(SettingsError, match="do not fit"):
        Oracle([row], ("a", "b"), categories=["x", "y"])
    with pytest.raises(SettingsError, match="do not fit"):
        Oracle([row], ("a",), seconds=[second])
    with pytest.raises(SettingsError, match="measure costs first"):
        Oracle([row], ("a", "b"), costs=CostModel(CostTable()))
    oracle = Oracle([row], ("a", "b"))
    with pytest.raises(SettingsError, match="2 routes for 1 rows"):
        oracle.follow([{1: "a"}, {1: "b"}])
    with pytest.raises(SettingsError, match="'none' is not among a, b"):
        oracle.follow([{1: "none"}])
    with pytest.raises(SettingsError, match="'none' is not among a, b"):
        oracle.single("none")
