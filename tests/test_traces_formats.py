"""Each trace format is recognised and read; what cannot be read is told by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whiflash_agents.engine.errors import TraceError
from whiflash_agents.traces import FORMATS, RecordError, ToolCall, Trace, read_traces
from whiflash_agents.traces.formats import detect_format

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def parse(record: Any, expected_format: str) -> Trace:
    found = detect_format(record)
    assert found.name == expected_format
    assert [f.name for f in FORMATS.values() if f.sniff(record)] == [expected_format]
    return found.parse(record, "default")


def refused(record: Any, format: str | None = None) -> RecordError:
    with pytest.raises(RecordError) as caught:
        (FORMATS[format] if format else detect_format(record)).parse(record, "default")
    return caught.value


def turn(**message: Any) -> Any:
    return parse({"messages": [USER, {"role": "assistant", **message}]}, "openai").messages[1]


class TestOpenAI:
    def test_messages_tools_and_the_rest_of_the_record(self) -> None:
        trace = parse(
            {
                "id": "t",
                "model": "m",
                "messages": [
                    {"role": "developer", "content": "be brief"},
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None},
                    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "1"},
                ],
                "tools": [TOOL],
            },
            "openai",
        )
        assert trace.id == "t"
        assert [m.role for m in trace.messages] == ["system", "user", "assistant", "tool"]
        assert trace.messages[2].tool_calls == [ToolCall(id="c1", name="add", arguments={"a": 1})]
        assert trace.messages[3].tool_call_id == "c1"
        assert trace.tools == [TOOL]
        assert trace.metadata == {"model": "m"}
        assert trace.assistant_turns == [2]

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
    def test_reasoning_under_either_key(self, key: str) -> None:
        assert turn(content="x", **{key: "because"}).reasoning_content == "because"

    @pytest.mark.parametrize(
        ("recorded", "read"),
        [
            ('{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
            ({"a": 1}, {"a": 1}),
            ("", {}),
            (None, {}),
            ("[1]", "[1]"),
            ('{"a": ', '{"a": '),
            ('"{\\"a\\": 1}"', '"{\\"a\\": 1}"'),
            ('{"a": NaN}', '{"a": NaN}'),
        ],
    )
    def test_arguments_are_an_object_or_kept_verbatim(self, recorded: Any, read: Any) -> None:
        call = {"id": "c", "function": {"name": "f", "arguments": recorded}}
        assert turn(tool_calls=[call]).tool_calls[0].arguments == read

    def test_text_parts_are_joined_and_thinking_parts_are_reasoning(self) -> None:
        parts = [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "a"},
            "b",
            {"type": "refusal", "refusal": "c"},
        ]
        message = turn(content=parts)
        assert (message.content, message.reasoning_content) == ("abc", "hm")

    def test_other_parts_are_refused_by_name(self) -> None:
        content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]
        error = refused({"messages": [{"role": "user", "content": content}]})
        assert error.field == "messages[0].content[1]"
        assert "'image_url'" in error.message
        assert "remove the part" in error.remedy

    def test_a_refusal_stands_in_for_missing_content(self) -> None:
        assert turn(content=None, refusal="I cannot").content == "I cannot"

    def test_function_call_and_role_function(self) -> None:
        trace = parse(
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "function_call": {"name": "f", "arguments": '{"x": 2}'},
                    },
                    {"role": "function", "name": "f", "content": "4"},
                ],
                "functions": [{"name": "f", "parameters": {"type": "object"}}],
            },
            "openai",
        )
        assert trace.messages[1].tool_calls == [ToolCall(name="f", arguments={"x": 2})]
        assert trace.messages[2].role == "tool"
        assert trace.tools[0]["function"]["name"] == "f"

    def test_null_fields_are_as_good_as_missing_ones(self) -> None:
        nothing = {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning": None}
        trace = parse({"messages": [{**USER, **nothing}], "tools": None}, "openai")
        assert trace == parse({"messages": [USER]}, "openai")

    def test_a_bare_list_is_a_trace(self) -> None:
        assert len(parse([USER, {"role": "assistant", "content": "x"}], "openai").messages) == 2

    @pytest.mark.parametrize(
        "tools",
        [
            [TOOL],
            [TOOL["function"]],
            json.dumps([TOOL]),
            [{"name": "add", "input_schema": {"type": "object"}}],
        ],
    )
    def test_tools_in_each_form(self, tools: Any) -> None:
        trace = parse({"messages": [USER], "tools": tools}, "openai")
        assert trace.tools == [TOOL]

    @pytest.mark.parametrize(
        ("record", "field"),
        [
            ({"messages": {}}, "messages"),
            ({"messages": ["hi"]}, "messages[0]"),
            ({"messages": [USER, {"role": "wizard"}]}, "messages[1].role"),
            ({"messages": [{"role": ["user"]}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
            ({"messages": [{**USER, "name": 3}]}, "messages[0].name"),
            ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
            (
                {"messages": [{"role": "assistant", "tool_calls": "x"}]},
                "messages[0].tool_calls",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [CALL, {"function": {}}]}]},
                "messages[0].tool_calls[1].function.name",
            ),
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [{"function": {"name": "f", "arguments": 1}}],
                        }
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
            ),
            ({"messages": [USER], "tools": [{"function": {}}]}, "tools[0].function"),
            (
                {"messages": [USER], "tools": [{"name": "f", "parameters": []}]},
                "tools[0].parameters",
            ),
            ({"messages": [USER], "tools": 3}, "tools"),
            ({"id": [], "messages": [USER]}, "id"),
            (
                {"messages": [{"role": "assistant", "reasoning_content": 1}]},
                "messages[0].reasoning_content",
            ),
        ],
    )
    def test_wrong_types_are_told_by_field(self, record: Any, field: str) -> None:
        assert refused(record, "openai").field == field

    def test_written_traces_read_back_equal(self) -> None:
        record = {
            "id": "t",
            "seed": 4,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "ok",
                    "reasoning_content": "é",
                    "tool_calls": [CALL],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
            ],
            "tools": [TOOL],
        }
        trace = parse(record, "openai")
        assert parse(json.loads(json.dumps(trace.to_openai())), "openai") == trace


class TestOpenAIBatch:
    def test_body_and_custom_id(self) -> None:
        trace = parse(
            {
                "custom_id": "row-1",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "temperature": 0, "messages": [USER], "tools": [TOOL]},
            },
            "openai-batch",
        )
        assert trace.id == "row-1"
        assert trace.tools == [TOOL]
        assert trace.metadata == {"model": "m", "temperature": 0}

    def test_other_endpoints_are_refused(self) -> None:
        error = refused({"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "x"}})
        assert error.field == "url"

    @pytest.mark.parametrize("body", [None, {}, {"prompt": "x"}, []])
    def test_a_body_without_messages_is_refused(self, body: Any) -> None:
        assert refused({"custom_id": "a", "body": body}).field == "body.messages"

    def test_fields_are_told_with_body(self) -> None:
        error = refused({"body": {"messages": [{"role": "x"}]}})
        assert error.field == "body.messages[0].role"
        error = refused({"body": {"messages": [USER], "tools": [3]}})
        assert error.field == "body.tools[0]"


LANGCHAIN_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("SystemMessage", "system", {"content": "s"}),
    ("HumanMessage", "human", {"content": [{"type": "text", "text": "2+2?"}]}),
    (
        "AIMessage",
        "ai",
        {
            "content": "",
            "additional_kwargs": {"reasoning_content": "easy"},
            "tool_calls": [{"name": "add", "args": {"a": 2}, "id": "c1", "type": "tool_call"}],
            "invalid_tool_calls": [{"name": "sub", "args": "{oops", "id": "c2", "error": "x"}],
        },
    ),
    ("ToolMessage", "tool", {"content": "4", "tool_call_id": "c1", "status": "success"}),
    ("ToolMessage", "tool", {"content": "bad", "tool_call_id": "c2", "status": "error"}),
    ("AIMessage", "ai", {"content": [{"type": "text", "text": "4", "index": 0}]}),
]


def langchain_messages(form: str) -> list[dict[str, Any]]:
    if form == "dumpd":
        return [
            {
                "lc": 1,
                "type": "constructor",
                "id": ["langchain", "schema", "messages", name],
                "kwargs": {**fields, "type": kind},
            }
            for name, kind, fields in LANGCHAIN_FIELDS
        ]
    if form == "messages_to_dict":
        return [{"type": kind, "data": fields} for _, kind, fields in LANGCHAIN_FIELDS]
    return [{"type": kind, **fields} for _, kind, fields in LANGCHAIN_FIELDS]


class TestLangChain:
    @pytest.mark.parametrize("form", ["dumpd", "messages_to_dict", "plain"])
    @pytest.mark.parametrize("as_list", [True, False])
    def test_each_form(self, form: str, as_list: bool) -> None:
        messages = langchain_messages(form)
        record = messages if as_list else {"messages": messages, "thread": 7}
        trace = parse(record, "langchain")
        roles = [message.role for message in trace.messages]
        assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
        assert trace.messages[1].content == "2+2?"
        assert trace.messages[2].reasoning_content == "easy"
        assert trace.messages[2].tool_calls == [
            ToolCall(id="c1", name="add", arguments={"a": 2}),
            ToolCall(id="c2", name="sub", arguments="{oops"),
        ]
        assert trace.messages[4].tool_call_id == "c2"
        assert trace.messages[5].content == "4"
        assert trace.metadata == ({} if as_list else {"thread": 7})

    def test_dumps_made_by_langchain_itself(self) -> None:
        messages = pytest.importorskip("langchain_core.messages")
        load = pytest.importorskip("langchain_core.load")
        history = [
            messages.HumanMessage("hi"),
            messages.AIMessage(
                "", tool_calls=[{"name": "f", "args": {"x": "é"}, "id": "c", "type": "tool_call"}]
            ),
            messages.ToolMessage("ok", tool_call_id="c"),
            messages.AIMessageChunk("done"),
        ]
        dumped = parse(json.loads(load.dumps(history)), "langchain")
        to_dict = parse(json.loads(json.dumps(messages.messages_to_dict(history))), "langchain")
        plain = parse([json.loads(m.model_dump_json()) for m in history], "langchain")
        assert dumped.messages == to_dict.messages == plain.messages
        assert dumped.messages[1].tool_calls == [ToolCall(id="c", name="f", arguments={"x": "é"})]
        assert [m.role for m in dumped.messages] == ["user", "assistant", "tool", "assistant"]

    def test_calls_in_content_blocks_count_once(self) -> None:
        block = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
        only_block = parse([{"type": "ai", "content": [block]}], "langchain")
        both = parse(
            [
                {
                    "type": "ai",
                    "content": [block],
                    "tool_calls": [{"id": "c", "name": "f", "args": {"x": 1}}],
                }
            ],
            "langchain",
        )
        assert only_block.messages == both.messages
        assert len(both.messages[0].tool_calls) == 1

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([{"type": "human", "content": "x"}, {"type": "remove", "id": "1"}], "[1].type"),
            ([{"type": "human", "content": 5}], "[0].content"),
            ([{"type": "ai", "data": {"tool_calls": [{}]}}], "[0].data.tool_calls[0].name"),
            ([{"lc": 1, "id": ["os", "system"], "kwargs": {}}], "[0].id"),
            ([{"lc": 1, "id": ["AIMessage"], "kwargs": 3}], "[0].kwargs"),
            (
                [{"lc": 1, "id": ["AIMessage"], "kwargs": {"content": [{"type": "image"}]}}],
                "[0].kwargs.content[0]",
            ),
        ],
    )
    def test_what_cannot_be_read_is_told_by_field(self, messages: Any, field: str) -> None:
        assert refused(messages, "langchain").field == field


def gpt(value: str) -> Any:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": value}]
    return parse({"conversations": turns}, "sharegpt").messages[1]


class TestShareGPT:
    def test_hermes_conversation(self) -> None:
        tools = json.dumps([TOOL])
        trace = parse(
            {
                "id": "h",
                "category": "maths",
                "conversations": [
                    {
                        "from": "system",
                        "value": "Signatures are within <tools> </tools> tags:\n"
                        f"<tools>{tools}</tools>\nBe brief.",
                    },
                    {"from": "human", "value": "1+1? 2+2?"},
                    {
                        "from": "gpt",
                        "value": "<think>\ntwo sums\n</think>\nLet me see.\n<tool_call>\n"
                        '{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
                        "{'arguments': {'a': 2, 'ok': True, 'no': None}, 'name': 'add'}\n"
                        "</tool_call>",
                    },
                    {
                        "from": "tool",
                        "value": "<tool_response>\n2\n</tool_response>\n"
                        "<tool_response>\n4\n</tool_response>",
                    },
                    {"from": "gpt", "value": "2 and 4"},
                ],
            },
            "sharegpt",
        )
        assert trace.id == "h"
        assert trace.tools == [TOOL]
        assert trace.messages[0].content == (
            "Signatures are within <tools> </tools> tags:\nBe brief."
        )
        assert trace.messages[2].reasoning_content == "two sums"
        assert trace.messages[2].content == "Let me see."
        assert trace.messages[2].tool_calls == [
            ToolCall(name="add", arguments={"a": 1}),
            ToolCall(name="add", arguments={"a": 2, "ok": True, "no": None}),
        ]
        assert [m.content for m in trace.messages[3:5]] == ["2", "4"]
        assert trace.metadata == {"category": "maths"}

    @pytest.mark.parametrize("quote", ["json", "python"])
    def test_a_closing_tag_inside_a_string_does_not_end_the_call(self, quote: str) -> None:
        body = {"name": "say", "arguments": {"text": "use </tool_call> or <tool_call> here"}}
        text = json.dumps(body) if quote == "json" else repr(body)
        message = gpt(f"<tool_call>{text}</tool_call>")
        assert message.tool_calls[0].arguments == body["arguments"]
        assert message.content is None

    def test_a_malformed_call_stays_in_the_text_beside_what_parsed(self) -> None:
        message = gpt(
            'A <tool_call>{"name": "f", </tool_call> '
            '<tool_call>{"name": "g", "arguments": {}}</tool_call> B'
        )
        assert [call.name for call in message.tool_calls] == ["g"]
        assert message.content.startswith('A <tool_call>{"name": "f", </tool_call>')
        assert message.content.endswith("B")

    def test_nothing_in_a_call_is_executed(self, tmp_path: Path) -> None:
        target = tmp_path / "touched"
        message = gpt(f"<tool_call>open({str(target)!r}, 'w').close() or {{}}</tool_call>")
        assert not target.exists()
        assert message.tool_calls == []

    def test_hostile_text_is_read_in_linear_time(self) -> None:
        text = "<tool_call>" * 100_000 + "</tool_call>"
        assert gpt(text).content == text
        text = "<tool_call>" + "[" * 50_000 + "</tool_call>"
        assert gpt(text).content == text
        text = "<tool_call>" + "-" * 50_000 + "1</tool_call>"
        assert gpt(text).content == text

    def test_function_call_turns_and_the_records_own_tools_and_system(self) -> None:
        trace = parse(
            {
                "system": "S",
                "tools": json.dumps([TOOL["function"]]),
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "one"},
                ],
            },
            "sharegpt",
        )
        roles = [message.role for message in trace.messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        assert trace.messages[2].tool_calls == [ToolCall(name="add", arguments={"a": 1})]
        assert trace.tools == [TOOL]

    @pytest.mark.parametrize(
        ("turns", "field"),
        [
            ({}, "conversations"),
            ([1], "conversations[0]"),
            ([{"from": "cat", "value": "x"}], "conversations[0].from"),
            ([{"from": "gpt", "value": None}], "conversations[0].value"),
            ([{"from": "function_call", "value": "f(x)"}], "conversations[0].value"),
            ([{"from": "function_call", "value": "{}"}], "conversations[0].value.name"),
        ],
    )
    def test_what_cannot_be_read_is_told_by_field(self, turns: Any, field: str) -> None:
        assert refused({"conversations": turns}).field == field


class TestTauBench:
    def test_id_and_metadata(self) -> None:
        trace = parse(
            {"task_id": 3, "trial": 1, "reward": 1.0, "info": {}, "traj": [USER]}, "tau-bench"
        )
        assert trace.id == "tau-3-trial-1"
        assert trace.metadata == {"task_id": 3, "trial": 1, "reward": 1.0}

    def test_without_trial_the_default_id_is_used(self) -> None:
        assert parse({"task_id": 3, "traj": [USER]}, "tau-bench").id == "default"

    def test_fields_are_told_with_traj(self) -> None:
        assert refused({"traj": [USER, {"role": "x"}]}).field == "traj[1].role"


class TestSweAgent:
    @pytest.mark.parametrize("as_repr", [False, True])
    def test_function_calling(self, as_repr: bool) -> None:
        calls: Any = [CALL]
        ids: Any = ["c1"]
        trace = parse(
            {
                "environment": "main",
                "trajectory": [],
                "info": {"exit_status": "submitted", "submission": "diff"},
                "history": [
                    {"role": "system", "content": "S", "agent": "main"},
                    {"role": "user", "content": [{"type": "text", "text": "issue"}]},
                    {
                        "role": "assistant",
                        "content": "",
                        "thought": "look",
                        "action": "ls",
                        "tool_calls": repr(calls) if as_repr else calls,
                        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
                    },
                    {
                        "role": "tool",
                        "content": "a.py",
                        "tool_call_ids": repr(ids) if as_repr else ids,
                    },
                ],
            },
            "swe-agent",
        )
        assert trace.messages[1].content == "issue"
        assert trace.messages[2].content == "look"
        assert trace.messages[2].reasoning_content == "hm"
        assert trace.messages[2].tool_calls == [ToolCall(id="c1", name="add", arguments={"a": 1})]
        assert trace.messages[3].tool_call_id == "c1"
        assert trace.metadata == {"environment": "main", "exit_status": "submitted"}

    def test_thought_and_action(self) -> None:
        text = "I look.\n```\nls\n```"
        history = [
            {"role": "user", "content": "issue"},
            {"role": "assistant", "content": text, "thought": "I look.", "action": "ls"},
        ]
        trace = parse({"history": history}, "swe-agent")
        assert trace.messages[1].content == text
        assert trace.messages[1].reasoning_content is None

    @pytest.mark.parametrize(
        ("entry", "field"),
        [
            ({"role": "assistant", "content": "", "thought": 3}, "history[0].thought"),
            ({"role": "tool", "tool_call_ids": ["a", "b"]}, "history[0].tool_call_ids"),
            ({"role": "assistant", "tool_calls": "[f()]"}, "history[0].tool_calls"),
            ({"role": "assistant", "tool_calls": "[{1, 2}]"}, "history[0].tool_calls"),
            ({"role": "assistant", "thinking_blocks": "x"}, "history[0].thinking_blocks"),
            (7, "history[0]"),
        ],
    )
    def test_what_cannot_be_read_is_told_by_field(self, entry: Any, field: str) -> None:
        assert refused({"history": [entry]}).field == field


class TestDetection:
    def test_an_unknown_record_names_what_was_looked_for(self) -> None:
        error = refused({"prompt": "x", "completion": "y"})
        assert "completion, prompt" in error.message
        for known in FORMATS.values():
            assert known.looks_for in error.message
            assert known.name in error.message
        assert "--format" in error.remedy

    @pytest.mark.parametrize("record", [3, "x", None, True, [], [1], {}])
    def test_a_record_of_no_format_is_refused(self, record: Any) -> None:
        assert "no known format" in refused(record).message

    @pytest.mark.parametrize("name", sorted(FORMATS))
    @pytest.mark.parametrize("record", [3, None, [], {}, {"x": 1}])
    def test_a_named_format_refuses_what_it_cannot_read(self, name: str, record: Any) -> None:
        if record == [] and name in ("openai", "langchain"):
            assert FORMATS[name].parse(record, "d").messages == []
        else:
            assert refused(record, name).message

    def test_an_unknown_format_name_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="expected one of langchain, openai"):
            list(read_traces([tmp_path / "x.jsonl"], format="csv"))

    def test_the_named_formats_are_those_documented(self) -> None:
        expected = {"openai", "openai-batch", "langchain", "sharegpt", "tau-bench", "swe-agent"}
        assert set(FORMATS) == expected
