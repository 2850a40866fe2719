"""`EngineSession`: continuous batching of rows, and failures that stay with their row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted import MAX_CONTEXT, ScriptedChat, ScriptedEngine, conversation, session

from whiflash_agents.batch.plan import Row
from whiflash_agents.batch.session import EngineSession
from whiflash_agents.engine.errors import WorkerError

ECHO = str  # the answer is the question


def row(row_id: str, asked: str = "question", **fields: Any) -> Row:
    trace_id, _, turn = row_id.partition("#")
    params = fields.pop("params", {"max_tokens": 300})
    messages = fields.pop("messages", conversation(asked))
    recorded = fields.pop("recorded", None)
    return Row(row_id, trace_id, int(turn or 0), messages, [], recorded, 5, params)


def drain(running: EngineSession) -> dict[str, dict[str, Any]]:
    outputs: dict[str, dict[str, Any]] = {}
    while running.pending:
        for output in running.advance(60):
            assert output["custom_id"] not in outputs
            outputs[output["custom_id"]] = output
    return outputs


def test_rows_submitted_while_others_run_join_the_batch() -> None:
    engine = ScriptedEngine(ECHO)
    running = session(engine)
    running.submit(row("a#0", "a long question that takes many steps"))
    running.advance(0)  # one step
    running.submit(row("b#0", "short"))
    outputs = drain(running)
    assert engine.log[:2] == [("add", "a#0"), ("add", "b#0")]
    assert engine.log[2] == ("end", "b#0")
    assert set(outputs) == {"a#0", "b#0"}


def test_no_more_rows_than_slots_are_decoded_at_once() -> None:
    engine = ScriptedEngine(ECHO)
    running = session(engine, concurrency=3)
    for number in range(10):
        running.submit(row(f"{number}#0"))
    assert len(drain(running)) == 10
    assert engine.most_running == 3


def test_slot_goes_to_the_next_turn_of_the_trace_that_left_it() -> None:
    engine = ScriptedEngine(ECHO)
    running = session(engine)
    for row_id, asked in (("a#0", "long " * 9), ("b#0", "x"), ("a#1", "x"), ("b#1", "x")):
        running.submit(row(row_id, asked))
    drain(running)
    assert [row_id for what, row_id in engine.log if what == "add"] == ["a#0", "b#0", "b#1", "a#1"]


def test_a_row_whose_template_fails_becomes_a_failed_row_and_the_others_go_on() -> None:
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", "REFUSED"))
    running.submit(row("b#0", "BROKEN"))
    running.submit(row("c#0", "fine"))
    outputs = drain(running)
    assert outputs["a#0"]["error"]["type"] == "RequestError"
    assert outputs["b#0"]["error"]["type"] == "ZeroDivisionError"
    assert outputs["b#0"]["error"]["retriable"] is False
    assert outputs["c#0"]["error"] is None


def test_prompt_beyond_the_context_fails_with_both_lengths() -> None:
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", "x" * MAX_CONTEXT))
    error = drain(running)["a#0"]["error"]
    assert error["type"] == "ContextLengthError"
    assert error["retriable"] is False
    assert str(MAX_CONTEXT) in error["message"]
    assert str(MAX_CONTEXT + len("user:\n")) in error["message"]


def test_max_tokens_is_lowered_to_what_fits_behind_the_prompt_and_noted() -> None:
    asked = "x" * (MAX_CONTEXT - 20)
    room = MAX_CONTEXT - len(f"user:{asked}\n")
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", asked))
    output = drain(running)["a#0"]
    assert len(output["whiflash"]["token_ids"]) == room
    assert output["response"]["body"]["choices"][0]["finish_reason"] == "length"
    (note,) = output["whiflash"]["notes"]
    assert f"from 300 to {room}" in note


def test_min_tokens_that_do_not_fit_are_an_error_not_a_shorter_turn() -> None:
    asked = "x" * (MAX_CONTEXT - 20)
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", asked, params={"max_tokens": 300, "min_tokens": 200}))
    assert drain(running)["a#0"]["error"]["type"] == "ContextLengthError"


def test_row_seed_and_params_reach_the_engine() -> None:
    engine = ScriptedEngine(ECHO)
    running = session(engine)
    running.submit(row("a#0", params={"max_tokens": 9, "temperature": 0.5, "top_k": 3}))
    drain(running)
    (request,) = engine.requests
    assert (request.sampling.seed, request.sampling.top_k) == (5, 3)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)


@pytest.mark.parametrize(
    ("router", "recorded_drafts", "expected"),
    [("lookup", True, "hello\0"), ("lookup", False, ""), ("none", True, "")],
)
def test_recorded_turn_is_a_hint_for_lookup_only_and_can_be_switched_off(
    router: str, recorded_drafts: bool, expected: str
) -> None:
    engine = ScriptedEngine(ECHO)
    running = session(engine, router=router, recorded_drafts=recorded_drafts)
    running.submit(row("a#0", recorded={"role": "assistant", "content": "hello"}))
    drain(running)
    assert "".join(map(chr, engine.requests[0].recorded_ids)) == expected


def test_recorded_turn_that_cannot_be_written_is_noted_and_not_an_error() -> None:
    running = session(ScriptedEngine(ECHO), router="lookup")
    running.submit(row("a#0", recorded={"role": "assistant", "content": "UNWRITABLE"}))
    output = drain(running)["a#0"]
    assert output["error"] is None
    assert "not used for drafting" in output["whiflash"]["notes"][0]


@pytest.mark.parametrize("shown", [True, False])
def test_tools_that_the_chat_template_does_not_show_are_noted(
    shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedChat, "shows_tools", shown)
    running = session(ScriptedEngine(ECHO))
    running.submit(replace(row("a#0"), tools=[{"type": "function"}] * 2))
    running.submit(row("b#0"))
    outputs = drain(running)
    note = "the chat template of scripted does not show tools; 2 tools left out"
    assert outputs["a#0"]["whiflash"]["notes"] == ([] if shown else [note])
    assert outputs["b#0"]["whiflash"]["notes"] == []


def test_generation_that_ends_in_an_error_is_a_failed_row_that_may_be_retried() -> None:
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", "EXPLODE"))
    error = drain(running)["a#0"]["error"]
    assert (error["type"], error["retriable"]) == ("GenerationError", True)
    assert error["message"] == "no token is allowed"


def test_failure_of_the_engine_itself_is_a_worker_error_that_names_the_rows() -> None:
    running = session(ScriptedEngine(ECHO))
    running.submit(row("a#0", "CRASH"))
    with pytest.raises(WorkerError, match="a#0: ArithmeticError: the device is gone"):
        drain(running)


def test_advance_returns_when_its_time_is_over() -> None:
    running = session(ScriptedEngine(ECHO, delays={"a#0": 10**6}, step_seconds=0.01))
    running.submit(row("a#0"))
    assert running.advance(0.05) == []
    assert running.pending == 1
