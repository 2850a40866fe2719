"""Reader of LangChain message dumps: a list of messages, or an object with `messages`.

A message may stand in any of three forms, also mixed: `dumpd` (`{"lc": 1, "type": "constructor",
"id": [..., "AIMessage"], "kwargs": {...}}`), `messages_to_dict` (`{"type": "ai", "data": {...}}`)
and plain (`{"type": "ai", "content": ..., "tool_calls": [{"name", "args", "id"}]}`). Messages with
`role` are read as OpenAI's. Invalid tool calls are kept with their arguments verbatim. Nothing is
constructed from class names: they only tell the role.
"""

from __future__ import annotations

from typing import Any

from .openai import (
    read_arguments,
    read_content,
    read_id,
    read_message,
    read_metadata,
    read_text,
    read_tool_calls,
    required,
)
from .problems import RecordError, expected, shown
from .schema import Trace
from .tool_schemas import read_tools

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "SystemMessageChunk": "system",
    "ToolMessageChunk": "tool",
    "tool": "tool",
    "function": "tool",
}
_CLASSES = {
    "SystemMessage": "system",
    "HumanMessage": "human",
    "AIMessage": "ai",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
    "ChatMessage": "chat",
}
_CALL_PARTS = ("tool_use", "tool_call", "function_call")


class LangChainFormat:
    """A list of LangChain messages, or `{"messages": [...]}` with such a list."""

    name = "langchain"
    looks_for = "`messages`, or a list, of objects with `lc` or a message `type`"

    def sniff(self, record: Any) -> bool:
        messages = record.get("messages") if isinstance(record, dict) else record
        first = messages[0] if isinstance(messages, list) and messages else None
        if not isinstance(first, dict) or "role" in first:
            return False
        kind = first.get("type")
        return "lc" in first or (isinstance(kind, str) and (kind in _ROLES or kind == "chat"))

    def parse(self, record: Any, default_id: str) -> Trace:
        if isinstance(record, list):
            return Trace.model_validate({"id": default_id, "messages": _read_messages(record, "")})
        messages = _read_messages(required(record, "messages"), "messages")
        trace_id = read_id(record, default_id)
        return Trace.model_validate(
            {
                "id": trace_id,
                "messages": messages,
                "tools": read_tools(record),
                "metadata": read_metadata(record, trace_id),
            }
        )


def _read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list")
    messages: list[dict[str, Any]] = []
    try:
        for message in value:
            messages.append(_read_message(message))
    except RecordError as error:
        raise error.inside(f"{field}[{len(messages)}]") from None
    return messages


def _read_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RecordError(None, f"expected an object, found {shown(message)}", "dump with dumpd")
    kind: Any
    if "lc" in message:
        kind, data, inner = _class_role(message.get("id")), message.get("kwargs"), "kwargs"
    elif "data" in message and "content" not in message:
        kind, data, inner = message.get("type"), message["data"], "data"
    elif "role" in message and "type" not in message:
        return read_message(message)
    else:
        kind, data, inner = message.get("type"), message, ""
    if not isinstance(data, dict):
        raise RecordError(inner, expected("an object", message, inner), "dump with dumpd")
    try:
        return _read_fields(kind, data)
    except RecordError as error:
        raise (error.inside(inner) if inner else error) from None


def _class_role(path: Any) -> str:
    """The message type of a `dumpd` class path, of which only the last name is looked at."""
    name = path[-1] if isinstance(path, list) and path else None
    kind = _CLASSES.get(name.removesuffix("Chunk")) if isinstance(name, str) else None
    if kind is None:
        raise RecordError(
            "id",
            f"expected the path of a message class, found {shown(name)}",
            f"only these are read: {', '.join(_CLASSES)}",
        )
    return kind


def _read_fields(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    if kind == "chat":  # LangChain's message with a free role
        return read_message(data)
    role = _ROLES.get(kind) if isinstance(kind, str) else None
    if role is None:
        raise RecordError(
            "type",
            expected(f"one of {', '.join(_ROLES)}", {} if kind is None else {"type": kind}, "type"),
            "remove the message, or correct its type",
        )
    if role == "assistant":
        return _read_assistant(data)
    read: dict[str, Any] = {"role": role, "content": read_content(data.get("content"))[0]}
    read["name"] = read_text(data, "name")
    if role == "tool":
        read["tool_call_id"] = read_text(data, "tool_call_id")
    return read


def _read_assistant(data: dict[str, Any]) -> dict[str, Any]:
    content, inline = _split_call_parts(data.get("content"))
    text, reasoning = read_content(content)
    extra = data.get("additional_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    calls = _read_calls(data, "tool_calls") + _read_calls(data, "invalid_tool_calls") or inline
    if not calls and extra.get("tool_calls") is not None:  # where providers leave copies
        try:
            calls = read_tool_calls(extra["tool_calls"])
        except RecordError as error:
            raise error.inside("additional_kwargs") from None
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": (
            read_text(extra, "reasoning_content") or read_text(extra, "reasoning") or reasoning
        ),
        "tool_calls": calls,
        "name": read_text(data, "name"),
    }


def _split_call_parts(content: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A content without the parts that are tool calls, and those calls."""
    if not isinstance(content, list):
        return content, []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in _CALL_PARTS:
            try:
                calls.append(_read_call(part))
            except RecordError as error:
                raise error.inside(f"content[{i}]") from None
        else:
            parts.append(part)
    return parts, calls


def _read_calls(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    recorded = data.get(key)
    if recorded is None:
        return []
    if not isinstance(recorded, list):
        raise RecordError(key, f"expected a list, found {shown(recorded)}", "write a list")
    calls: list[dict[str, Any]] = []
    try:
        for call in recorded:
            calls.append(_read_call(call))
    except RecordError as error:
        raise error.inside(f"{key}[{len(calls)}]") from None
    return calls


def _read_call(call: Any) -> dict[str, Any]:
    """A LangChain call: `name`, `args` (or a provider's `input` or `arguments`) and `id`."""
    if not isinstance(call, dict):
        raise RecordError(None, f"expected an object, found {shown(call)}", "dump with dumpd")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError("name", expected("a tool's name", call, "name"), "name the tool")
    key = next((key for key in ("args", "input", "arguments") if key in call), "args")
    return {
        "id": read_text(call, "id") or read_text(call, "call_id"),
        "name": name,
        "arguments": read_arguments(call, key),
    }
