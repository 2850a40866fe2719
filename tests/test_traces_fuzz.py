"""Properties over random traces: each format reads back what was written in it, and no line of
whatever content raises anything but a TraceProblem."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from whiflash_agents.traces import FORMATS, Message, ToolCall, Trace, TraceProblem, scan_traces

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NAME = st.text("abcdefg_é", min_size=1, max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
TOOLS = st.lists(
    st.builds(
        lambda name, properties: {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": properties},
            },
        },
        NAME,
        OBJECT,
    ),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn, *, ids: bool = True, markup: bool = False) -> list[Message]:
    """A sound conversation. Without `ids`, calls have none; with `markup`, white space at the
    ends of an assistant's text, which is part of the Hermes markup, is left out."""

    def assistant_text() -> str:
        text = draw(TEXT)
        return text.replace("<", "").strip() if markup else text

    messages = [Message(role="user", content=draw(TEXT.filter(bool)))]
    for number in range(draw(st.integers(0, 3))):
        reasoning = draw(st.none() | NAME)
        names = draw(st.lists(NAME, max_size=2))
        calls = [
            ToolCall(id=f"c{number}.{i}" if ids else None, name=name, arguments=draw(OBJECT))
            for i, name in enumerate(names)
        ]
        text: str | None = assistant_text()
        if calls and not text:
            text = None
        messages.append(
            Message(role="assistant", content=text, reasoning_content=reasoning, tool_calls=calls)
        )
        for call in calls:
            answer = draw(NAME)
            messages.append(Message(role="tool", content=answer, tool_call_id=call.id))
        messages.append(Message(role="user", content=draw(TEXT.filter(bool))))
    return messages


def read_back(record: Any, format: str) -> Trace:
    """Through bytes and detection, as from a file."""
    data = json.dumps(record, ensure_ascii=False).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(data + b"\n")
        (item,) = scan_traces([path])
        assert isinstance(item, Trace), str(item)
        (named,) = scan_traces([path], format=format)
    assert named == item
    return item


def openai_messages(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.to_openai() for message in messages]


@settings(max_examples=60, deadline=None)
@given(conversations(), TOOLS, st.dictionaries(NAME, JSON, max_size=2))
def test_openai_round_trip(
    messages: list[Message], tools: list[dict[str, Any]], metadata: dict[str, Any]
) -> None:
    trace = Trace(id="t", messages=messages, tools=tools, metadata=metadata)
    assert read_back(trace.to_openai(), "openai") == trace


@settings(max_examples=40, deadline=None)
@given(conversations(), TOOLS)
def test_batch_tau_and_swe_round_trip(messages: list[Message], tools: list[dict[str, Any]]) -> None:
    recorded = openai_messages(messages)
    batch = read_back(
        {"custom_id": "t", "body": {"messages": recorded, "tools": tools}}, "openai-batch"
    )
    tau = read_back({"task_id": 1, "trial": 0, "traj": recorded, "tools": tools}, "tau-bench")
    assert batch.messages == tau.messages == messages
    assert batch.tools == tau.tools == tools
    assert (batch.id, tau.id) == ("t", "tau-1-trial-0")
    history = []
    for message in recorded:
        entry = dict(message)
        if "tool_call_id" in entry:
            entry["tool_call_ids"] = repr([entry.pop("tool_call_id")])
        if "tool_calls" in entry:
            entry["tool_calls"] = repr(entry["tool_calls"])
        history.append(entry)
    assert read_back({"history": history}, "swe-agent").messages == messages


@settings(max_examples=40, deadline=None)
@given(conversations(), st.sampled_from(["dumpd", "messages_to_dict", "plain"]))
def test_langchain_round_trip(messages: list[Message], form: str) -> None:
    kinds = {"user": "human", "assistant": "ai", "tool": "tool"}
    classes = {"user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}
    record = []
    for message in messages:
        fields: dict[str, Any] = {"content": message.content}
        if message.role == "assistant":
            fields["additional_kwargs"] = {"reasoning_content": message.reasoning_content}
            fields["tool_calls"] = [
                {"name": call.name, "args": call.arguments, "id": call.id, "type": "tool_call"}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id
        kind = kinds[message.role]
        if form == "dumpd":
            path = ["langchain", "schema", "messages", classes[message.role]]
            record.append({"lc": 1, "type": "constructor", "id": path, "kwargs": fields})
        elif form == "messages_to_dict":
            record.append({"type": kind, "data": fields})
        else:
            record.append({"type": kind, **fields})
    assert read_back(record, "langchain").messages == messages


@settings(max_examples=60, deadline=None)
@given(conversations(ids=False, markup=True), TOOLS, st.booleans())
def test_sharegpt_round_trip(
    messages: list[Message], tools: list[dict[str, Any]], python: bool
) -> None:
    write = repr if python else json.dumps
    speakers = {"user": "human", "assistant": "gpt", "tool": "tool"}
    turns = []
    for message in messages:
        value = message.content or ""
        if message.role == "tool":
            value = f"<tool_response>\n{value}\n</tool_response>"
        for call in message.tool_calls:
            body = write({"name": call.name, "arguments": call.arguments})
            value += f"\n<tool_call>\n{body}\n</tool_call>"
        if message.reasoning_content is not None:
            value = f"<think>\n{message.reasoning_content}\n</think>\n{value}"
        turns.append({"from": speakers[message.role], "value": value})
    record = {"conversations": turns, "tools": json.dumps(tools)}
    trace = read_back(record, "sharegpt")
    assert trace.messages == messages
    assert trace.tools == tools


def scan_bytes(data: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{suffix}"
        path.write_bytes(data)
        for format in (None, *FORMATS):
            for item in scan_traces([path], format=format, warnings=True):
                if isinstance(item, Trace):
                    orjson.dumps(item.to_openai())  # what was read can be written
                else:
                    assert isinstance(item, TraceProblem)
                    assert item.remedy
                    assert str(item)


KEYS = st.sampled_from(
    [
        "messages",
        "traj",
        "history",
        "conversations",
        "body",
        "role",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "from",
        "value",
        "type",
        "data",
        "kwargs",
        "lc",
        "id",
        "text",
        "args",
        "tools",
        "parameters",
        "tool_call_id",
        "tool_call_ids",
        "thought",
        "thinking_blocks",
        "function_call",
        "reasoning",
        "additional_kwargs",
        "invalid_tool_calls",
        "custom_id",
        "task_id",
        "trial",
        "system",
        "url",
    ]
)
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "tool",
        "system",
        "human",
        "ai",
        "gpt",
        "function_call",
        "constructor",
        "text",
        "thinking",
        "tool_use",
        "<tool_call>",
        "</tool_call>",
        "<tools>[{}]</tools>",
        "[{}]",
        "{}",
        "{'name':'f'}",
        "<think>",
        "AIMessage",
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
RECORDS = st.dictionaries(
    st.sampled_from(["messages", "traj", "history", "conversations", "body", "tools", "id"]),
    st.lists(st.dictionaries(KEYS, ODD, max_size=4), max_size=3) | ODD,
    max_size=3,
)


@settings(max_examples=250, deadline=None)
@given(st.lists(RECORDS | ODD, max_size=3), st.booleans())
def test_no_json_raises(records: list[Any], as_list: bool) -> None:
    if as_list:
        scan_bytes(json.dumps(records).encode(), ".json")
    else:
        scan_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records), ".jsonl")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.binary(max_size=20)
        | st.sampled_from([b"[", b"]", b"{", b"}", b'"', b"\\", b",", b"\n", b"\xef\xbb\xbf"])
        | st.sampled_from([b'{"messages": [', b'{"role": "user", "content": "x"}', b"\x1f\x8b"]),
        max_size=10,
    ),
    st.sampled_from([".jsonl", ".json", ".traj", ".txt"]),
)
def test_no_bytes_raise(pieces: list[bytes], suffix: str) -> None:
    scan_bytes(b"".join(pieces), suffix)
