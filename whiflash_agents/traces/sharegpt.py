"""Reader of ShareGPT conversations and the Hermes way of calling tools in them.

`{"conversations": [{"from": "human", "value": "..."}]}`. Inside a `gpt` value, `<think>` opens the
reasoning and each `<tool_call>` holds a call, as JSON or, in older recordings, as a Python dict.
A `tool` value holds one answer, or several in `<tool_response>` tags. Tools come from the record's
`tools`, or from the `<tools>` block of the system message, which is then cut out of its text so
that a chat template does not show them twice. A record's `system` key opens the conversation.

A call that cannot be read stays in the text, where the turn as recorded is still complete.
The other keys of the record become the trace's metadata.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .json_text import parse_json, parse_python_literal
from .openai import read_function, read_id, read_metadata, read_text, required
from .problems import RecordError, expected, shown
from .schema import Trace
from .tool_schemas import read_tool_list, read_tools

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_BETWEEN_ANSWERS = re.compile(r"</tool_response>\s*<tool_response>")
_BLANK = re.compile(r"\s*")
# Reading stays linear in hostile text: a Python dict ends at one of the next few closing tags and
# is short, and after so many unreadable calls the rest of a message is taken as text.
_LITERAL_TRIES = 4
_LITERAL_CHARS = 1 << 16
_MAX_UNREADABLE = 16
_DECODER = json.JSONDecoder()


class ShareGPTFormat:
    """`{"conversations": [{"from": ..., "value": ...}]}` per record."""

    name = "sharegpt"
    looks_for = "`conversations`"

    def sniff(self, record: Any) -> bool:
        return isinstance(record, dict) and "conversations" in record

    def parse(self, record: Any, default_id: str) -> Trace:
        turns = required(record, "conversations")
        if not isinstance(turns, list):
            raise RecordError(
                "conversations", f"expected a list, found {shown(turns)}", "write a list"
            )
        messages: list[dict[str, Any]] = []
        system = read_text(record, "system")
        if system:
            messages.append({"role": "system", "content": system})
        for i, turn in enumerate(turns):
            try:
                messages += _read_turn(turn)
            except RecordError as error:
                raise error.inside(f"conversations[{i}]") from None
        tools = read_tools(record)
        for message in messages:
            if message["role"] == "system":
                message["content"], declared = _split_tools(message["content"])
                tools = tools or declared
        trace_id = read_id(record, default_id)
        metadata = read_metadata(record, trace_id)
        metadata.pop("conversations")
        metadata.pop("system", None)
        return Trace.model_validate(
            {"id": trace_id, "messages": messages, "tools": tools, "metadata": metadata}
        )


def _read_turn(turn: Any) -> list[dict[str, Any]]:
    if not isinstance(turn, dict):
        raise RecordError(
            None, f"expected an object, found {shown(turn)}", 'write {"from": ..., "value": ...}'
        )
    who, what = ("from", "value") if "from" in turn else ("role", "content")
    speaker, value = turn.get(who), turn.get(what)
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RecordError(
            who,
            expected(f"one of {', '.join(_ROLES)}", turn, who),
            "correct the speaker",
        )
    if not isinstance(value, str):
        raise RecordError(what, expected("a string", turn, what), "write the text")
    if speaker == "function_call":
        try:
            return [{"role": role, "tool_calls": _read_calls(value)}]
        except RecordError as error:
            raise error.inside(what) from None
    if role == "assistant":
        return [_read_assistant(value)]
    if role == "tool":
        name = read_text(turn, "name")
        return [{"role": role, "content": text, "name": name} for text in _split_answers(value)]
    return [{"role": role, "content": value}]


def _read_calls(value: str) -> list[dict[str, Any]]:
    """The calls of a `function_call` turn: an object, or a list of them, in JSON or Python."""
    try:
        parsed = parse_json(value.encode())
    except RecordError:
        parsed = parse_python_literal(value, None)
    return [read_function(call) for call in (parsed if isinstance(parsed, list) else [parsed])]


def _read_assistant(value: str) -> dict[str, Any]:
    reasoning = None
    thought = _THINK.match(value)
    if thought:
        reasoning = thought[1].strip("\n")
        value = value[thought.end() :].lstrip("\n")
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    position = 0
    unreadable = 0
    while unreadable < _MAX_UNREADABLE and (opening := value.find(_CALL, position)) >= 0:
        found = _read_call_at(value, opening + len(_CALL))
        if found is None:
            unreadable += 1
            end = opening + len(_CALL)
            text.append(value[position:end])
        else:
            call, end = found
            calls.append(call)
            text.append(value[position:opening])
        position = end
    text.append(value[position:])
    content: str | None = "".join(text)
    if calls:  # white space around the tags belongs to the markup
        content = "".join(text).strip() or None
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }


def _read_call_at(value: str, start: int) -> tuple[dict[str, Any], int] | None:
    """The call whose body begins at `start`, and where its closing tag ends; None if unreadable.

    The JSON itself says where the body ends, so a closing tag inside a string does not end it
    (failure kind 15).
    """
    start = _BLANK.match(value, start).end()  # type: ignore[union-attr]
    try:
        _, end = _DECODER.raw_decode(value, start)
        after = _BLANK.match(value, end).end()  # type: ignore[union-attr]
        if value.startswith(_CALL_END, after):
            call = read_function(parse_json(value[start:end].encode()))
            return call, after + len(_CALL_END)
    except (ValueError, RecursionError):  # RecordError is a ValueError
        pass
    closing = start
    for _ in range(_LITERAL_TRIES):
        closing = value.find(_CALL_END, closing, start + _LITERAL_CHARS)
        if closing < 0:
            return None
        try:
            parsed = parse_python_literal(value[start:closing], None)
            return read_function(parsed), closing + len(_CALL_END)
        except RecordError:
            closing += 1
    return None


def _split_answers(value: str) -> list[str]:
    """The answers in a tool turn: the inside of each `<tool_response>`, or the text as it is."""
    text = value.strip()
    if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
        return [value]
    inner = text[len("<tool_response>") : -len("</tool_response>")]
    return [answer.strip() for answer in _BETWEEN_ANSWERS.split(inner)]


def _split_tools(text: str) -> tuple[str, list[dict[str, Any]]]:
    """System text without its `<tools>` block, and the tools in it.

    The block is the last one that holds tools: the prose before it often names the tags. Its body
    is a JSON list, or JSON objects one after the other.
    """
    opening = text.rfind("<tools>")
    closing = text.find("</tools>", opening)
    if opening < 0 or closing < 0:
        return text, []
    body = text[opening + len("<tools>") : closing].strip()
    values: list[Any] = []
    position = 0
    try:
        while position < len(body):
            value, position = _DECODER.raw_decode(body, position)
            values += value if isinstance(value, list) else [value]
            position = _BLANK.match(body, position).end()  # type: ignore[union-attr]
        parse_json(json.dumps(values).encode())
        tools = read_tool_list(values, "system")
    except (ValueError, RecursionError):
        return text, []
    if not tools:
        return text, []
    before, after = text[:opening].rstrip(), text[closing + len("</tools>") :].lstrip()
    return f"{before}\n{after}".strip(), tools
