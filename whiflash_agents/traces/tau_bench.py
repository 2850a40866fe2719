"""Reader of tau-bench results: objects with `traj` (OpenAI messages), as a JSON list or as lines.

The id is `tau-<task_id>-trial-<trial>`; `task_id`, `trial` and `reward` are kept as metadata. The
recordings hold no tool schemas.
"""

from __future__ import annotations

from typing import Any

from .openai import read_messages, required
from .schema import Trace
from .tool_schemas import read_tools

_METADATA = ("task_id", "trial", "reward")


class TauBenchFormat:
    """`{"task_id": ..., "trial": ..., "reward": ..., "traj": [...]}` per record."""

    name = "tau-bench"
    looks_for = "`traj`"

    def sniff(self, record: Any) -> bool:
        return isinstance(record, dict) and "traj" in record

    def parse(self, record: Any, default_id: str) -> Trace:
        messages = read_messages(required(record, "traj"), "traj")
        task, trial = record.get("task_id"), record.get("trial")
        named = _is_label(task) and _is_label(trial)
        return Trace.model_validate(
            {
                "id": f"tau-{task}-trial-{trial}" if named else default_id,
                "messages": messages,
                "tools": read_tools(record),
                "metadata": {key: record[key] for key in _METADATA if key in record},
            }
        )


def _is_label(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool) and value != ""
