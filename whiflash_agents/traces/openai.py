"""Reader of OpenAI chat messages: `{"messages": [...], "tools": [...]}`, or a bare list of them.

Read as well: reasoning under `reasoning_content` or `reasoning`; the role `developer` (a system
message); content as text parts (joined without a separator) or a refusal; the older `function_call`
and role `function`; tool arguments as a JSON string or an object. Missing or empty arguments are
the empty object. The other top-level keys of the record become the trace's metadata.

Other formats that carry OpenAI messages build on `read_messages` and `read_tools`.
"""

from __future__ import annotations

from typing import Any

import orjson

from .json_text import parse_json, refuse_unwritable
from .problems import RecordError, shown
from .schema import Trace

ID_KEYS = ("custom_id", "id", "trace_id", "instance_id", "task_id")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_METADATA = frozenset(("messages", "tools", "functions"))


class OpenAIFormat:
    """`{"messages": [...]}` per record, with or without `tools`; or the list alone."""

    name = "openai"
    looks_for = "`messages`, or a list of objects with `role`"

    def sniff(self, record: Any) -> bool:
        if isinstance(record, dict):
            return "messages" in record
        first = record[0] if isinstance(record, list) and record else None
        return isinstance(first, dict) and "role" in first

    def parse(self, record: Any, default_id: str) -> Trace:
        if isinstance(record, list):
            return Trace.model_validate({"id": default_id, "messages": read_messages(record)})
        messages = read_messages(required(record, "messages"))
        trace_id = read_id(record, default_id)
        return Trace.model_validate(
            {
                "id": trace_id,
                "messages": messages,
                "tools": read_tools(record),
                "metadata": read_metadata(record, trace_id),
            }
        )


def read_metadata(record: dict[str, Any], trace_id: str) -> dict[str, Any]:
    """What the record carries beside messages, tools and the id that became `trace_id`."""
    return {
        key: value
        for key, value in record.items()
        if key not in _NOT_METADATA
        and not (key in ID_KEYS and (value is None or value == "" or str(value) == trace_id))
    }


def required(record: Any, key: str) -> Any:
    """`record[key]`. Raises RecordError if `record` is not an object or lacks the key."""
    if not isinstance(record, dict):
        raise RecordError(
            None,
            f"expected a JSON object with `{key}`, found {shown(record)}",
            "check the file's format, or name it with --format",
        )
    if key not in record:
        keys = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise RecordError(
            key,
            f"missing; the record has the keys: {keys}",
            "check the file's format, or name it with --format",
        )
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


def read_text(value: Any, field: str) -> str | None:
    """`value` if it is a string or null. Raises RecordError otherwise."""
    if value is None or isinstance(value, str):
        return value
    raise RecordError(field, f"expected a string or null, found {shown(value)}", "write a string")


def read_content(value: Any, field: str) -> tuple[str | None, str | None]:
    """Text and reasoning of a `content`: a string, null, or parts.

    Text parts are joined without a separator; `thinking` and `reasoning` parts make the reasoning.
    Raises RecordError for any other part, because a text model cannot replay it.
    """
    if value is None or isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise RecordError(
            field,
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
            text.append(_part_text(part, "text", f"{field}[{i}]"))
        elif kind == "refusal":
            text.append(_part_text(part, "refusal", f"{field}[{i}]"))
        elif kind in ("thinking", "reasoning"):
            key = "text" if "text" in part else kind
            reasoning.append(_part_text(part, key, f"{field}[{i}]"))
        else:
            raise RecordError(
                f"{field}[{i}]",
                f"a content part of type {shown(kind)} is not text and cannot be replayed",
                "remove the part, or replace it with a text part that describes it",
            )
    return "".join(text), "".join(reasoning) or None


def _part_text(part: dict[str, Any], key: str, field: str) -> str:
    value = part.get(key)
    if isinstance(value, str):
        return value
    raise RecordError(f"{field}.{key}", f"expected a string, found {shown(value)}", "write text")


def read_arguments(value: Any, field: str) -> dict[str, Any] | str:
    """Tool arguments: the object they stand for, or the string verbatim if it is not one."""
    if isinstance(value, dict):
        return value
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        raise RecordError(
            field,
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
    refuse_unwritable(data, parsed, field)
    return parsed


def read_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """OpenAI `tool_calls` in the shape of `ToolCall`. Raises RecordError for wrong types."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list of calls")
    calls: list[dict[str, Any]] = []
    for i, call in enumerate(value):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RecordError(
                f"{field}[{i}]",
                f"expected an object with `function`, found {shown(call)}",
                'write {"id": ..., "type": "function", "function": {"name": ..., "arguments": ..}}',
            )
        calls.append(
            {
                "id": read_text(call.get("id"), f"{field}[{i}].id"),
                **read_function_call(call["function"], f"{field}[{i}].function"),
            }
        )
    return calls


def read_function_call(value: Any, field: str) -> dict[str, Any]:
    """`{"name", "arguments"}` checked. Raises RecordError for a missing name or wrong types."""
    if not isinstance(value, dict):
        raise RecordError(field, f"expected an object, found {shown(value)}", "name the function")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise RecordError(
            f"{field}.name", f"expected a function's name, found {shown(name)}", "name the function"
        )
    return {
        "name": name,
        "arguments": read_arguments(value.get("arguments"), f"{field}.arguments"),
    }


def read_messages(value: Any, field: str = "messages") -> list[dict[str, Any]]:
    """A list of OpenAI messages in the shape of `Message`.

    Raises RecordError, with the path from `field` down, for whatever cannot be read.
    """
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise RecordError(
                f"{field}[{i}]",
                f"expected an object, found {shown(message)}",
                'write {"role": ..., "content": ...}',
            )
        if len(message) == 2 and message.get("role") in ("user", "system"):
            content = message.get("content")
            if isinstance(content, str):  # most messages, and nothing about them to reshape
                messages.append(message)
                continue
        messages.append(read_message(message, f"{field}[{i}]"))
    return messages


def read_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    """One OpenAI message in the shape of `Message`. Raises RecordError at a path below `field`."""
    recorded_role = message.get("role")
    role = _ROLES.get(recorded_role) if isinstance(recorded_role, str) else None
    if role is None:
        raise RecordError(
            f"{field}.role",
            f"expected one of {', '.join(_ROLES)}, found {shown(recorded_role)}",
            "correct the role, or name the file's format with --format",
        )
    content, reasoning = read_content(message.get("content"), f"{field}.content")
    read: dict[str, Any] = {"role": role, "content": content}
    if message.get("name") is not None:
        read["name"] = read_text(message["name"], f"{field}.name")
    if role == "assistant":
        for key in ("reasoning_content", "reasoning"):
            reasoning = read_text(message.get(key), f"{field}.{key}") or reasoning
        read["reasoning_content"] = reasoning
        if not content and message.get("refusal"):
            read["content"] = read_text(message["refusal"], f"{field}.refusal")
        read["tool_calls"] = read_tool_calls(message.get("tool_calls"), f"{field}.tool_calls")
        if message.get("function_call") is not None and not read["tool_calls"]:
            call = read_function_call(message["function_call"], f"{field}.function_call")
            read["tool_calls"] = [call]
    elif message.get("tool_calls"):
        raise RecordError(
            f"{field}.tool_calls",
            f"a message of role {recorded_role} calls tools",
            "only assistant messages may; correct the role",
        )
    if role == "tool":
        read["tool_call_id"] = read_text(message.get("tool_call_id"), f"{field}.tool_call_id")
    return read


def read_tools(record: dict[str, Any], field: str = "") -> list[dict[str, Any]]:
    """The tools of a record in OpenAI form.

    Accepts OpenAI's own form, bare function schemas (also under the older key `functions`),
    Anthropic's `input_schema`, and the whole list as a JSON string. Raises RecordError otherwise.
    """
    key = "tools" if record.get("tools") is not None or "functions" not in record else "functions"
    value = record.get(key)
    if value is None:
        return []
    return read_tool_list(value, f"{field}{key}")


def read_tool_list(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of tools (or the JSON string of one) in OpenAI form; see `read_tools`."""
    if isinstance(value, str):
        value = parse_json(value.encode(), field) if value.strip() else []
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list of tools")
    return [_read_tool(tool, f"{field}[{i}]") for i, tool in enumerate(value)]


def _read_tool(tool: Any, field: str) -> dict[str, Any]:
    wrapped = isinstance(tool, dict) and "function" in tool
    function = tool["function"] if wrapped else tool
    if wrapped:
        field += ".function"
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RecordError(
            field,
            f"expected a function schema with a name, found {shown(function)}",
            'write {"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    if "input_schema" in function and "parameters" not in function:
        function = {
            **{key: item for key, item in function.items() if key != "input_schema"},
            "parameters": function["input_schema"],
        }
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise RecordError(
            f"{field}.parameters",
            f"expected a JSON Schema object, found {shown(function['parameters'])}",
            "write an object",
        )
    if wrapped and tool["function"] is function and tool.get("type") == "function":
        return tool
    return {"type": "function", "function": function}
