"""Function-calling prompts and gold calls from the Berkeley Function Calling Leaderboard.

They come from the wheel `bfcl-eval` (Apache-2.0), which is fetched with pip, checked by its hash
and opened as a zip archive; nothing in it is executed. A tenth of all prompts (sha1 of the id is 0
mod 10) and three whole categories are held out. Reasoning is written in the style of
`reasoning.py`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from reasoning import Reasoning, refusal
from schema_check import problems

VERSION = "2026.3.23"
WHEEL = f"bfcl_eval-{VERSION}-py3-none-any.whl"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"

WITH_CALLS = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
    "parallel_multiple", "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
)  # fmt: skip
WITHOUT_CALLS = ("irrelevance", "live_irrelevance")
MULTI_TURN = "multi_turn_long_context"
HELD_OUT = ("live_parallel", "live_parallel_multiple", MULTI_TURN)

_DATA = "bfcl_eval/data"
_TYPES = {
    "dict": "object", "HashMap": "object", "float": "number", "double": "number",
    "long": "integer", "String": "string", "char": "string", "Boolean": "boolean",
    "Array": "array", "ArrayList": "array", "tuple": "array", "any": None, "": None,
}  # fmt: skip
_CLASS_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(slots=True)
class Example:
    """A converted prompt: the trace (OpenAI record), its gold, and whether it is held out."""

    trace: dict[str, Any]
    gold: dict[str, Any]
    held_out: bool


@dataclass(slots=True)
class Conversion:
    """All examples, and how many prompts were left out for which reason."""

    examples: list[Example] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def fetch_wheel(folder: Path) -> Path:
    """The wheel in `folder`, downloaded by pip if it is not there.

    Raises SystemExit where pip fails or the file has another hash.
    """
    wheel = folder / WHEEL
    if not wheel.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*pip, "-q", "-d", str(folder), f"bfcl-eval=={VERSION}"], check=False)
        if done.returncode:
            raise SystemExit(f"pip could not fetch bfcl-eval=={VERSION}; put {WHEEL} into {folder}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel} has sha256 {found}, expected {SHA256}: delete it and try again")
    return wheel


def is_held_out(id: str, category: str) -> bool:
    """Whether a prompt is kept for evaluation: by category, or by the hash of its id."""
    return category in HELD_OUT or int(hashlib.sha1(id.encode()).hexdigest(), 16) % 10 == 0


def convert_wheel(wheel: Path, seed: int) -> Conversion:
    """All categories that are used, converted."""
    made = Conversion()
    with zipfile.ZipFile(wheel) as archive:
        for category in (*WITH_CALLS, *WITHOUT_CALLS):
            answers: dict[str, list] = {}
            if category in WITH_CALLS:
                rows = _lines(archive, f"possible_answer/BFCL_v4_{category}.json")
                answers = {row["id"]: row["ground_truth"] for row in rows}
            for record in _lines(archive, f"BFCL_v4_{category}.json"):
                _keep(made, convert(record, answers.get(record["id"], []), category, seed))
        truth = _lines(archive, f"possible_answer/BFCL_v4_{MULTI_TURN}.json")
        answers = {row["id"]: row["ground_truth"] for row in truth}
        docs = {name: _docs(archive, file) for name, file in _CLASS_FILES.items()}
        for record in _lines(archive, f"BFCL_v4_{MULTI_TURN}.json"):
            first = _first_turn(record, answers[record["id"]], docs)
            _keep(made, "nothing to call" if first is None else convert(*first, MULTI_TURN, seed))
    _drop_repeated_questions(made)
    return made


def _drop_repeated_questions(made: Conversion) -> None:
    """Take out of training what a held-out prompt asks too: categories share questions."""
    asked = {_request(example) for example in made.examples if example.held_out}
    kept = [e for e in made.examples if e.held_out or _request(e) not in asked]
    if len(kept) < len(made.examples):
        made.left_out["asked in a held-out prompt too"] += len(made.examples) - len(kept)
    made.examples = kept


def _request(example: Example) -> str:
    said = [m["content"] for m in example.trace["messages"] if m["role"] == "user"]
    return " ".join(" ".join(said).lower().split())


def convert(
    record: dict[str, Any], truth: list[dict[str, Any]], category: str, seed: int
) -> Example | str:
    """One prompt with its possible calls (none: no function fits), or why it cannot be used."""
    messages = [
        {"role": message["role"], "content": message["content"]}
        for message in record["question"][0]
    ]
    if not all(message["content"].strip() for message in messages):
        return "empty message"
    if any(message["role"] == "assistant" for message in messages):
        return "holds answers of another assistant"  # they would be trained on, and replayed
    tools = [_tool(function) for function in record["function"]]
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not tools or len(functions) < len(tools):
        return "no functions, or two of the same name"
    request = messages[-1]["content"]
    reasoning = Reasoning(Random(f"{seed}:{record['id']}"))
    expected = [
        {"name": name, "arguments": arguments} for call in truth for name, arguments in call.items()
    ]
    calls = []
    for call in expected:
        function = functions.get(call["name"])
        if function is None:
            return "gold calls a function that is not offered"
        parameters = function.get("parameters", {})
        chosen = choose(call["arguments"], parameters, request)
        if problems(chosen, parameters):
            return "gold does not satisfy the schema"
        calls.append((call["name"], chosen))
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    if not calls:
        names = list(functions)
        turn["reasoning_content"] = reasoning.fits_none(request, names)
        turn["content"] = refusal(names)
    elif len(calls) == 1:
        name, arguments = calls[0]
        parameters = functions[name].get("parameters", {})
        unused = [name for name in parameters.get("properties", {}) if name not in arguments]
        description = functions[name].get("description", name)
        turn["reasoning_content"] = reasoning.call(request, name, description, arguments, unused)
    else:
        turn["reasoning_content"] = reasoning.calls(request, calls)
    if calls:
        turn["tool_calls"] = [
            {
                "id": f"c{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                },
            }
            for index, (name, arguments) in enumerate(calls, 1)
        ]
    trace = {
        "id": f"bfcl-{record['id']}",
        "category": f"bfcl {category}",
        "messages": [*messages, turn],
        "tools": tools,
    }
    gold = {
        "id": trace["id"],
        "category": trace["category"],
        "kind": category,
        "tools": tools,
        "turns": [expected],
    }
    return Example(trace, gold, is_held_out(record["id"], category))


def choose(expected: dict[str, list], parameters: dict[str, Any], request: str) -> dict[str, Any]:
    """The arguments of the recorded call: of every argument the first possible value that its
    schema allows. Arguments that may be missing are given only if the request names the value."""
    schemas = parameters.get("properties") or {}
    chosen = {}
    for name, options in expected.items():
        if not isinstance(options, list):  # inside an object a few values stand bare
            options = [options]
        schema = schemas.get(name, {})
        values = [_resolve(option, schema, request) for option in options if option != ""]
        values = [value for value in values if not problems(value, schema)] or values
        if values and ("" not in options or _says(request, values[0])):
            chosen[name] = values[0]
        elif not values and "" in options and name in parameters.get("required", ()):
            chosen[name] = ""
    return chosen


def _resolve(option: Any, schema: dict[str, Any], request: str) -> Any:
    """A possible value as a plain one; 7.0 is written 7 unless the request writes 7.0."""
    if isinstance(option, dict):
        return choose(option, schema, request)
    if isinstance(option, list):
        items = schema.get("items") or {}
        return [_resolve(item, items, request) for item in option]
    if isinstance(option, float) and option.is_integer() and str(option) not in request:
        return int(option)
    return option


def _says(request: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    pattern = rf"(?<!\w){re.escape(str(value))}(?!\w)"
    return re.search(pattern, request, re.IGNORECASE) is not None


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of the benchmark as JSON Schema: its names of types are those of three languages."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            name = _TYPES.get(value, value)
            if name is not None:
                made["type"] = name
        elif key == "properties":
            made[key] = {name: json_schema(part) for name, part in value.items()}
        elif key == "items":
            made[key] = json_schema(value)
        elif key != "optional":
            made[key] = value
    return made


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    kept = {key: function[key] for key in ("name", "description") if key in function}
    kept["parameters"] = json_schema(function["parameters"])
    return {"type": "function", "function": kept}


def _first_turn(
    record: dict[str, Any], truth: list[list[str]], docs: dict[str, dict[str, dict]]
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The first turn of a conversation of many, with the functions that its path uses. The gold
    calls stand there as Python source, which is parsed, not run."""
    own = {name: doc for owner in record["involved_classes"] for name, doc in docs[owner].items()}
    calls = [ast.parse(source, mode="eval").body for source in truth[0]]
    names = [entry.split(".")[-1] for entry in record["path"]]
    names += [call.func.id for call in calls]
    offered = [own[name] for name in dict.fromkeys(names) if name in own]
    if not calls:
        return None
    gold = []
    for call in calls:
        declared = list(own[call.func.id]["parameters"]["properties"])
        arguments = dict(zip(declared, call.args, strict=False))
        arguments |= {word.arg: word.value for word in call.keywords}
        values = {name: [ast.literal_eval(value)] for name, value in arguments.items()}
        gold.append({call.func.id: values})
    return {**record, "function": offered}, gold


def _docs(archive: zipfile.ZipFile, file: str) -> dict[str, dict]:
    return {doc["name"]: doc for doc in _lines(archive, f"multi_turn_func_doc/{file}.json")}


def _lines(archive: zipfile.ZipFile, name: str) -> Iterator[dict[str, Any]]:
    for line in archive.read(f"{_DATA}/{name}").decode().splitlines():
        if line.strip():
            yield json.loads(line)


def _keep(made: Conversion, example: Example | str) -> None:
    if isinstance(example, str):
        made.left_out[example] += 1
    else:
        made.examples.append(example)
