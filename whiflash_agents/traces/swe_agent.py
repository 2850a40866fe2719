"""Reader of SWE-agent trajectories (`.traj`): an object with `history`.

Both variants are read: function calling, where `tool_calls` is a list or a string that holds the
Python repr of one, and thought/action, where the assistant's text holds the command. `content` is
what the model wrote; `thought` stands in for it only where it is empty. `thinking_blocks` become
the reasoning. Metadata: `environment`, and `exit_status` and `model_stats` of `info`.
"""

from __future__ import annotations

from typing import Any

from .json_text import parse_python_literal
from .openai import read_id, read_message, read_text, read_tools, required
from .problems import RecordError, shown
from .schema import Trace


class SweAgentFormat:
    """`{"history": [{"role", "content", "thought", "action", "tool_calls"}], ...}` per record."""

    name = "swe-agent"
    looks_for = "`history`"

    def sniff(self, record: Any) -> bool:
        return isinstance(record, dict) and "history" in record

    def parse(self, record: Any, default_id: str) -> Trace:
        history = required(record, "history")
        if not isinstance(history, list):
            raise RecordError("history", f"expected a list, found {shown(history)}", "write a list")
        metadata = {"environment": record["environment"]} if "environment" in record else {}
        info = record.get("info")
        if isinstance(info, dict):
            metadata |= {key: info[key] for key in ("exit_status", "model_stats") if key in info}
        return Trace.model_validate(
            {
                "id": read_id(record, default_id),
                "messages": [_read_entry(e, f"history[{i}]") for i, e in enumerate(history)],
                "tools": read_tools(record),
                "metadata": metadata,
            }
        )


def _read_entry(entry: Any, field: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise RecordError(field, f"expected an object, found {shown(entry)}", "write a message")
    entry = dict(entry)
    for key in ("tool_calls", "tool_call_ids"):
        if isinstance(entry.get(key), str):
            entry[key] = parse_python_literal(entry[key], f"{field}.{key}")
    if entry.get("role") == "tool" and entry.get("tool_call_id") is None:
        entry["tool_call_id"] = _answered_call(entry.get("tool_call_ids"), field)
    if entry.get("role") == "assistant":
        if not entry.get("content"):
            entry["content"] = read_text(entry.get("thought"), f"{field}.thought")
        if not entry.get("reasoning_content"):
            entry["reasoning_content"] = _thinking(entry.get("thinking_blocks"), field)
    return read_message(entry, field)


def _answered_call(ids: Any, field: str) -> Any:
    if ids is None or ids == []:
        return None
    if isinstance(ids, list) and len(ids) == 1:
        return ids[0]
    raise RecordError(
        f"{field}.tool_call_ids",
        f"expected a list of one id, found {shown(ids)}",
        "write one message per answered call",
    )


def _thinking(blocks: Any, field: str) -> str | None:
    if not isinstance(blocks, list):
        return read_text(blocks, f"{field}.thinking_blocks")
    text = [block.get("thinking") for block in blocks if isinstance(block, dict)]
    return "".join(part for part in text if isinstance(part, str)) or None
