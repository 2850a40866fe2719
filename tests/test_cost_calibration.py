"""Start-up calibration on real, tiny engines: what it finds, and that it leaves no trace."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import pytest
import tiny_drafters
import torch
from drafting import neural_drafters
from small_engines import AlternatingRouter, ask, assert_arena_is_sound, assert_idle, build, text

from whiflash_agents.engine import WhiFlashEngine
from whiflash_agents.engine.calibration_stage import Stage
from whiflash_agents.engine.cost_calibration import doubling, machine_of, measure_costs
from whiflash_agents.engine.costs import CostModel, CostTable
from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.errors import SettingsError, WhiFlashError
from whiflash_agents.engine.sequence import SequenceState

ARMS = ("eagle3", "dflash", "ddtree", "lookup")
PAUSE = 0.005


class WatchedRouter(AlternatingRouter):
    """Counts what it is asked and told."""

    def __init__(self, *arms: str) -> None:
        super().__init__(*arms)
        self.calls = 0

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self.calls += 1
        return super().route(sequences)

    def observe(self, sequence: SequenceState, record: Any) -> None:
        self.calls += 1

    def close(self, sequence: SequenceState) -> None:
        self.calls += 1


class SleepyEagle3(Eagle3Drafter):
    """Takes a nap in every call, while it is told to."""

    asleep = True

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        if self.asleep:
            time.sleep(PAUSE)
        return super().draft(sequences, limits)


class SleepyLookup(LookupDrafter):
    """A retrieving drafter that takes a nap."""

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        time.sleep(PAUSE)
        return super().draft(sequences, limits)


def drafters() -> dict[str, Any]:
    models = {"eagle": tiny_drafters.random_eagle3(), "block": tiny_drafters.random_dflash()}
    return neural_drafters(**models) | {"lookup": LookupDrafter()}


def all_arms(given: dict[str, Any] | None = None, **options: Any) -> WhiFlashEngine:
    router = WatchedRouter(*ARMS, "none")
    return build(router, given or drafters(), **({"max_running": 4} | options))


@pytest.fixture(scope="module")
def table() -> CostTable:
    return measure_costs(all_arms(), seconds=1.0)


def test_the_table_is_complete(table: CostTable) -> None:
    assert table.verify.counts == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {arm: curve.counts for arm, curve in table.draft.items()} == {
        arm: [1, 2, 4] for arm in ARMS
    }
    assert {name: curve.counts for name, curve in table.catch_up.items()} == {
        name: [1, 16, 64, 256] for name in ("eagle3", "dflash")
    }
    curves = (table.verify, *table.draft.values(), *table.catch_up.values())
    assert all(seconds > 0 for curve in curves for seconds in curve.seconds)
    assert 0 <= table.attention < 1e-5
    assert table.draft["lookup"].at(1) < table.draft["eagle3"].at(1)


def test_verification_is_taken_apart_into_its_tokens_and_what_they_attend_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(tokens: int, attended: int) -> float:
        return 1e-4 + 5e-6 * tokens + 2e-8 * attended

    monkeypatch.setattr(Stage, "verify", lambda self, n: seconds(n, self.attended(n)))
    monkeypatch.setattr(Stage, "verify_long", lambda self, n: seconds(n, self.attended_long(n)))
    costs = CostModel(measure_costs(all_arms(max_running=3), seconds=0.1))
    assert costs.table.attention == pytest.approx(2e-8)
    assert costs.table.verify.counts == [1, 2, 4, 8, 16, 32, 64, 128, 195]
    for tokens, attended in ((1, 400), (10, 10 * 300), (195, 195 * 64)):
        assert costs.verify(tokens, attended) == pytest.approx(seconds(tokens, attended))


def test_the_table_says_where_and_how_it_was_measured(table: CostTable) -> None:
    machine = table.machine
    assert machine["target"] == "tiny-llama"
    assert (machine["device"], machine["dtype"]) == ("cpu", "float32")
    assert machine["threads"] == torch.get_num_threads()
    assert machine["device_name"]
    assert machine["contexts"] == [64, 512 - 81]
    fewest, most = machine["repetitions"]
    assert 2 <= fewest <= most <= 20
    assert 0 < machine["seconds"] < 3
    assert machine_of(all_arms().target).items() <= machine.items()
    assert CostTable.of(table.as_dict()) == table


def test_predictions_meet_what_rounds_then_take(table: CostTable) -> None:
    engine = all_arms()
    engine._drafting.costs = costs = CostModel(table)
    engine.generate([ask(str(i), text(i, 40), max_tokens=30) for i in range(4)])
    tracked = costs.tracked
    assert tracked.keys() >= {"verify", *(f"draft {arm}" for arm in ARMS)}
    # Loose, for a busy machine; a wrong kind of number is off by far more.
    assert all(0.2 < tracked[name].correction < 5 for name in ("verify", "draft eagle3"))


# No trace -----------------------------------------------------------------------------------------


def state_of(engine: WhiFlashEngine) -> Any:
    plan, lookup = engine._scheduler, engine.drafters["lookup"]
    assert isinstance(lookup, LookupDrafter)
    assert isinstance(engine.router, WatchedRouter)
    return {
        "totals": asdict(engine.totals),
        "extents": [(e.start, e.capacity) for e in engine._cache._extents],
        "retained": [(r.tokens[:], r.num_cached, dict(r.context_rows)) for r in plan._retained],
        "catch-up": (dict(engine._catch_up.rows), engine._catch_up.seconds),
        "drafting": (engine._drafting.seconds, engine._drafting.route_seconds),
        "costs": (engine._drafting.costs.as_dict(), engine._drafting.costs.table.as_dict()),
        "router": engine.router.calls,
        "lookup": (dict(lookup._states), lookup._young.tokens[:], lookup._old.tokens[:]),
        "subscribers": dict(engine._subscribers),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
    }


def test_an_engine_is_left_as_it_was_and_answers_as_before() -> None:
    measured, other = all_arms(), all_arms()
    shared = text(1, 30)

    def requests(turn: int, **params: Any) -> list[Any]:
        prompts = [shared + text(10 * turn + i, 5 + 9 * i) for i in range(4)]
        return [
            ask(f"{turn}.{i}", prompt, max_tokens=12, seed=i, **params)
            for i, prompt in enumerate(prompts)
        ]

    for turn, params in enumerate(({}, {"temperature": 0.8})):
        before = state_of(measured)
        measure_costs(measured, seconds=0.2)
        assert state_of(measured) == before
        assert_idle(measured)
        assert_arena_is_sound(measured)  # what earlier requests left behind, too
        here, there = (e.generate(requests(turn, **params)) for e in (measured, other))
        assert [r.token_ids for r in here] == [r.token_ids for r in there]
        assert [r.cached_tokens for r in here] == [r.cached_tokens for r in there]
        told = [[(x.drafter, x.drafted, x.accepted) for x in r.stats.rounds] for r in here]
        assert told == [[(x.drafter, x.drafted, x.accepted) for x in r.stats.rounds] for r in there]


@pytest.mark.parametrize(("method", "after"), [("open", 3), ("catch_up", 3), ("draft", 1)])
def test_a_drafter_that_fails_leaves_no_trace_either(method: str, after: int) -> None:
    class Failing(LookupDrafter):
        calls = 0

    def fail(self: Failing, *args: Any) -> Any:
        self.calls += 1
        if self.calls > after:
            raise RuntimeError("broken")
        return getattr(LookupDrafter, method)(self, *args)

    setattr(Failing, method, fail)
    engine = all_arms(drafters() | {"lookup": Failing()})
    before = state_of(engine)
    with pytest.raises(RuntimeError, match="broken"):
        measure_costs(engine, seconds=0.1)
    assert state_of(engine) == before


@pytest.mark.parametrize("work", ["waiting", "running", "events"])
def test_an_engine_with_work_is_refused(work: str) -> None:
    engine = all_arms()
    engine.add(ask("a"))
    if work != "waiting":
        engine.step()
    if work == "events":
        engine.abort("a")
        assert engine.num_running == 0
    with pytest.raises(WhiFlashError, match="idle engine"):
        measure_costs(engine, seconds=0.1)
    engine.step()


def test_no_time_is_refused() -> None:
    with pytest.raises(SettingsError, match="seconds=0"):
        measure_costs(all_arms(), seconds=0)


# Small and slow engines ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("none", {"max_running": 1, "kv_tokens": 128}),
        ("none", {"max_running": 8, "kv_tokens": 192, "max_draft_nodes": 1}),
        ("lookup", {"max_running": 3, "kv_tokens": 128, "prefix_reuse": False}),
        ("eagle3", {"max_running": 2, "kv_tokens": 192, "draft_prefill": "full"}),
        ("ddtree", {"max_running": 5, "kv_tokens": 2048, "verify_budget": "gain"}),
    ],
)
def test_engines_of_any_size_are_measured(router: str, options: dict[str, Any]) -> None:
    engine = build(router, drafters(), **options)
    found = measure_costs(engine, seconds=0.05)
    assert found.verify.counts[:2] == [1, 2]
    assert found.draft.keys() == engine.drafters.keys()
    assert all(curve.counts for curve in (*found.draft.values(), *found.catch_up.values()))
    assert all(c.counts[-1] <= engine.settings.max_running for c in found.draft.values())
    assert engine._cache._extents == []


def test_prefixes_that_fill_the_arena_are_kept_and_the_rest_is_refused() -> None:
    engine = build("lookup", drafters(), kv_tokens=128, max_running=1)
    engine.generate([ask("a", text(1, 20))])
    (held,) = engine._cache._extents
    with pytest.raises(SettingsError, match=r"82 KV positions in a row.*before the first request"):
        measure_costs(engine, seconds=0.1)
    assert engine._cache._extents == [held]


def test_all_is_measured_once_however_short_the_time_but_slow_counts_are_left_out() -> None:
    engine = all_arms({**drafters(), "eagle3": sleepy()})
    found = measure_costs(engine, seconds=0.002)
    assert found.machine["repetitions"][0] == 1
    assert found.draft["eagle3"].counts == [1, 2]  # the next one would take 10 ms and more
    assert found.verify.counts[:2] == [1, 2]


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_counts_double_and_end_at_the_most_unless_that_is_close(
    most: int, counts: list[int]
) -> None:
    assert doubling(most) == counts


# Slowed arms --------------------------------------------------------------------------------------


def sleepy() -> SleepyEagle3:
    return SleepyEagle3(tiny_drafters.random_eagle3(), depth=3, top_k=3, total_tokens=8)


@pytest.mark.parametrize("arm", ["eagle3", "lookup"])
def test_a_slowed_arm_costs_what_it_was_slowed_by(arm: str) -> None:
    given = drafters()
    slow: Any = SleepyLookup()
    if arm == "eagle3":
        slow = sleepy()
        slow.context = given["eagle3"].context  # one network, two arms
    engine = build(AlternatingRouter(arm, "slow"), {**given, "slow": slow}, max_running=4)
    found = measure_costs(engine, seconds=1.5).draft
    assert found["slow"].counts == found[arm].counts == [1, 2, 4]
    pairs = zip(found["slow"].seconds, found[arm].seconds, strict=True)
    added = median(slowed - plain for slowed, plain in pairs)
    assert 0.5 * PAUSE < added < 3 * PAUSE  # 5.1 ms on an idle machine


def test_an_arm_that_slows_down_while_it_runs_is_known_to_within_twenty_rounds() -> None:
    drafter = sleepy()
    drafter.asleep = False
    engine = build("eagle3", {"eagle3": drafter}, max_running=1)
    costs = engine._drafting.costs  # learnt from rounds alone
    engine.add(ask("a", text(3, 20), max_tokens=400))
    for _ in range(25):
        engine.step()
    before = costs.draft("eagle3", 1)
    drafter.asleep = True
    for _ in range(20):
        engine.step()
    assert engine.num_running == 1
    change = costs.draft("eagle3", 1) - before
    assert 0.6 * PAUSE < change < 2.5 * PAUSE
    assert engine.totals.costs["draft eagle3"]["observations"] >= 40


def test_a_measured_table_follows_an_arm_that_slows_down() -> None:
    drafter = sleepy()
    drafter.asleep = False
    engine = build("eagle3", {"eagle3": drafter}, max_running=1)
    engine._drafting.costs = costs = CostModel(measure_costs(engine, seconds=0.4))
    before = costs.draft("eagle3", 1)
    drafter.asleep = True
    engine.add(ask("a", text(3, 20), max_tokens=100))
    for _ in range(20):
        engine.step()
    assert costs.draft("eagle3", 1) - before > 0.6 * PAUSE


def test_a_network_shared_by_two_arms_catches_up_on_one_curve() -> None:
    dflash = DFlashDrafter(tiny_drafters.random_dflash())
    both = neural_drafters(block=dflash.context, eagle=tiny_drafters.random_eagle3())
    found = measure_costs(
        build(AlternatingRouter("dflash", "ddtree"), both, max_running=1), seconds=0.1
    )
    assert found.draft.keys() == {"dflash", "ddtree"}
    assert found.catch_up.keys() == {"dflash"}
