"""Output rows: the envelope that other programs read, and what it says about a turn."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from scripted import ScriptedEngine, conversation, session

from whiflash_agents.batch.plan import Row
from whiflash_agents.batch.rows import (
    agreement,
    by_span,
    encode_row,
    failed_row,
    generated_part,
    json_equal,
)
from whiflash_agents.chat import Span, Turn
from whiflash_agents.engine.telemetry import RoundRecord
from whiflash_agents.traces import ToolCall


def row(asked: str = "q", recorded: dict[str, Any] | None = None, **params: Any) -> Row:
    params = {"max_tokens": 300, **params}
    return Row("t-7#2", "t-7", 2, conversation(asked), [], recorded, 11, params)


def generate(answer: str, request: Row | None = None, **spec: Any) -> dict[str, Any]:
    """The output row of a session whose model answers `answer`."""
    running = session(ScriptedEngine(lambda asked: answer), **spec)
    running.submit(request or row())
    (output,) = running.advance(60)
    return output


def message_of(output: dict[str, Any]) -> dict[str, Any]:
    return output["response"]["body"]["choices"][0]["message"]


def test_row_has_exactly_the_keys_that_readers_rely_on() -> None:
    output = generate("<think>hm</think>yes\nCALL f {}")
    assert output.keys() == {"id", "custom_id", "response", "error", "whiflash"}
    assert output["custom_id"] == "t-7#2"
    assert output["error"] is None
    response = output["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    body = response["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["usage"].keys() == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    }
    extra = output["whiflash"]
    assert (extra["trace_id"], extra["turn"], extra["seed"]) == ("t-7", 2, 11)
    assert extra["speculative_decoding"].keys() == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_switches",
        "switch_overhead",
        "by_drafter",
        "by_span",
    }
    assert "rounds" not in extra


def test_turn_is_told_apart_into_reasoning_content_and_calls() -> None:
    output = generate('<think>hm</think>yes\nCALL f {"x": "ü", "n": 1}')
    message = message_of(output)
    assert message["role"] == "assistant"
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "yes"
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": '{"x":"ü","n":1}'}
    assert call["id"].startswith("call_")
    assert output["response"]["body"]["choices"][0]["finish_reason"] == "tool_calls"


def test_counts_of_tokens_and_spans_agree() -> None:
    output = generate("<think>hm</think>yes")
    usage, extra = output["response"]["body"]["usage"], output["whiflash"]
    assert usage["completion_tokens"] == len(extra["token_ids"]) == len("<think>hm</think>yes") + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == len("<think>hm</think>")
    assert [(s["start"], s["end"]) for s in extra["spans"]] == [(0, 17), (17, 21)]
    assert sum(group["tokens"] for group in extra["speculative_decoding"]["by_span"].values()) == 21
    details = usage["completion_tokens_details"]
    drafted = extra["speculative_decoding"]["num_draft_tokens"]
    accepted = extra["speculative_decoding"]["num_accepted_draft_tokens"]
    assert details["accepted_prediction_tokens"] == accepted > 0
    assert details["rejected_prediction_tokens"] == drafted - accepted > 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_message_without_calls_has_no_tool_calls_key() -> None:
    output = generate("plain")
    assert "tool_calls" not in message_of(output)
    assert output["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_truncated_turn_with_a_call_ends_for_length() -> None:
    output = generate("CALL f {}\nand more text", row(max_tokens=12))
    assert "tool_calls" in message_of(output)
    assert output["response"]["body"]["choices"][0]["finish_reason"] == "length"


def test_malformed_call_is_reported_beside_the_good_one_with_its_text() -> None:
    output = generate('CALL f {"a": 1}\nCALL g {oops')
    assert [c["function"]["name"] for c in message_of(output)["tool_calls"]] == ["f"]
    (invalid,) = output["whiflash"]["invalid_tool_calls"]
    assert invalid["name"] == "g"
    assert invalid["text"] == "CALL g {oops"
    assert invalid["error"]


def test_stop_string_is_not_in_the_content_though_its_tokens_are_in_the_ids() -> None:
    output = generate("one STOP two", row(stop=["STOP"]))
    assert message_of(output)["content"] == "one "
    assert output["whiflash"]["stop_reason"] == "STOP"
    text = "".join(map(chr, output["whiflash"]["token_ids"]))
    assert text in ("one STOP", "one STOP ")


def test_ids_are_the_same_in_every_run_and_differ_between_calls_and_rows() -> None:
    first, second = (generate("CALL f {}\nCALL f {}") for _ in range(2))
    assert first == second
    ids = [call["id"] for call in message_of(first)["tool_calls"]]
    assert len(set(ids)) == 2
    other = failed_row(Row("t-7#3", "t-7", 3, [], [], None, 0), "X", "x", retriable=False)
    assert other["id"] != first["id"]


def test_rounds_are_added_on_demand_with_positions_and_times() -> None:
    output = generate("abcdef", rounds=True)
    records = output["whiflash"]["rounds"]
    assert [record["position"] for record in records] == [2, 4, 6]
    assert {"drafter", "drafted", "accepted", "emitted", "backlog", "round_seconds"} <= set(
        records[0]
    )
    assert sum(record["emitted"] for record in records) + 2 == len(output["whiflash"]["token_ids"])
    assert output["whiflash"]["round_seconds"] == 1.5


def test_generated_part_leaves_out_how_and_how_fast() -> None:
    output = generate("abc", rounds=True)
    other = json.loads(json.dumps(output))
    other["whiflash"].update(seconds=9.0, round_seconds=9.0, rounds=[], notes=["x"])
    other["whiflash"]["speculative_decoding"]["num_spec_steps"] = 99
    usage = other["response"]["body"]["usage"]
    usage["prompt_tokens_details"]["cached_tokens"] = 7
    usage["completion_tokens_details"]["accepted_prediction_tokens"] = 7
    assert generated_part(other) == generated_part(output)
    other["whiflash"]["token_ids"][0] += 1
    assert generated_part(other) != generated_part(output)


def test_logprobs_have_openais_shape_and_no_infinity() -> None:
    output = generate("aé", row(logprobs=True, top_logprobs=1))
    content = output["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content[1]["token"] == "é"
    assert content[1]["bytes"] == [0xC3, 0xA9]
    assert content[1]["logprob"] == -9999.0
    assert content[1]["top_logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}]
    assert generate("a")["response"]["body"]["choices"][0]["logprobs"] is None


def test_failed_row_has_null_response_and_the_four_error_fields() -> None:
    output = failed_row(row(), "ContextLengthError", "too long", retriable=False)
    assert output["response"] is None
    assert output["error"] == {
        "type": "ContextLengthError",
        "message": "too long",
        "attempts": 1,
        "retriable": False,
    }
    assert output["whiflash"]["trace_id"] == "t-7"


def test_line_keeps_non_ascii_text_and_holds_what_orjson_refuses() -> None:
    output = failed_row(row(), "X", "grün 東京", retriable=False)
    assert "grün 東京".encode() in encode_row(output)
    output["whiflash"]["trace_id"] = "\ud800"
    output["whiflash"]["turn"] = 2**70
    line = encode_row(output)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == output


def test_arguments_with_a_lone_surrogate_stay_valid_json() -> None:
    output = generate('CALL f {"x": "\\ud800é"}')
    line = orjson.loads(encode_row(output))
    arguments = message_of(line)["tool_calls"][0]["function"]["arguments"]
    assert "é" in arguments
    assert json.loads(arguments) == {"x": "\ud800é"}


def test_round_belongs_to_the_span_of_its_first_token() -> None:
    spans = [Span("reasoning", 0, 4), Span("tool_call", 4, 10), Span("reasoning", 10, 12)]
    rounds = [RoundRecord(p, "lookup", 4, a, a + 1) for p, a in ((1, 1), (3, 2), (6, 3), (11, 0))]
    figures = by_span(rounds, spans)
    assert figures["reasoning"]["tokens"] == 6
    assert figures["reasoning"]["num_spec_steps"] == 3
    assert figures["reasoning"]["num_accepted_draft_tokens"] == 3
    assert figures["tool_call"]["mean_acceptance_length"] == 4.0
    assert by_span([], []) == {}


def recorded(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def test_agreement_compares_names_arguments_and_text() -> None:
    call = ToolCall(name="f", arguments={"a": 1, "b": [True, None]})
    turn = Turn(content=" hi\n", tool_calls=[call])
    same = recorded(
        content="hi", tool_calls=[{"name": "f", "arguments": {"b": [True, None], "a": 1.0}}]
    )
    assert agreement(turn, same) == {"tool_name": True, "arguments": True, "text": True}
    other = recorded(content="ho", tool_calls=[{"name": "g", "arguments": {"a": 2}}])
    assert agreement(turn, other) == {"tool_name": False, "arguments": False, "text": False}
    none = recorded(content="hi")
    assert agreement(turn, none) == {"tool_name": False, "arguments": False, "text": True}


def test_agreement_reads_recorded_arguments_that_are_a_string_of_json() -> None:
    turn = Turn(tool_calls=[ToolCall(name="f", arguments={"a": 1})])
    text = recorded(tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])
    assert agreement(turn, text) == {"tool_name": True, "arguments": True, "text": None}


def test_agreement_says_nothing_where_there_is_nothing_to_compare() -> None:
    assert agreement(Turn(content="x"), None) is None
    both = agreement(Turn(content="x"), recorded(content="x"))
    assert both == {"tool_name": None, "arguments": None, "text": True}


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [2, 1], False),
        ("1", 1, False),
        (None, False, False),
    ],
)
def test_json_equality_tells_true_from_one(left: Any, right: Any, equal: bool) -> None:
    assert json_equal(left, right) is equal
