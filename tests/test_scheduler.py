"""Who runs on which part of the arena: prefix reuse, chunked prefill, admission, preemption."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engines import ask, build, plain, run, text

from whiflash_agents.engine import kv_cache, scheduler
from whiflash_agents.engine.attention import PackedRow
from whiflash_agents.engine.engine import WhiFlashEngine
from whiflash_agents.engine.errors import ContextLengthError
from whiflash_agents.engine.kv_cache import KVCache
from whiflash_agents.engine.routing.static import StaticRouter
from whiflash_agents.engine.sequence import common_prefix_length
from whiflash_agents.engine.target import TargetBatch


def assert_arena_is_sound(engine: WhiFlashEngine) -> None:
    """Nobody shares positions, and what is said to be cached is what the tokens really give."""
    plan = engine._scheduler
    holders = [(s.extent, s.tokens[: s.num_cached]) for s in plan.running]
    holders += [(r.extent, r.tokens) for r in plan._retained]
    assert sorted(id(e) for e, _ in holders) == sorted(id(e) for e in engine._cache._extents)
    spans = sorted((e.start, e.end) for e, _ in holders if e is not None)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for extent, tokens in holders:
        assert extent is not None
        assert len(tokens) <= extent.capacity
        if not tokens:
            continue
        fresh = engine.target.new_cache(len(tokens) + kv_cache.GRANULE)
        batch = TargetBatch()
        batch.add(PackedRow(0, 0, len(tokens)), tokens, range(len(tokens)), logits_from=None)
        engine.target.forward(batch, fresh)
        arenas = zip(
            (*engine._cache.keys, *engine._cache.values), (*fresh.keys, *fresh.values), strict=True
        )
        for got, wanted in arenas:
            torch.testing.assert_close(
                got.narrow(1, extent.start, len(tokens)),
                wanted.narrow(1, 0, len(tokens)),
                atol=1e-3,
                rtol=1e-3,
            )


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions were copied, per copy within the arena."""
    counts: list[int] = []
    copy = KVCache.copy

    def counting(self: KVCache, source: Any, target: Any, start: int, end: int) -> None:
        counts.append(end - start)
        copy(self, source, target, start, end)

    monkeypatch.setattr(KVCache, "copy", counting)
    return counts


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(0, 90), st.integers(0, 90))
def test_common_prefix_is_as_long_as_the_texts_agree(
    shared: list[int], limit: int, rest: int
) -> None:
    a, b = [*shared, 5, *range(rest)], [*shared, 6, *range(rest)]
    assert common_prefix_length(a, b) == len(shared)
    assert common_prefix_length(a, b, limit) == min(limit, len(shared))
    assert common_prefix_length(a, [*a, 1]) == len(a)
    assert common_prefix_length(shared, b) == len(shared)


# Prefix reuse ------------------------------------------------------------------------------------


def test_consecutive_turns_reuse_all_of_the_previous_one_in_place(copies: list[int]) -> None:
    engine = build()
    history, prefilled = text(1, 50), 0
    for turn in range(5):
        request = ask(f"turn-{turn}", history, 10)
        result = engine.generate([request])[0]
        assert result.token_ids == plain(request)
        # All but the last token of the previous output, which no forward has taken in.
        known = 0 if turn == 0 else len(history) - 7 - 1
        assert result.cached_tokens == known
        prefilled += len(history) - known
        assert engine.totals.positions_prefilled == prefilled
        assert_arena_is_sound(engine)
        history = [*history, *result.token_ids, *text(100 + turn, 7)]
    assert copies == []


def test_a_turn_that_was_recorded_otherwise_reuses_the_prompt_in_place(copies: list[int]) -> None:
    engine = build()
    engine.generate([ask("a", text(1, 60), 30)])
    result = engine.generate([ask("b", [*text(1, 60), *text(2, 20)])])[0]
    assert result.cached_tokens == 60
    assert copies == []


@pytest.mark.parametrize("together", [2, 5])
def test_prompts_that_begin_alike_are_prefilled_once_when_they_come_together(
    together: int,
) -> None:
    engine = build()
    requests = [ask(str(i), [*text(1, 60), *text(10 + i, 5)]) for i in range(together)]
    results = engine.generate(requests)
    assert engine.totals.positions_prefilled == 60 + 5 * together
    assert [r.cached_tokens for r in results] == [0] + [60] * (together - 1)
    assert [r.token_ids for r in results] == [plain(r) for r in requests]


def test_equal_prompts_are_prefilled_once_but_for_their_last_token() -> None:
    engine = build()
    requests = [ask(str(i), text(1, 60), temperature=1.0, seed=i) for i in range(4)]
    results = engine.generate(requests)
    assert engine.totals.positions_prefilled == 60 + 3
    assert [r.token_ids for r in results] == [plain(r) for r in requests]
    assert len({tuple(r.token_ids) for r in results}) > 1


def test_nested_beginnings_are_prefilled_once_each() -> None:
    engine = build(prefill_chunk=8)
    shared = text(1, 120)
    requests = [ask(str(i), [*shared[:n], *text(10 + i, 4)]) for i, n in enumerate((40, 80, 120))]
    results = engine.generate(requests)
    assert engine.totals.positions_prefilled == 120 + 3 * 4
    assert [r.token_ids for r in results] == [plain(r) for r in requests]


def test_without_reuse_every_prompt_is_computed_and_nothing_is_kept() -> None:
    engine = build(prefix_reuse=False)
    for _ in range(2):
        results = engine.generate([ask("a", text(1, 60)), ask("b", text(1, 60))])
        assert [r.cached_tokens for r in results] == [0, 0]
    assert engine.totals.positions_prefilled == 4 * 60
    assert engine._cache.free_positions == 2048


def test_a_prefix_is_reused_while_its_owner_still_runs() -> None:
    engine = build()
    owner = ask("owner", text(1, 40), 60)
    wanted = plain(owner)
    engine.add(owner)
    for _ in range(30):
        engine.step()
    assert engine.num_running == 1
    borrowers = [ask(f"b{n}", [*text(1, 40), *wanted[:n], 7, 8], 30) for n in (0, 9)]
    for borrower in borrowers:
        engine.add(borrower)
    engine.step()
    assert_arena_is_sound(engine)
    results = run(engine)
    assert results["owner"].token_ids == wanted
    for borrower, shared in zip(borrowers, (40, 49), strict=True):
        assert results[borrower.id].cached_tokens == shared
        assert results[borrower.id].token_ids == plain(borrower)


def test_conversations_that_begin_alike_do_not_crop_one_anothers_history(
    copies: list[int],
) -> None:
    """The shared beginning is copied, since its first owner will go on with the rest."""
    engine = build(kv_tokens=4096)
    histories = [[*text(1, 100), *text(10 + i, 30)] for i in range(3)]
    prefilled = 100 + 3 * 30
    for turn in range(3):
        for i, history in enumerate(histories):
            result = engine.generate([ask(f"{i}-{turn}", history, 6)])[0]
            histories[i] = [*history, *result.token_ids, *text(50 + i + 10 * turn, 5)]
    # Each later turn computes its own 5 tokens and the one its predecessor's output ended with.
    assert engine.totals.positions_prefilled == prefilled + 2 * 3 * (5 + 1)
    assert copies == [100, 100]


def test_a_short_conversation_is_not_cropped_for_a_token_or_two() -> None:
    engine = build()
    first = engine.generate([ask("a", [5, 6, 7, 8], 40)])[0]
    assert engine.generate([ask("b", [5, 9, 9])])[0].cached_tokens == 1
    again = engine.generate([ask("c", [5, 6, 7, 8, *first.token_ids, 9])])[0]
    assert again.cached_tokens == 4 + 39


def test_where_there_is_no_room_for_a_copy_the_beginning_is_taken_over(copies: list[int]) -> None:
    engine = build(kv_tokens=256)
    engine.generate([ask("a", [*text(1, 100), *text(2, 60)])])
    request = ask("b", [*text(1, 100), *text(3, 60)])
    result = engine.generate([request])[0]
    assert result.cached_tokens == 100
    assert result.token_ids == plain(request)
    assert copies == []


def test_a_request_that_must_wait_for_room_drops_no_prefix() -> None:
    engine = build(kv_tokens=512)
    engine.generate([ask("short", text(1, 40), 8)])
    engine.add(ask("long", text(2, 150), 60))
    engine.step()
    engine.add(ask("huge", text(3, 250), 60))
    for _ in range(20):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.abort("huge")
    assert engine.generate([ask("again", text(1, 40), 8)])[0].cached_tokens == 39


def test_the_least_recently_used_prefix_is_dropped_first() -> None:
    engine = build(kv_tokens=64 * 4)
    for key, salt in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        engine.generate([ask(key, text(salt, 50))])
    assert engine.generate([ask("a2", text(1, 50))])[0].cached_tokens == 49
    engine.generate([ask("e", text(5, 50))])  # takes the place of b
    assert engine.generate([ask("a3", text(1, 50))])[0].cached_tokens == 49
    assert engine.generate([ask("b2", text(2, 50))])[0].cached_tokens == 0


def test_a_prefix_counts_as_used_when_its_beginning_is_copied() -> None:
    engine = build(kv_tokens=64 * 4)
    engine.generate([ask("a", text(1, 50))])
    engine.generate([ask("b", text(2, 50))])
    engine.generate([ask("c", [*text(1, 50)[:30], *text(3, 20)])])
    engine.generate([ask("d", text(4, 50)), ask("e", text(5, 50))])  # takes the place of b
    assert engine.generate([ask("a2", text(1, 50))])[0].cached_tokens == 49
    assert engine.generate([ask("b2", text(2, 50))])[0].cached_tokens == 0


def test_a_prefix_is_neither_dropped_nor_lost_while_its_beginning_is_copied(
    copies: list[int],
) -> None:
    """Room is made by dropping another prefix, and by moving the copied one out of the way."""
    engine = build(kv_tokens=64 * 6)
    engine.add(ask("running", text(1, 10), 40))
    engine.step()
    shared = ask("shared", [*text(2, 60), *text(3, 40)])
    borrower = ask("borrower", [*text(2, 60), *text(4, 110)])
    engine.generate([ask("dropped", text(5, 20), 2)])
    engine.generate([ask("shared", shared.prompt_ids, 2)])
    # Granules now: running, dropped, twice shared, twice free. The borrower needs three.
    assert engine.num_running == 1
    engine.add(borrower)
    engine.step()
    assert_arena_is_sound(engine)
    assert copies == [60]
    results = run(engine)
    assert results["borrower"].cached_tokens == 60
    assert results["borrower"].token_ids == plain(borrower)
    assert results["running"].token_ids == plain(ask("running", text(1, 10), 40))
    again = engine.generate([shared])[0]
    assert again.cached_tokens == 99
    assert again.token_ids == plain(shared)


def test_no_more_than_a_bounded_number_of_prefixes_is_kept() -> None:
    engine = build(kv_tokens=64 * 80)
    for i in range(70):
        engine.generate([ask(str(i), [3 + i, 5], 1)])
    assert len(engine._scheduler._retained) == 64
    assert len(engine._cache._extents) == 64


def test_a_prompt_waits_no_longer_for_one_that_was_aborted() -> None:
    engine = build()
    engine.add(ask("first", [*text(1, 100), 5]))
    second = ask("second", [*text(1, 100), 6])
    engine.add(second)
    engine.step()
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)  # it waits for the first one
    engine.abort("first")
    results = run(engine)
    assert results["second"].token_ids == plain(second)
    assert results["second"].cached_tokens == 32
    assert engine._scheduler._awaits == {}


def test_a_waiting_prompt_that_is_aborted_is_forgotten() -> None:
    engine = build()
    for key in ("first", "second"):
        engine.add(ask(key, text(1, 100)))
    engine.step()
    assert list(engine._scheduler._awaits) == ["second"]
    engine.abort("second")
    assert engine._scheduler._awaits == {}
    assert run(engine)["first"].token_ids == plain(ask("first", text(1, 100)))


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
        engine.add(ask("a", text(1, 200), 25))
    assert not engine.has_work
    request = ask("a", text(1, 200), 24)  # just fits
    engine.add(request)
    assert run(engine)["a"].token_ids == plain(request)


def test_what_fits_does_not_depend_on_the_router() -> None:
    for router in ("none", "lookup"):
        engine = build(router, kv_tokens=256, max_draft_nodes=32)
        with pytest.raises(ContextLengthError, match="needs up to 257 KV positions"):
            engine.add(ask("a", text(1, 200), 25))
        engine.add(ask("a", text(1, 200), 24))


def test_a_request_may_fill_the_context_to_its_last_position() -> None:
    request = ask("a", text(1, 480), 32)
    result = build("lookup", kv_tokens=1024, prefill_chunk=512).generate([request])[0]
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 32
    assert result.token_ids == plain(request)


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
            kv_tokens=max(64, most + data.draw(st.integers(0, 30), label="spare")),
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
