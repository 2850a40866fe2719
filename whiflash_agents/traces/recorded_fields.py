"""Where a part of a trace stands in the record it was read from.

The checks speak of a trace as read (`messages[1].tool_calls[0].name`); whoever mends the record
needs the place in the file (`traj[1].tool_calls[0].function.name`). Only a trace with findings
comes here, so reading stays as fast as it is.
"""

from __future__ import annotations

import re
from typing import Any

_FIELD = re.compile(r"messages(?:\[(\d+)\](?:\.(.+))?)?")
_CALL_FIELD = re.compile(r"tool_calls\[(\d+)\]\.(\w+)")
_LISTS = ("messages", "traj", "history", "conversations")


def recorded_field(record: Any, field: str | None, messages: int) -> str | None:
    """The path in `record` of what is `field` in the trace of `messages` messages read from it.

    Falls back on `field`, or on the message that holds it, where the recording has no such part (a
    call inside the text of a turn). None stands for the record as a whole.
    """
    match = _FIELD.fullmatch(field or "")
    if match is None:
        return field
    path, recorded = _message_list(record)
    if recorded is None:
        return field
    if match[1] is None:
        return path or None
    index, rest = int(match[1]), match[2]
    if path == "conversations":
        # A `system` key of the record opens the conversation, so places shift by it; a turn with
        # several answers became several messages, and places cannot be told.
        added = messages - len(recorded)
        if added != (1 if record.get("system") else 0) or index < added:
            return field
        return f"{path}[{index - added}]"  # one text holds everything
    if index >= len(recorded) or len(recorded) != messages:
        return field
    place = f"{path}[{index}]"
    message = recorded[index]
    for inner in ("kwargs", "data"):  # LangChain's envelopes
        if isinstance(message, dict) and "content" not in message and inner in message:
            message, place = message[inner], f"{place}.{inner}"
    if rest is None or not isinstance(message, dict):
        return place
    return f"{place}.{_inside_message(message, rest)}"


def _message_list(record: Any) -> tuple[str, list[Any] | None]:
    if isinstance(record, list):
        return "", record
    path = ""
    if isinstance(record, dict) and isinstance(record.get("body"), dict):
        record, path = record["body"], "body."
    for key in _LISTS:
        if isinstance(record, dict) and isinstance(record.get(key), list):
            return path + key, record[key]
    return "", None


def _inside_message(message: dict[str, Any], field: str) -> str:
    if field == "tool_call_id" and field not in message and "tool_call_ids" in message:
        return "tool_call_ids"  # SWE-agent
    match = _CALL_FIELD.fullmatch(field)
    if match is None:
        return field
    index, key = int(match[1]), match[2]
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), dict):
        return f"function_call.{key}"
    call = calls[index] if isinstance(calls, list) and index < len(calls) else None
    if not isinstance(call, dict):
        return field
    if key != "id" and isinstance(call.get("function"), dict):
        key = f"function.{key}"
    elif key == "arguments" and key not in call and "args" in call:
        key = "args"
    return f"tool_calls[{index}].{key}"
