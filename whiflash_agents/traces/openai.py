"""Reader of OpenAI chat messages: `{"messages": [...], "tools": [...]}`, or a bare list of them.

Read as well: reasoning under `reasoning_content` or `reasoning`; the role `developer` (a system
message); content as text parts (joined without a separator) or a refusal; the older `function_call`
and role `function`; tool arguments as a JSON string or an object. Missing or empty arguments are
the empty object. The other top-level keys of the record become the trace's metadata.

Other formats that carry OpenAI messages build on `read_messages`. The functions for parts of a
message raise RecordError with a path relative to the part.
"""

from __future__ import annotations

from typing import Any

import orjson

from .json_text import refuse_unwritable
from .problems import RecordError, expected, shown
from .schema import Trace
from .tool_schemas import read_tools

ID_KEYS = ("custom_id", "id", "trace_id", "instance_id", "task_id")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_AS_READ = ("user", "assistant", "system")
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_METADATA = frozenset(("messages", "tools", "functions"))


class OpenAIFormat:
    """`{"messages": [...]}` per record, with or without `tools`; or the list alone."""

    name = "openai"
    looks_for = "`messages`, or a list, of objects with `role`"

    def sniff(self, record: Any) -> bool:
        if isinstance(record, dict):
            if "messages" not in record:
                return False
            messages = record["messages"]
            first = messages[0] if isinstance(messages, list) and messages else None
            # Whatever else is wrong with a message is better told than not recognised.
            return not isinstance(first, dict) or "role" in first or not first.keys() & _LANGCHAIN
        first = record[0] if isinstance(record, list) and record else None
        return isinstance(first, dict) and "role" in first

    def parse(self, record: Any, default_id: str) -> Trace:
        if isinstance(record, list):
            return Trace.model_validate({"id": default_id, "messages": read_messages(record, "")})
        messages = read_messages(required(record, "messages"), "messages")
        trace_id = read_id(record, default_id)
        return Trace.model_validate(
            {
                "id": trace_id,
                "messages": messages,
                "tools": read_tools(record),
                "metadata": read_metadata(record, trace_id),
            }
        )


_LANGCHAIN = frozenset(("lc", "type"))


def required(record: Any, key: str) -> Any:
    """`record[key]`. Raises RecordError if `record` is not an object or lacks the key."""
    remedy = "correct the record, or name the format that it has"
    if not isinstance(record, dict):
        raise RecordError(
            None, f"expected a JSON object with `{key}`, found {shown(record)}", remedy
        )
    if key not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        raise RecordError(key, f"missing; the record has the keys: {keys}", remedy)
    return record[key]


def read_id(record: dict[str, Any], default_id: str) -> str:
    """The record's own id: the first of ID_KEYS that holds one (`task_id` with `trial`).

    Numbers are written out; null and "" count as missing. Raises RecordError for another type.
    """
    for key in ID_KEYS:
        value = record.get(key)
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise RecordError(key, f"expected a string, found {shown(value)}", "write a string id")
        if key == "task_id" and isinstance(record.get("trial"), (str, int)):
            return f"{value}-trial-{record['trial']}"
        return str(value)
    return default_id


def read_metadata(record: dict[str, Any], trace_id: str) -> dict[str, Any]:
    """What the record carries beside messages, tools and the id that became `trace_id`."""
    return {
        key: value
        for key, value in record.items()
        if key not in _NOT_METADATA
        and not (key in ID_KEYS and (value is None or value == "" or str(value) == trace_id))
    }


def read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of OpenAI messages in the shape of `Message`.

    Raises RecordError, with the path from `field` down, for whatever cannot be read.
    """
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list")
    messages: list[dict[str, Any]] = []
    try:
        for message in value:
            if (  # most messages: nothing about them to reshape
                type(message) is dict
                and len(message) == 2
                and message.get("role") in _AS_READ
                and type(message.get("content")) is str
            ):
                messages.append(message)
                continue
            messages.append(read_message(message))
    except RecordError as error:
        raise error.inside(f"{field}[{len(messages)}]") from None
    return messages


def read_message(message: Any) -> dict[str, Any]:
    """One OpenAI message in the shape of `Message`. Raises RecordError for what is wrong in it."""
    if not isinstance(message, dict):
        raise RecordError(
            None, f"expected an object, found {shown(message)}", 'write {"role": .., "content": ..}'
        )
    recorded_role = message.get("role")
    role = _ROLES.get(recorded_role) if isinstance(recorded_role, str) else None
    if role is None:
        raise RecordError(
            "role",
            expected(f"one of {', '.join(_ROLES)}", message, "role"),
            "correct the role",
        )
    content = message.get("content")
    reasoning = None
    if not isinstance(content, str) and content is not None:
        content, reasoning = read_content(content)
    read: dict[str, Any] = {"role": role, "content": content, "name": read_text(message, "name")}
    if role == "assistant":
        read["reasoning_content"] = (
            read_text(message, "reasoning_content") or read_text(message, "reasoning") or reasoning
        )
        if not content:
            read["content"] = read_text(message, "refusal") or content
        calls = message.get("tool_calls")
        read["tool_calls"] = [] if calls is None else read_tool_calls(calls)
        if message.get("function_call") is not None and not read["tool_calls"]:
            try:
                read["tool_calls"] = [read_function(message["function_call"])]
            except RecordError as error:
                raise error.inside("function_call") from None
    elif message.get("tool_calls"):
        raise RecordError(
            "tool_calls",
            f"a message of role {recorded_role} calls tools",
            "only assistant messages may; correct the role",
        )
    if role == "tool":
        read["tool_call_id"] = read_text(message, "tool_call_id")
    return read


def read_text(holder: dict[str, Any], key: str) -> str | None:
    """`holder[key]`, a string or null or missing. Raises RecordError for another type."""
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RecordError(key, f"expected a string or null, found {shown(value)}", "write a string")


def read_content(value: Any) -> tuple[str | None, str | None]:
    """Text and reasoning of a `content`: a string, null, or parts.

    Text parts are joined without a separator; `thinking` and `reasoning` parts make the reasoning.
    Raises RecordError, at `content`, for any other part: a text model cannot replay it.
    """
    if value is None or isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise RecordError(
            "content",
            f"expected a string, null or a list of parts, found {shown(value)}",
            "write the text as a string",
        )
    text: list[str] = []
    reasoning: list[str] = []
    for i, part in enumerate(value):
        if isinstance(part, str):
            text.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            text.append(_part_text(part, "text", i))
        elif kind == "refusal":
            text.append(_part_text(part, "refusal", i))
        elif kind in ("thinking", "reasoning"):
            reasoning.append(_part_text(part, "text" if "text" in part else kind, i))
        else:
            raise RecordError(
                f"content[{i}]",
                f"a content part of type {shown(kind)} is not text and cannot be replayed",
                "remove the part, or replace it with a text part that describes it",
            )
    return "".join(text), "".join(reasoning) or None


def _part_text(part: dict[str, Any], key: str, place: int) -> str:
    value = part.get(key)
    if isinstance(value, str):
        return value
    raise RecordError(f"content[{place}].{key}", expected("a string", part, key), "write the text")


def read_tool_calls(value: Any) -> list[dict[str, Any]]:
    """OpenAI `tool_calls` in the shape of `ToolCall`. Raises RecordError, at `tool_calls`."""
    if not isinstance(value, list):
        raise RecordError(
            "tool_calls", f"expected a list, found {shown(value)}", "write a list of calls"
        )
    calls: list[dict[str, Any]] = []
    try:
        for call in value:
            calls.append(_read_tool_call(call))
    except RecordError as error:
        raise error.inside(f"tool_calls[{len(calls)}]") from None
    return calls


def _read_tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RecordError(
            None,
            f"expected an object with `function`, found {shown(call)}",
            'write {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    call_id = read_text(call, "id")
    try:
        read = read_function(function)
    except RecordError as error:
        raise error.inside("function") from None
    read["id"] = call_id
    return read


def read_function(value: Any) -> dict[str, Any]:
    """A function's `name` and `arguments`. Raises RecordError for a missing name or wrong types."""
    if not isinstance(value, dict):
        raise RecordError(None, f"expected an object, found {shown(value)}", "name the function")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError("name", expected("a function's name", value, "name"), "name the function")
    return {"name": name, "arguments": read_arguments(value, "arguments")}


def read_arguments(holder: dict[str, Any], key: str) -> dict[str, Any] | str:
    """Tool arguments: the object they stand for, or the string verbatim if it is not one."""
    value = holder.get(key)
    if isinstance(value, dict):
        return value
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise RecordError(
            key,
            f"expected a JSON object or a string that holds one, found {shown(value)}",
            "write the arguments as an object",
        )
    data = value.encode()
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return value
    if not isinstance(parsed, dict):
        return value
    refuse_unwritable(data, parsed, key)
    return parsed
