"""Streams and aborts: who gets which events, and what stays behind."""

from __future__ import annotations

import pytest
import tiny
from small_engines import ask, assert_idle, build, plain, run

from whiflash_agents.engine.request import Event

# Streaming ---------------------------------------------------------------------------------------


def test_a_stream_gives_the_tokens_as_they_come_and_the_result_last() -> None:
    engine = build()
    events = list(engine.stream(ask("a", max_tokens=10)))
    assert [len(e.token_ids) for e in events] == [1] * 10
    assert all(e.result is None for e in events[:-1])
    result = events[-1].result
    assert result is not None
    assert (
        result.token_ids
        == [t for e in events for t in e.token_ids]
        == plain(ask("a", max_tokens=10))
    )
    assert_idle(engine)


def test_closing_a_stream_early_aborts_its_request_only() -> None:
    engine = build()
    engine.add(ask("other", [9, 8], 12))
    stream = engine.stream(ask("a", max_tokens=100))
    for _ in range(5):
        next(stream)
    stream.close()
    assert engine.num_running == 1
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    assert {e.id for e in events} == {"other"}
    assert [t for e in events for t in e.token_ids] == plain(ask("other", [9, 8], 12))
    assert_idle(engine)


def test_a_stream_that_was_never_started_asks_for_nothing() -> None:
    engine = build()
    engine.stream(ask("a")).close()
    assert_idle(engine)


def test_two_interleaved_streams_do_not_mix() -> None:
    engine = build()
    requests = {"a": ask("a", [5, 6], 9), "b": ask("b", [7, 8], 15)}
    streams = {key: engine.stream(request) for key, request in requests.items()}
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for key in ("a", "b", "b") * 15:
        event = next(streams[key], None)
        if event is not None:
            assert event.id == key
            tokens[key] += event.token_ids
    assert tokens == {key: plain(request) for key, request in requests.items()}
    assert_idle(engine)


def test_requests_that_were_added_go_on_beside_a_stream() -> None:
    engine = build()
    added = {"x": ask("x", [9], 6), "y": ask("y", [8], 30)}
    for request in added.values():
        engine.add(request)
    tokens: dict[str, list[int]] = {"x": [], "y": [], "s": []}

    def step() -> None:
        for event in engine.step():
            assert event.id != "s"
            tokens[event.id] += event.token_ids

    step()
    for count, event in enumerate(engine.stream(ask("s", max_tokens=20))):
        assert event.id == "s"
        tokens["s"] += event.token_ids
        if count % 3 == 0:
            step()
    while engine.has_work:
        step()
    assert tokens == {key: plain(r) for key, r in (added | {"s": ask("s", max_tokens=20)}).items()}


def test_an_id_may_be_streamed_again_before_the_last_events_were_read() -> None:
    engine = build()
    first = engine.stream(ask("a", max_tokens=4))
    got = list(next(first).token_ids)
    engine.generate([ask("other", max_tokens=30)])  # meanwhile the first one ends, unread
    second = engine.stream(ask("a", [9, 8], 5))
    again = list(next(second).token_ids)
    got += [t for e in first for t in e.token_ids]
    again += [t for e in second for t in e.token_ids]
    assert got == plain(ask("a", max_tokens=4))
    assert again == plain(ask("a", [9, 8], 5))
    assert_idle(engine)


def test_an_aborted_stream_ends_with_its_result() -> None:
    engine = build()
    stream = engine.stream(ask("a", max_tokens=50))
    tokens = next(stream).token_ids + next(stream).token_ids
    engine.abort("a")
    events = list(stream)
    assert events[-1].result is not None
    assert events[-1].result.finish_reason == "abort"
    assert events[-1].result.token_ids == tokens
    assert_idle(engine)


# Aborting ----------------------------------------------------------------------------------------


def test_aborting_a_running_request_returns_its_tokens_and_disturbs_nobody() -> None:
    engine = build("lookup", prefix_reuse=False)
    engine.add(ask("a", [5, 6, 7], 50))
    engine.add(ask("b", [9, 8, 7], 20))
    events = [e for _ in range(6) for e in engine.step()]
    free = engine._cache.free_positions
    engine.abort("a")
    assert engine._cache.free_positions > free
    results = run(engine)
    assert results["a"].finish_reason == "abort"
    assert results["a"].token_ids == [t for e in events if e.id == "a" for t in e.token_ids]
    assert results["a"].token_ids == plain(ask("a", [5, 6, 7], 50))[: len(results["a"].token_ids)]
    assert results["b"].token_ids == plain(ask("b", [9, 8, 7], 20))
    engine.add(ask("a", [4, 4], 5))
    assert run(engine)["a"].token_ids == plain(ask("a", [4, 4], 5))
    assert engine._cache.free_positions == engine._cache.positions


def test_aborting_a_waiting_request_gives_its_turn_to_the_next() -> None:
    engine = build(max_running=1)
    for key in ("running", "waiting", "next"):
        engine.add(ask(key, max_tokens=5))
    engine.step()
    engine.abort("waiting")
    assert engine.num_waiting == 1
    results = run(engine)
    assert results["waiting"].token_ids == []
    assert results["waiting"].finish_reason == "abort"
    assert results["waiting"].seconds == 0.0
    assert results["next"].token_ids == plain(ask("next", max_tokens=5))


def test_aborting_in_the_middle_of_a_prompt_keeps_what_was_computed() -> None:
    engine = build()
    engine.add(ask("a", range(3, 63)))
    engine.step()
    engine.step()
    engine.abort("a")
    assert run(engine)["a"].token_ids == []
    result = engine.generate([ask("b", range(3, 63))])[0]
    assert result.cached_tokens == 32
    assert result.token_ids == plain(ask("b", range(3, 63)))


def test_aborting_what_is_not_there_says_so() -> None:
    engine = build()
    with pytest.raises(KeyError, match="nobody"):
        engine.abort("nobody")
    engine.generate([ask("a")])
    with pytest.raises(KeyError, match="a"):
        engine.abort("a")


def test_the_text_of_an_aborted_request_ends_with_its_tokens() -> None:
    """What was held back as the possible beginning of a stop string is released."""
    answer = plain(ask("a", max_tokens=6))
    held = tiny.text_of(answer[:3])
    engine = build()
    engine.add(ask("a", max_tokens=6, stop=[held + "~~"]))
    texts = [e.text for _ in range(3) for e in engine.step()]
    assert texts == ["", "", ""]
    engine.abort("a")
    event = engine.step()[0]
    assert event.result is not None
    assert event.text == event.result.text == held == tiny.text_of(event.result.token_ids)
