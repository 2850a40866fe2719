"""Whether a call's arguments satisfy the schema of their tool: types, enums, required names.

The part of JSON Schema that tools in OpenAI form use. Other keywords are not checked.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def problems(value: Any, schema: dict[str, Any], at: str = "arguments") -> list[str]:
    """What is wrong with `value`, one line each; empty if nothing is.

    An object whose schema has `properties` may hold only these: a call with an argument that its
    tool does not know is a mistake.
    """
    expected = schema.get("type")
    if expected is not None and not _is(value, expected):
        return [f"{at}: {value!r} is not of type {expected}"]
    found = []
    if "enum" in schema and not any(equal(value, option) for option in schema["enum"]):
        found.append(f"{at}: {value!r} is not one of {schema['enum']}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            found += problems(item, schema["items"], f"{at}[{index}]")
    if isinstance(value, dict):
        known = schema.get("properties") or {}
        found += [f"{at}: {name} is missing" for name in schema.get("required", ())
                  if name not in value]  # fmt: skip
        for name, item in value.items():
            if name in known:
                found += problems(item, known[name], f"{at}.{name}")
            elif known:
                found.append(f"{at}: there is no {name}")
    return found


def equal(one: Any, other: Any) -> bool:
    """Equality of JSON values: 5 equals 5.0, but true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def _is(value: Any, expected: str) -> bool:
    if expected == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    if isinstance(value, bool):
        return expected == "boolean"
    return isinstance(value, _TYPES[expected])
