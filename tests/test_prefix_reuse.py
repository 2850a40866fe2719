"""Keys and values computed once serve every prompt that begins alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_drafters
from hypothesis import given
from hypothesis import strategies as st
from small_engines import ask, assert_arena_is_sound, build, plain, run, text

from whiflash_agents.engine.drafters.registry import neural_drafters
from whiflash_agents.engine.kv_cache import KVCache
from whiflash_agents.engine.sequence import common_prefix_length


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


@pytest.mark.parametrize("arm", ["eagle3", "dflash", "ddtree"])
def test_prompts_that_outgrew_a_drafter_share_a_prefix_that_starts_in_the_same_step(
    arm: str,
) -> None:
    """The second builds on the first before that has computed anything of its own."""
    layer = tiny_drafters.layers(max_positions=64)
    arms = neural_drafters(
        eagle3=tiny_drafters.eagle3(layer=layer),
        dflash=tiny_drafters.dflash(layer=replace(layer, num_layers=2)),
    )
    engine = build(arm, arms)
    base = text(1, 100)
    engine.generate([ask("first", base, 4)])
    requests = [ask(f"next-{i}", [*base, *text(2 + i, 4)], 8) for i in range(3)]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.token_ids == plain(request)
        assert any("max_position_embeddings of 64" in note for note in result.stats.notes)
