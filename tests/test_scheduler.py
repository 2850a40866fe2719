"""Who runs when, and on which part of the arena: chunked prefill, admission, preemption."""

from __future__ import annotations

import pytest
import tiny
import tiny_drafters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engines import ask, assert_arena_is_sound, build, plain, run, text

from whiflash_agents.engine import engine as engine_module
from whiflash_agents.engine import kv_cache, scheduler
from whiflash_agents.engine.drafters.registry import neural_drafters
from whiflash_agents.engine.errors import ContextLengthError, SettingsError
from whiflash_agents.engine.kv_cache import KVCache
from whiflash_agents.engine.routing.static import StaticRouter

# Chunked prefill ---------------------------------------------------------------------------------


def test_a_long_prompt_does_not_stall_those_that_decode() -> None:
    engine = build()
    engine.add(ask("fast", text(1, 5), 100))
    engine.step()
    engine.add(ask("long", text(2, 200), 4))
    steps = 0
    while True:
        events = {event.id: event for event in engine.step()}
        steps += 1
        assert len(events["fast"].token_ids) == 1
        if "long" in events:
            break
    assert steps == 13  # 200 tokens, 16 a step
    assert engine.totals.positions_prefilled == 205


def test_no_step_prefills_more_than_the_chunk() -> None:
    engine = build()
    for i in range(4):
        engine.add(ask(str(i), text(i, 30 + i)))
    before = 0
    while engine.has_work:
        engine.step()
        done = engine.totals.positions_prefilled
        assert done - before <= 16
        before = done
    assert before == 30 + 31 + 32 + 33


# Admission ---------------------------------------------------------------------------------------


def test_no_more_than_max_running_run_and_they_start_in_order() -> None:
    engine = build(max_running=3, prefill_chunk=512)
    for i in range(8):
        engine.add(ask(str(i), text(i, 10), 4 + i))
    assert (engine.num_running, engine.num_waiting) == (0, 8)
    first_seen: list[str] = []
    while engine.has_work:
        for event in engine.step():
            if event.id not in first_seen:
                first_seen.append(event.id)
        assert engine.num_running <= 3
        assert engine.num_running + engine.num_waiting == len(engine._sequences)
    assert first_seen == [str(i) for i in range(8)]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    engine = build(kv_tokens=512)
    engine.add(ask("running", text(1, 100), 100))
    engine.step()
    engine.add(ask("large", text(2, 300), 20))
    for i in range(30):
        engine.add(ask(f"small-{i}", text(10 + i, 10), 5))
    first_seen = {}
    steps = 0
    while engine.has_work:
        steps += 1
        for event in engine.step():
            first_seen.setdefault(event.id, steps)
    assert first_seen["large"] < min(first_seen[f"small-{i}"] for i in range(30))


def test_what_cannot_fit_is_refused_at_once_and_leaves_nothing_behind() -> None:
    engine = build("lookup", kv_tokens=256, max_draft_nodes=32)
    with pytest.raises(ContextLengthError, match="exceed the target's context of 512"):
        engine.add(ask("a", text(1, 500), 13))
    with pytest.raises(ContextLengthError, match="needs up to 257 KV positions"):
        engine.add(ask("a", text(1, 150), 27))
    assert not engine.has_work
    request = ask("a", text(1, 150), 26)  # just fits, with room for a round's drafts
    engine.add(request)
    assert run(engine)["a"].token_ids == plain(request)


def test_what_fits_does_not_depend_on_the_router() -> None:
    arms = neural_drafters(eagle3=tiny_drafters.eagle3(), dflash=tiny_drafters.dflash())
    for router in ("none", "lookup", "eagle3", "dflash", "ddtree"):
        engine = build(router, arms, kv_tokens=256, max_draft_nodes=64)
        with pytest.raises(ContextLengthError, match="needs up to 257 KV positions"):
            engine.add(ask("a", text(1, 150), 27))
        engine.add(ask("a", text(1, 150), 26))
        arms = neural_drafters(eagle3=tiny_drafters.eagle3(), dflash=tiny_drafters.dflash())


def test_a_drafter_that_needs_more_room_than_there_is_is_refused_with_the_remedy() -> None:
    arms = neural_drafters(eagle3=tiny_drafters.eagle3(), eagle3_depth=10)
    with pytest.raises(SettingsError, match=r"'eagle3' writes 90 positions .*raise max_draft_nod"):
        build("eagle3", arms)
    assert build("eagle3", arms, max_draft_nodes=90)


def test_a_request_may_fill_the_context_to_its_last_position() -> None:
    request = ask("a", text(1, 480), 32)
    result = build("lookup", kv_tokens=1024, prefill_chunk=512).generate([request])[0]
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 32
    assert result.token_ids == plain(request)


def test_a_growing_sequence_is_moved_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    copy = KVCache.copy
    monkeypatch.setattr(
        KVCache,
        "copy",
        lambda self, a, b, start, end: moved.append(end) or copy(self, a, b, start, end),
    )
    requests = [ask(str(i), text(i, 60), 440) for i in range(4)]
    engine = build(kv_tokens=8192)
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == [plain(r) for r in requests]
    assert 0 < len(moved) <= 2 * 4
    assert engine.totals.preemptions == 0


# Preemption --------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_when_the_arena_is_full_and_loses_nothing() -> None:
    engine = build(kv_tokens=448, prefill_chunk=30)
    requests = [ask(key, text(i, 20), 220) for i, key in enumerate(("old", "young"))]
    streamed: dict[str, list[int]] = {"old": [], "young": []}
    results = {}
    for request in requests:
        engine.add(request)
    order = []
    while engine.has_work:
        for event in engine.step():
            streamed[event.id] += event.token_ids
            if event.result is not None:
                order.append(event.id)
                results[event.id] = event.result
    assert engine.totals.preemptions > 0
    assert order == ["old", "young"]
    assert engine.totals.positions_prefilled > 40  # the young one was computed again
    for request in requests:
        result = results[request.id]
        assert result.token_ids == streamed[request.id] == plain(request)
        assert result.cached_tokens == 0
        # Its resumption is not a round without a record.
        assert sum(r.emitted for r in result.stats.rounds) == len(result.token_ids) - 1


def test_one_that_was_preempted_resumes_before_others_start() -> None:
    engine = build(kv_tokens=448)
    for i, key in enumerate(("old", "young", "late")):
        engine.add(ask(key, text(i, 20), 220))
    preempted_at, seen = 0, []
    while engine.has_work:
        for event in engine.step():
            if engine.totals.preemptions and event.id != "old":
                seen.append(event.id)
        preempted_at = preempted_at or engine.totals.preemptions
    assert preempted_at
    assert seen[0] == "young"


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_output_survives_any_arena_however_tight(data: st.DataObject) -> None:
    """Tiny granules and reserves, so that growing, moving, evicting and preempting are the rule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "GRANULE", 4)
        patch.setattr(engine_module, "LEAST_ROOM", 0)
        patch.setattr(scheduler, "_RESERVE", data.draw(st.integers(1, 6), label="reserve"))
        patch.setattr(scheduler, "_WORTH_WAITING", 4)
        patch.setattr(scheduler, "_MAX_RETAINED", data.draw(st.integers(1, 6), label="retained"))
        n = data.draw(st.integers(3, 6), label="sequences")
        requests = []
        for i in range(n):
            prompt = text(1, data.draw(st.sampled_from([0, 10, 25]))) + text(
                data.draw(st.integers(2, 4)), data.draw(st.integers(1, 12))
            )
            sampled = {"temperature": data.draw(st.sampled_from([0.0, 1.0])), "seed": i}
            requests.append(ask(str(i), prompt, data.draw(st.integers(1, 30)), **sampled))
        answers = {r.id: plain(r) for r in requests}
        nodes = data.draw(st.sampled_from([1, 6]), label="nodes")
        most = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests) + nodes
        engine = build(
            StaticRouter(data.draw(st.sampled_from(["none", "random"]), label="arm")),
            {"random": tiny.ScriptedDrafter("random", answers)},
            kv_tokens=max(64, most + 3 + data.draw(st.integers(0, 30), label="spare")),
            max_running=data.draw(st.integers(2, 6), label="max_running"),
            max_draft_nodes=nodes,
            prefill_chunk=data.draw(st.sampled_from([3, 16]), label="chunk"),
        )
        results = {}
        for request in requests:
            engine.add(request)
            for _ in range(data.draw(st.integers(0, 6), label="gap")):
                for event in engine.step():
                    if event.result is not None:
                        results[event.id] = event.result
        assert_arena_is_sound(engine)
        results |= run(engine)
        assert_arena_is_sound(engine)
        for request in requests:
            result = results[request.id]
            assert result.token_ids == answers[request.id]
            assert sum(r.emitted for r in result.stats.rounds) == len(result.token_ids) - 1
        assert not engine._scheduler._awaits
