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
    read_tools,
    required,
)
from .problems import RecordError, shown
from .schema import Trace

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
    return [_read_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RecordError(
            field, f"expected an object, found {shown(message)}", "dump messages with dumpd"
        )
    kind: Any
    data: dict[str, Any]
    if "lc" in message:
        kind, data = _constructed(message, field)
        field += ".kwargs"
    elif isinstance(message.get("data"), dict) and "content" not in message:
        kind, data = message.get("type"), message["data"]
        field += ".data"
    elif "role" in message and "type" not in message:
        return read_message(message, field)
    else:
        kind, data = message.get("type"), message
    if kind == "chat":  # LangChain's message with a free role
        return read_message(data, field)
    role = _ROLES.get(kind) if isinstance(kind, str) else None
    if role is None:
        raise RecordError(
            f"{field}.type",
            f"expected one of {', '.join(_ROLES)}, found {shown(kind)}",
            "remove the message, or correct its type",
        )
    if role == "assistant":
        return _read_assistant(data, field)
    content, _ = read_content(data.get("content"), f"{field}.content")
    read: dict[str, Any] = {"role": role, "content": content}
    read["name"] = read_text(data.get("name"), f"{field}.name")
    if role == "tool":
        read["tool_call_id"] = read_text(data.get("tool_call_id"), f"{field}.tool_call_id")
    return read


def _constructed(message: dict[str, Any], field: str) -> tuple[str, dict[str, Any]]:
    """Message type and fields of the `dumpd` form."""
    path, data = message.get("id"), message.get("kwargs")
    name = path[-1] if isinstance(path, list) and path else None
    kind = _CLASSES.get(name.removesuffix("Chunk")) if isinstance(name, str) else None
    if kind is None:
        raise RecordError(
            f"{field}.id",
            f"expected the path of a message class, found {shown(name)}",
            f"only these are read: {', '.join(_CLASSES)}",
        )
    if not isinstance(data, dict):
        raise RecordError(
            f"{field}.kwargs", f"expected an object, found {shown(data)}", "dump with dumpd"
        )
    return kind, data


def _read_assistant(data: dict[str, Any], field: str) -> dict[str, Any]:
    content = data.get("content")
    inline: list[dict[str, Any]] = []
    if isinstance(content, list):
        parts = []
        for i, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") in _CALL_PARTS:
                inline.append(_read_call(part, f"{field}.content[{i}]"))
            else:
                parts.append(part)
        content = parts
    text, reasoning = read_content(content, f"{field}.content")
    extra = data.get("additional_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    for key in ("reasoning_content", "reasoning"):
        if isinstance(extra.get(key), str) and extra[key]:
            reasoning = extra[key]
    calls: list[dict[str, Any]] = []
    for key in ("tool_calls", "invalid_tool_calls"):
        recorded = data.get(key)
        if recorded is None:
            continue
        if not isinstance(recorded, list):
            raise RecordError(
                f"{field}.{key}", f"expected a list, found {shown(recorded)}", "write a list"
            )
        calls += [_read_call(call, f"{field}.{key}[{i}]") for i, call in enumerate(recorded)]
    if not calls:  # providers leave copies of the calls in these places
        calls = inline or read_tool_calls(
            extra.get("tool_calls"), f"{field}.additional_kwargs.tool_calls"
        )
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": reasoning,
        "tool_calls": calls,
        "name": read_text(data.get("name"), f"{field}.name"),
    }


def _read_call(call: Any, field: str) -> dict[str, Any]:
    """A LangChain call: `name`, `args` (or a provider's `input` or `arguments`) and `id`."""
    if not isinstance(call, dict):
        raise RecordError(field, f"expected an object, found {shown(call)}", "dump with dumpd")
    if isinstance(call.get("function"), dict):
        return read_tool_calls([call], field)[0]
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(
            f"{field}.name", f"expected a tool's name, found {shown(name)}", "name the tool"
        )
    key = next((key for key in ("args", "input", "arguments") if key in call), "args")
    return {
        "id": read_text(call.get("id") or call.get("call_id"), f"{field}.id"),
        "name": name,
        "arguments": read_arguments(call.get(key), f"{field}.{key}"),
    }
