"""What a held-out turn should call, and whether calls agree with it.

A gold record stands for one trace: `{"id", "category", "kind", "tools", "turns"}`. `turns` has one
element for each assistant turn: the list of expected calls, empty where none is expected. An
expected call is `{"name", "arguments"}` with a list of possible values for every argument, in the
convention of the Berkeley Function Calling Leaderboard: `""` among them says that the argument may
be missing, and objects hold lists of possible values in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from schema_check import equal

_IGNORED = str.maketrans("", "", " ,./-_*^'\"")


def gold_of_trace(record: dict[str, Any], category: str, kind: str) -> dict[str, Any]:
    """The gold record of a trace whose recorded turns are what is expected, to the letter."""
    turns = []
    for message in record["messages"]:
        if message["role"] == "assistant":
            turns.append([_expected(call["function"]) for call in message.get("tool_calls", [])])
    return {
        "id": record["id"],
        "category": category,
        "kind": kind,
        "tools": record.get("tools", []),
        "turns": turns,
    }


def _expected(function: dict[str, Any]) -> dict[str, Any]:
    arguments = json.loads(function["arguments"])
    return {
        "name": function["name"],
        "arguments": {name: [value] for name, value in arguments.items()},
    }


def loosely_equal(one: Any, other: Any) -> bool:
    """Equality that ignores case, spaces and punctuation of strings."""
    if isinstance(one, str) and isinstance(other, str):
        return one.lower().translate(_IGNORED) == other.lower().translate(_IGNORED)
    return equal(one, other)


def value_agrees(value: Any, option: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether `value` is the possible value `option`; objects hold options in turn."""
    if isinstance(option, dict) and isinstance(value, dict):
        return arguments_agree(value, option, same)
    if isinstance(option, list) and isinstance(value, list):
        return len(value) == len(option) and all(
            value_agrees(item, wanted, same) for item, wanted in zip(value, option, strict=True)
        )
    return same(value, option)


def arguments_agree(
    arguments: dict[str, Any], expected: dict[str, Any], same: Callable[[Any, Any], bool]
) -> bool:
    """Whether every argument has a possible value, none is missing and none is too much."""
    if not arguments.keys() <= expected.keys():
        return False
    for name, options in expected.items():
        choices = options if isinstance(options, list) else [options]
        if name not in arguments:
            if "" not in choices:
                return False
        elif not any(value_agrees(arguments[name], option, same) for option in choices):
            return False
    return True


def calls_agree(
    calls: Sequence[tuple[str, dict[str, Any]]],
    expected: Sequence[dict[str, Any]],
    same: Callable[[Any, Any], bool] = equal,
) -> bool:
    """Whether the calls are the expected ones, in any order."""
    if len(calls) != len(expected):
        return False
    if not expected:
        return True
    (name, arguments), *rest = calls
    for index, wanted in enumerate(expected):
        others = [*expected[:index], *expected[index + 1 :]]
        if (
            name == wanted["name"]
            and arguments_agree(arguments, wanted["arguments"], same)
            and calls_agree(rest, others, same)
        ):
            return True
    return False
