"""A tool of the catalogue: its schema, how users ask for it, what it returns.

Requests are templates. `{city}` stands for a value of the parameter `city`; `{unit=celsius}` writes
nothing and sets a value; `[...]` is a part that may be left out: always kept when it holds a
required parameter, kept half of the time otherwise. A template in lower case is an imperative that
`phrasing.py` may wrap ("Could you ... ?"); one that begins with a capital is a whole sentence.

An `Offered` tool is a tool as one trace shows it: names of the tool and of its parameters vary, so
that a model has to read the schema instead of remembering it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from agent_values import Generator, Value


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `label` names it in questions; `about` is its description in the schema."""

    name: str
    values: Generator
    about: str
    required: bool = True

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")


def need(name: str, values: Generator, about: str) -> Param:
    """A required parameter."""
    return Param(name, values, about)


def may(name: str, values: Generator, about: str) -> Param:
    """An optional parameter."""
    return Param(name, values, about, required=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of the catalogue.

    `requests` are templates for training, `fresh` those kept for evaluation. `result` maps the
    fields of the result to generators, constants, or `"=city"` (the argument `city`); with `many`,
    the result is a list of such objects under that key. `answers` are templates over arguments and
    result fields (of the first object, with `count`). `pairs` ask for two calls at once, with
    `{1.city}` and `{2.city}`; parameters that are named without a number are shared.
    """

    name: str
    does: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    fresh: tuple[str, ...]
    result: dict[str, Any]
    answers: tuple[str, ...]
    many: str | None = None
    pairs: tuple[str, ...] = ()
    domain: str = field(default="", compare=False)

    def param(self, name: str) -> Param:
        """The parameter of that name. Raises KeyError where there is none."""
        for param in self.params:
            if param.name == name:
                return param
        raise KeyError(f"{self.name} has no parameter {name!r}")

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(param.name for param in self.params if param.required)

    def run(
        self, arguments: dict[str, Value], rng: Random
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the result, the fields that answers and later calls may use, `count` included)."""
        rows = [self._row(arguments, rng) for _ in range(rng.randint(2, 3) if self.many else 1)]
        result = rows[0] if self.many is None else {self.many: rows}
        return result, rows[0] | {"count": len(rows)}

    def _row(self, arguments: dict[str, Value], rng: Random) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, source in self.result.items():
            if isinstance(source, Generator):
                row[name] = source.draw(rng).json
            elif isinstance(source, str) and source.startswith("="):
                row[name] = arguments[source[1:]].json
            else:
                row[name] = source
        return row


# Other names for parameters. The first word of a name's meaning stays, so schemas remain readable.
_PARAM_NAMES = {
    "city": ("location", "town", "city_name"),
    "date": ("day", "on_date", "when"),
    "time": ("at", "start_time", "clock_time"),
    "query": ("q", "search_term", "keywords"),
    "person": ("name", "person_name", "who"),
    "recipient": ("to", "receiver", "send_to"),
    "amount": ("value", "sum", "total_amount"),
    "title": ("name", "subject", "heading"),
    "path": ("file", "file_path", "filename"),
    "room": ("area", "room_name", "zone"),
    "origin": ("from_city", "departure", "start"),
    "destination": ("to_city", "arrival", "target"),
    "message": ("text", "body", "content"),
    "limit": ("max_results", "count_limit", "top_n"),
    "order_id": ("order", "order_number", "id"),
    "employee": ("employee_name", "staff_member", "worker"),
}
_VERBS = {
    "get": ("fetch", "read", "lookup"),
    "search": ("find", "query", "browse"),
    "find": ("search", "lookup", "locate"),
    "create": ("add", "make", "new"),
    "send": ("deliver", "write", "post"),
    "set": ("change", "update", "adjust"),
    "list": ("show", "get", "enumerate"),
    "book": ("reserve", "order", "schedule"),
    "delete": ("remove", "erase", "drop"),
    "convert": ("change", "transform", "translate"),
}


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as one trace offers it: `name` and `names` (parameter to shown name)."""

    tool: Tool
    name: str
    names: dict[str, str]
    described: bool

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI form."""
        properties = {}
        for param in self.tool.params:
            properties[self.names[param.name]] = dict(param.values.schema) | (
                {"description": param.about} if self.described else {}
            )
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [self.names[name] for name in self.tool.required],
        }
        function = {
            "name": self.name,
            "description": self.tool.does,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def arguments(self, values: dict[str, Value]) -> dict[str, Any]:
        """Arguments under the shown names, in the order of the schema."""
        return {
            self.names[param.name]: values[param.name].json
            for param in self.tool.params
            if param.name in values
        }


def offer(tool: Tool, rng: Random) -> Offered:
    """Show `tool` under its own names, or (often enough) under others."""
    names = {param.name: param.name for param in tool.params}
    if rng.random() < 0.35:
        for param in tool.params:
            other = rng.choice((param.name, *_PARAM_NAMES.get(param.name, ())))
            if other not in names.values():
                names[param.name] = other
    return Offered(tool, _tool_name(tool, rng), names, described=rng.random() < 0.5)


def _tool_name(tool: Tool, rng: Random) -> str:
    verb, _, rest = tool.name.partition("_")
    if rest and rng.random() < 0.25:
        verb = rng.choice((verb, *_VERBS.get(verb, ())))
    parts = [verb, *rest.split("_")] if rest else [verb]
    style = rng.random()
    if style < 0.15:  # getForecast
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style < 0.30:  # weather.get_forecast
        return f"{tool.domain}.{'_'.join(parts)}"
    return "_".join(parts)
