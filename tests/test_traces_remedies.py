"""What problems of trace files point at: the place in the record, the cause, a useful remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from whiflash_agents.traces import TraceProblem, validate
from whiflash_agents.traces.checks import check_trace
from whiflash_agents.traces.schema import Trace

USER = {"role": "user", "content": "hi"}
TURN = {"role": "assistant", "content": "ho"}
TOOLS = [{"type": "function", "function": {"name": "known"}}]


def told(tmp_path: Path, *records: Any, format: str | None = None) -> list[TraceProblem]:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    problems: list[TraceProblem] = []
    validate([path], format, problems.append)
    return problems


def turn(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"messages": [USER, turn(name="g")]}, "messages[1].tool_calls[0].function.name"),
        (
            {"messages": [USER, turn(name="known", arguments="{oops")]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"traj": [USER, turn(name="g")]}, "traj[1].tool_calls[0].function.name"),
        ({"history": [USER, turn(name="g")]}, "history[1].tool_calls[0].function.name"),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "g"}}]},
            "messages[1].function_call.name",
        ),
        (
            {
                "messages": [
                    {"type": "human", "data": {"content": "hi"}},
                    {
                        "type": "ai",
                        "data": {"content": "", "tool_calls": [{"name": "known", "args": "{oops"}]},
                    },
                ]
            },
            "messages[1].data.tool_calls[0].args",
        ),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "human", "value": ""},
                    {"from": "gpt", "value": "x"},
                ],
            },
            "conversations[0]",
        ),
        ({"messages": [USER]}, "messages"),
        ({"traj": [USER]}, "traj"),
    ],
)
def test_warning_names_the_field_as_it_stands_in_the_record(
    tmp_path: Path, record: dict[str, Any], field: str
) -> None:
    (problem,) = told(tmp_path, {"tools": TOOLS, **record})
    assert problem.severity == "warning"
    assert problem.field == field


def test_field_of_a_batch_request_begins_at_its_body(tmp_path: Path) -> None:
    body = {"messages": [USER, turn(name="g")], "tools": TOOLS}
    (problem,) = told(tmp_path, {"custom_id": "x", "body": body})
    assert problem.field == "body.messages[1].tool_calls[0].function.name"


def test_field_of_a_bare_list_in_a_list_begins_with_its_places(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([[USER, TURN], [{"role": "user", "content": ""}, TURN]]))
    problems: list[TraceProblem] = []
    validate([path], sink=problems.append)
    assert [problem.field for problem in problems] == ["[1][0].content"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "messages[1].role"),
        (turn(arguments="{}"), "messages[1].tool_calls[0].function.name"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ],
)
def test_missing_key_is_told_as_missing(
    tmp_path: Path, message: dict[str, Any], field: str
) -> None:
    (problem,) = told(tmp_path, {"messages": [USER, message]})
    assert problem.field == field
    assert problem.message.startswith("is missing; expected ")
    key = field.rpartition(".")[2]
    holder = json.loads(json.dumps(message))
    target = holder
    if "tool_calls" in holder:
        target = holder["tool_calls"][0]["function"]
    elif key == "text":
        target = holder["content"][0]
    target[key] = None
    (problem,) = told(tmp_path, {"messages": [USER, holder]})
    assert problem.message.startswith("expected ")
    assert problem.message.endswith("found null")


@pytest.mark.parametrize("missing", ["from", "value"])
def test_missing_key_of_a_sharegpt_turn_is_told_as_missing(tmp_path: Path, missing: str) -> None:
    spoken = {"from": "human", "value": "x"}
    spoken.pop(missing)
    (problem,) = told(tmp_path, {"conversations": [spoken]})
    assert problem.message.startswith("is missing; ")


def test_file_named_twice_is_told_once_and_read_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": [USER, TURN]}))
    link = tmp_path / "link.jsonl"
    os.symlink(path, link)
    problems: list[TraceProblem] = []
    report = validate([path, path, link], sink=problems.append)
    assert [problem.message for problem in problems] == [
        "is named twice",
        f"is the same file as {path}",
    ]
    assert [problem.path for problem in problems] == [str(path), str(link)]
    assert [file.traces for file in report.files] == [1, 0, 0]
    assert report.total("errors") == 2


def test_record_with_an_error_is_not_said_to_lack_an_assistant_turn_as_well() -> None:
    messages = [USER, {"role": "tool", "tool_call_id": "x", "content": "y"}]
    trace = Trace.model_validate({"id": "t", "messages": messages})
    assert [finding.severity for finding in check_trace(trace)] == ["error"]


def test_wrong_format_names_the_one_that_the_record_looks_like(tmp_path: Path) -> None:
    (problem,) = told(tmp_path, {"messages": [USER, TURN]}, format="tau-bench")
    assert problem.remedy == "the record looks like --format openai; name that, or leave it out"
    (problem,) = told(tmp_path, {"prompt": "x"}, format="tau-bench")
    assert problem.field == "traj"
    assert "--format" not in problem.remedy
    (problem,) = told(tmp_path, {"messages": [{"role": "x"}]}, format="openai")
    assert "--format" not in problem.remedy


@pytest.mark.parametrize("format", [None, "openai-batch"])
def test_output_row_is_told_as_such(tmp_path: Path, format: str | None) -> None:
    row = {"id": "batch_req_1", "custom_id": "x#0", "response": {}, "error": None}
    (problem,) = told(tmp_path, {**row, "whiflash": {}}, format=format)
    assert "an output row of `whiflash-batch run`" in problem.message
    (problem,) = told(tmp_path, row, format=format)
    assert "an output row of a batch" in problem.message


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + bytes(range(256)) * 40,
        bytes(range(128, 256)) * 10 + b"\n" + bytes(range(128, 256)),
        "\n".join(json.dumps({"messages": [USER, TURN]}) for _ in range(3)).encode("utf-16-le"),
    ],
    ids=["archive", "no text", "utf-16 without mark"],
)
@pytest.mark.parametrize("name", ["t", "t.jsonl"])
def test_binary_file_is_one_error(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    problems: list[TraceProblem] = []
    validate([path], sink=problems.append)
    assert [problem.message for problem in problems] == ["looks like a binary file"]


def test_damage_inside_a_text_file_spares_its_other_records(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps({"messages": [USER, TURN]}).encode()
    path.write_bytes(good + b"\n" + b"\0" * 500 + b"\n" + good + b"\n\xff\xfe\xfd\n")
    report = validate([path])
    assert (report.total("traces"), report.total("errors")) == (2, 2)
