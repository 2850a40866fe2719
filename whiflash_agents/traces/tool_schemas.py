"""The tools that a record declares, brought into OpenAI form: `{"type": "function", ...}`.

Read: that form, bare function schemas (also under OpenAI's older key `functions`), Anthropic's
`input_schema`, and the whole list as a JSON string.
"""

from __future__ import annotations

from typing import Any

from .json_text import parse_json
from .problems import RecordError, shown


def read_tools(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a record. Raises RecordError for what is not a tool."""
    for key in ("tools", "functions"):
        value = record.get(key)
        if value is not None:
            return read_tool_list(value, key)
    return []


def read_tool_list(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of tools, or the JSON string of one. Raises RecordError, at `field`."""
    if isinstance(value, str):
        value = parse_json(value.encode(), field) if value.strip() else []
    if not isinstance(value, list):
        raise RecordError(field, f"expected a list, found {shown(value)}", "write a list of tools")
    tools: list[dict[str, Any]] = []
    try:
        for tool in value:
            tools.append(_read_tool(tool))
    except RecordError as error:
        raise error.inside(f"{field}[{len(tools)}]") from None
    return tools


def _read_tool(tool: Any) -> dict[str, Any]:
    wrapped = isinstance(tool, dict) and "function" in tool
    function = tool["function"] if wrapped else tool
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RecordError(
            "function" if wrapped else None,
            f"expected a function schema with a name, found {shown(function)}",
            'write {"type": "function", "function": {"name": ..., "parameters": {...}}}',
        )
    if "input_schema" in function and "parameters" not in function:
        function = dict(function)
        function["parameters"] = function.pop("input_schema")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RecordError(
            "function.parameters" if wrapped else "parameters",
            f"expected a JSON Schema object, found {shown(parameters)}",
            "write an object",
        )
    return {"type": "function", "function": function}
