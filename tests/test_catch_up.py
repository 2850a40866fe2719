"""Drafters that lag behind and catch up: whenever and however they do, they end where a drafter is
that never slept, and what they have not consumed is bounded."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_drafters
import torch
from draft_reference import dflash_context, eagle3_context
from drafting import Run, ScheduleRouter, dflash_model, eagle3_model, net, neural_drafters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engines import ask, assert_arena_is_sound, text

from whiflash_agents.engine import (
    EngineSettings,
    Request,
    Target,
    WhiFlashEngine,
    kv_cache,
    scheduler,
)
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.kv_cache import KVCache

ARMS = ("eagle3", "dflash", "ddtree", "lookup", "none")


def all_drafters() -> dict[str, Any]:
    return neural_drafters() | {"lookup": LookupDrafter(shared_tokens=0)}


def assert_contexts_are_true(run: Run) -> None:
    """Every context row in the arena is what the tokens give, computed from nothing."""
    plan = run.engine._scheduler
    holders = [
        (s.extent, s.tokens, {n: c.rows for n, c in s.contexts.items()}) for s in plan.running
    ]
    holders += [(r.extent, r.tokens, r.context_rows) for r in plan._retained]
    for extent, tokens, rows in holders:
        assert extent is not None
        for name, count in rows.items():
            if not count:
                continue
            plane = run.catch_up.contexts[name].plane
            if name == "eagle3":
                keys, values, _ = eagle3_context(net(), eagle3_model(), tokens[: count + 1])
            else:
                keys, values = dflash_context(net(), dflash_model(), tokens[:count])
            for got, wanted in zip((*plane.keys, *plane.values), (*keys, *values), strict=True):
                torch.testing.assert_close(
                    got.narrow(1, extent.start, count), wanted, atol=1e-5, rtol=1e-5
                )


def assert_buffers_hold_the_backlog(run: Run, max_backlog: int) -> None:
    """No context lags more than allowed, and no row is kept that all have consumed."""
    held = 0
    for sequence in run.running:
        awake = [state for state in sequence.contexts.values() if not state.off]
        buffer = sequence.features
        assert buffer is not None
        assert buffer.end == sequence.num_cached
        assert buffer.start == min(state.rows for state in awake)
        assert buffer.end - buffer.start <= max_backlog
        for name, state in sequence.contexts.items():
            lag = sequence.num_cached - state.rows
            assert lag == run.catch_up.contexts[name].backlog(sequence)
            if name == "eagle3" and state.rows:
                projected = eagle3_context(
                    net(), eagle3_model(), sequence.tokens[: state.rows + 1]
                )[2][0]
                assert state.last is not None or state.rows <= sequence.cached_tokens
                if state.last is not None:
                    torch.testing.assert_close(state.last, projected[-1], atol=1e-5, rtol=1e-5)
        held += buffer.nbytes
    assert run.engine.totals.feature_bytes == held


def never_asleep(requests: list[Request], router: Any) -> dict[Any, Any]:
    """What is drafted in an eager engine where each request runs alone, from nothing."""
    found: dict[Any, Any] = {}
    for request in requests:
        run = Run(
            router,
            all_drafters(),
            catch_up="eager",
            draft_prefill="full",
            prefix_reuse=False,
            max_draft_nodes=16,
        )
        run.finish(request)
        assert all(
            r.backlog == 0 or r.drafter == "lookup" for r in run.results[request.id].stats.rounds
        )
        found |= run.by_text()
    return found


prompts = st.builds(
    lambda shared, salt, own: [*text(90, 75)[:shared], *text(salt, own)],
    st.sampled_from([0, 0, 30, 75]),
    st.integers(0, 50),
    st.integers(1, 30),
)
asked = st.tuples(prompts, st.integers(1, 45), st.sampled_from([0.0, 0.0, 1.0]))


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(asked, min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    seed=st.integers(0, 99),
    stay=st.sampled_from([1, 1, 4, 15]),
    options=st.fixed_dictionaries(
        {
            "kv_tokens": st.sampled_from([256, 384, 2048]),
            "reserve": st.sampled_from([8, 8, 128]),
            "max_running": st.sampled_from([2, 5]),
            "max_backlog": st.sampled_from([1, 7, 40, 512]),
            "catch_up": st.sampled_from(["lazy", "lazy", "lazy", "eager"]),
            "draft_prefill": st.sampled_from(["kv-only", "kv-only", "full"]),
            "prefill_chunk": st.sampled_from([5, 16, 256]),
        }
    ),
)
def test_after_any_schedule_contexts_and_drafts_are_those_of_drafters_that_never_slept(
    batch: list[Any], gaps: list[int], seed: int, stay: int, options: dict[str, Any]
) -> None:
    requests = [
        ask(f"r{i}", prompt, most, temperature=temperature, seed=i)
        for i, (prompt, most, temperature) in enumerate(batch)
    ]
    router = ScheduleRouter(ARMS, seed, stay)
    reserve = options.pop("reserve")
    run = Run(router, all_drafters(), max_draft_nodes=16, **options)
    backlog = 0 if options["catch_up"] == "eager" else options["max_backlog"]
    waiting = list(zip(requests, gaps, strict=False))
    step = 0
    with pytest.MonkeyPatch.context() as patch:
        # Little room at the start: extents grow, move, and are taken away.
        patch.setattr(scheduler, "_RESERVE", reserve)
        patch.setattr(kv_cache, "GRANULE", max(8, reserve // 2))
        while waiting or run.engine.has_work:
            while waiting and waiting[0][1] <= 0:
                run.engine.add(waiting.pop(0)[0])
            if waiting:
                waiting[0] = (waiting[0][0], waiting[0][1] - 1)
            run.step()
            assert_buffers_hold_the_backlog(run, backlog)
            if step % 4 == 0:
                assert_contexts_are_true(run)
            step += 1
            assert step < 3000
    assert_contexts_are_true(run)
    wanted = never_asleep(requests, router)
    assert run.by_text() == wanted
    assert not any(result.stats.notes for result in run.results.values())


@pytest.mark.parametrize("kv_tokens", [256, 320])
def test_contexts_survive_moves_and_preemption(
    kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "GRANULE", 8)
    monkeypatch.setattr(scheduler, "_RESERVE", 8)
    moved: list[int] = []
    defragment = KVCache.defragment

    def counting(self: KVCache, *args: Any, **kwargs: Any) -> None:
        moved.append(1)
        defragment(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "defragment", counting)
    requests = [ask(f"r{i}", text(i, 20 + 9 * i), 90) for i in range(4)]
    router = ScheduleRouter(ARMS, 5, 3)
    run = Run(router, all_drafters(), max_draft_nodes=16, kv_tokens=kv_tokens)

    def check() -> None:
        assert_contexts_are_true(run)
        assert_buffers_hold_the_backlog(run, 512)

    run.finish(*requests, after_step=check)
    assert run.engine.totals.preemptions > 0
    assert moved
    assert_arena_is_sound(run.engine)
    assert run.by_text() == never_asleep(requests, router)


MODES: dict[str, dict[str, Any]] = {
    "lazy": {},
    "eager": {"catch_up": "eager"},
    "full": {"draft_prefill": "full"},
    "eager, full": {"catch_up": "eager", "draft_prefill": "full"},
    "backlog of 1": {"max_backlog": 1},
    "backlog of 9": {"max_backlog": 9},
    "small chunks": {"prefill_chunk": 3},
    "small chunks, backlog of 4": {"prefill_chunk": 3, "max_backlog": 4},
}


@pytest.mark.parametrize("seed", [0, 1])
def test_how_drafters_catch_up_changes_neither_drafts_nor_output(seed: int) -> None:
    requests = [
        ask("a", text(1, 50), 40),
        ask("b", text(2, 3), 40, temperature=1.0, seed=7),
        ask("c", [*text(1, 50), 9, 9], 40),
    ]
    found = {}
    for mode, options in MODES.items():
        run = Run(ScheduleRouter(ARMS, seed, 6), all_drafters(), **options)
        results = run.finish(*requests)
        found[mode] = (run.by_text(), [r.token_ids for r in results])
    for mode in MODES:
        assert found[mode] == found["lazy"], mode


def test_nothing_runs_for_a_drafter_that_is_not_chosen() -> None:
    run = Run(ScheduleRouter(("none",)), {})
    assert run.catch_up.contexts == {}

    class Pinned(ScheduleRouter):
        """Has two arms and chooses one."""

        def __init__(self) -> None:
            super().__init__(("eagle3",))
            self.arms = ("eagle3", "dflash")

    run = Run(Pinned(), neural_drafters(), max_backlog=500)
    result = run.finish(ask("a", text(1, 30), 60), after_step=None)[0]
    # Only at the end, when what was computed is kept for prompts that begin alike.
    assert run.engine.totals.draft_rows == {"eagle3": 89, "dflash": 89}
    assert {r.drafter for r in result.stats.rounds} == {"eagle3"}

    run = Run(Pinned(), neural_drafters(), max_backlog=500, prefix_reuse=False)
    run.finish(ask("a", text(1, 30), 60))
    assert run.engine.totals.draft_rows["dflash"] == 0
    assert run.engine.totals.draft_rows["eagle3"] <= 89


def test_a_switch_reports_the_backlog_that_it_consumed() -> None:
    class Late(ScheduleRouter):
        def __init__(self) -> None:
            super().__init__(("eagle3", "dflash"))

        def route(self, sequences: Any) -> list[str]:
            return ["eagle3" if len(s.tokens) < 60 else "dflash" for s in sequences]

    run = Run(Late(), neural_drafters())
    result = run.finish(ask("a", text(1, 30), 60))[0]
    rounds = result.stats.rounds
    (switch,) = [r for r in rounds if r.switched]
    assert switch.drafter == "dflash"
    # All positions before the bonus token.
    assert switch.backlog == 30 + switch.position - 1
    first, *others = [r for r in rounds if r.drafter == "eagle3"]
    assert first.backlog == 30
    assert [r.backlog for r in others] == [r.emitted for r in rounds[: len(others)]]
    assert switch.catch_up_seconds > 0
    assert sum(r.catch_up_seconds for r in rounds) <= run.engine.totals.catch_up_seconds


def test_totals_tell_rows_bytes_and_time() -> None:
    run = Run(ScheduleRouter(ARMS, 3), all_drafters(), prefix_reuse=False, max_backlog=20)
    seen: list[int] = []
    requests = [ask(f"r{i}", text(i, 30), 40) for i in range(3)]
    run.finish(*requests, after_step=lambda: seen.append(run.engine.totals.feature_bytes))
    totals = run.engine.totals
    assert totals.feature_bytes_peak == max(seen) > 0
    assert totals.feature_bytes == seen[-1] == 0
    # Three hidden states (0, 1, 2) of 32 doubles; at most 20 rows and a round's wait.
    assert totals.feature_bytes_peak <= 3 * 20 * 3 * 32 * 8
    for name in ("eagle3", "dflash"):
        assert 3 * (30 + 40 - 1 - 20) <= totals.draft_rows[name] <= 3 * (30 + 40 - 1)
    positions = 2048
    per_head = 2 * 8 * 8  # keys and values, eight dimensions, eight bytes
    assert totals.kv_bytes == {
        "target": positions * 2 * 2 * per_head,
        "eagle3": positions * 1 * 2 * per_head,
        "dflash": positions * 2 * 2 * per_head,
    }
    assert 0 < totals.catch_up_seconds < totals.step_seconds
    assert totals.catch_up_seconds < totals.draft_seconds + totals.step_seconds


def test_a_context_that_two_arms_share_is_kept_once() -> None:
    run = Run(ScheduleRouter(("dflash", "ddtree"), 1), neural_drafters())
    run.finish(ask("a", text(1, 30), 40))
    assert list(run.engine.totals.draft_rows) == ["dflash"]
    assert run.engine.totals.draft_rows["dflash"] == 69
    assert len(run.engine._cache.beside) == 1


def test_a_reused_prefix_brings_its_context() -> None:
    """Rows of the first turn are not made again for the second."""
    run = Run(ScheduleRouter(("eagle3", "dflash"), 2), neural_drafters())
    first = run.finish(ask("a", text(1, 50), 20))[0]
    before = dict(run.engine.totals.draft_rows)
    history = [*text(1, 50), *first.token_ids, *text(2, 10)]
    second = run.finish(ask("b", history, 20))[0]
    # EAGLE-3's row of position t holds token t + 1: the last one that was cached is kept as well.
    assert second.cached_tokens == 69
    for name, rows in run.engine.totals.draft_rows.items():
        assert rows - before[name] == len(history) + 19 - 69
    assert_contexts_are_true(run)


# Bounds over long texts ---------------------------------------------------------------------------


def long_engine(arms: tuple[str, ...], chosen: str, **options: Any) -> WhiFlashEngine:
    drafters = {
        "eagle3": Eagle3Drafter(tiny_drafters.agreeing_eagle3(8192, 16), depth=5, top_k=1),
        "dflash": DFlashDrafter(tiny_drafters.agreeing_dflash(8192)),
    }
    router = ScheduleRouter((chosen,))
    router.arms = arms
    target = Target(tiny_drafters.markov_net(8192), name="long")
    return WhiFlashEngine(
        target,
        router=router,
        drafters=drafters,
        settings=EngineSettings(**({"kv_tokens": 8192} | options)),
    )


@pytest.mark.parametrize("chosen", ["eagle3", "dflash"])
@pytest.mark.parametrize("arms", [1, 2])
def test_four_thousand_tokens_need_no_more_memory_for_features_than_a_few(
    chosen: str, arms: int
) -> None:
    enabled = (chosen,) if arms == 1 else ("eagle3", "dflash")
    engine = long_engine(enabled, chosen, max_backlog=128)
    engine.add(ask("a", [3, 4, 5, 3, 4], 4000))
    row = len(engine._catch_up.layers) * 32 * 4
    rows: list[int] = []
    output = 0
    while engine.has_work:
        for event in engine.step():
            output += len(event.token_ids)
        rows.append(engine.totals.feature_bytes // row)
    assert output == 4000
    # Alone and chosen, it consumes all before each round: what the last one accepted, waits.
    bound = 6 if arms == 1 else 128
    assert max(rows) <= bound
    assert max(rows[len(rows) // 2 :]) <= max(rows[: len(rows) // 2]) + 6
    # The longer text must not make drafts worse, or the engine ran on plain decoding.
    assert engine.totals.rounds < 1000
    assert engine.totals.draft_rows[chosen] >= 3900


def test_a_long_prompt_is_never_held_as_a_whole() -> None:
    engine = long_engine(("eagle3", "dflash"), "dflash", max_backlog=64, prefill_chunk=32)
    engine.add(ask("a", [3 + i % 12 for i in range(4096)], 8))
    held: list[int] = []
    append = engine._catch_up.append

    def watching(sequence: Any, *args: Any) -> None:
        append(sequence, *args)
        held.append(sequence.features.end - sequence.features.start)

    engine._catch_up.append = watching  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    assert 64 < max(held) <= 64 + 32
    row = len(engine._catch_up.layers) * 32 * 4
    assert engine.totals.feature_bytes_peak <= 64 * row
    assert engine.totals.draft_rows == {"eagle3": 4096 + 7, "dflash": 4096 + 7}
