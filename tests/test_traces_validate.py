"""Structural checks of traces, and validation of whole files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whiflash_agents.engine.errors import TraceError
from whiflash_agents.traces import Trace, TraceProblem, read_traces, scan_traces, validate
from whiflash_agents.traces.checks import check_trace
from whiflash_agents.traces.trace_ids import SeenIds

USER = {"role": "user", "content": "hi"}
TURN = {"role": "assistant", "content": "ho"}


def calling(*ids: str | None, name: str = "f", arguments: Any = None) -> dict[str, Any]:
    calls = [{"id": i, "name": name, "arguments": arguments or {}} for i in ids]
    return {"role": "assistant", "tool_calls": calls}


def answer(call_id: str | None, content: str | None = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def found(*messages: dict[str, Any], tools: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    trace = Trace.model_validate(
        {
            "id": "t",
            "messages": list(messages),
            "tools": [{"type": "function", "function": {"name": name}} for name in tools],
        }
    )
    return [(finding.severity, str(finding.field)) for finding in check_trace(trace)]


@pytest.mark.parametrize(
    "messages",
    [
        (USER, TURN),
        (USER, calling("a", "b"), answer("b"), answer("a"), TURN),
        (USER, calling(None, None), answer(None), answer(None), TURN),
        (USER, calling("a"), answer(None), TURN),
        (USER, calling("a"), answer("a", content=""), TURN),
        (USER, calling("a")),
    ],
)
def test_sound_traces_raise_no_finding(messages: tuple[dict[str, Any], ...]) -> None:
    assert found(*messages) == []


@pytest.mark.parametrize(
    ("messages", "findings"),
    [
        ((), [("error", "messages")]),
        ((USER, answer("x"), TURN), [("error", "messages[1].tool_call_id")]),
        (
            (USER, calling("a"), answer("a"), answer("b"), TURN),
            [("error", "messages[3].tool_call_id")],
        ),
        (({"role": "user", "content": None}, TURN), [("error", "messages[0].content")]),
        (({"role": "system"}, TURN), [("error", "messages[0].content")]),
        (({"role": "user", "content": ""}, TURN), [("warning", "messages[0].content")]),
        ((USER, {"role": "assistant", "content": ""}), [("warning", "messages[1]")]),
        ((USER,), [("warning", "messages")]),
        ((USER, answer(None), TURN), [("warning", "messages[1].tool_call_id")]),
        (
            (USER, calling("a"), answer("a"), answer("a"), TURN),
            [("warning", "messages[3].tool_call_id")],
        ),
        ((USER, calling("a"), answer("a", None), TURN), [("warning", "messages[2].content")]),
        ((USER, calling("a"), USER, TURN), [("warning", "messages[2]")]),
        (
            (USER, calling("a"), answer("a"), calling("a"), answer("a"), TURN),
            [("warning", "messages[3].tool_calls[0].id")],
        ),
        (
            (USER, calling("a", arguments="{oops"), answer("a"), TURN),
            [("warning", "messages[1].tool_calls[0].arguments")],
        ),
        (
            (USER, {"role": "assistant", "content": "<tool_call>{oops</tool_call>"}),
            [("warning", "messages[1].content")],
        ),
    ],
)
def test_findings(messages: tuple[dict[str, Any], ...], findings: list[tuple[str, str]]) -> None:
    assert found(*messages) == findings


def test_a_call_of_an_undeclared_tool_is_a_warning_where_tools_are_declared() -> None:
    messages = (USER, calling("a", name="g"), answer("a"), TURN)
    assert found(*messages) == []
    assert found(*messages, tools=("g",)) == []
    assert found(*messages, tools=("f", "h")) == [("warning", "messages[1].tool_calls[0].name")]


@pytest.fixture
def mixed(tmp_path: Path) -> list[Path]:
    """A file with one sound trace, one with a warning, three with errors; and a missing file."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    records: list[Any] = [
        {
            "id": "sound",
            "messages": [USER, {"role": "assistant", "tool_calls": [call, {**call, "id": "b"}]}],
        },
        {"id": "warned", "messages": [USER]},
        {"id": "orphan", "messages": [USER, answer("x"), TURN]},
        {"id": "sound", "messages": [USER, TURN]},
        {"prompt": "x"},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [path, tmp_path / "missing.jsonl"]


def test_validation_counts_and_tells_every_problem(mixed: list[Path]) -> None:
    told: list[TraceProblem] = []
    report = validate(mixed, sink=told.append)
    assert [(p.line, p.severity, p.trace_id) for p in told] == [
        (2, "warning", "warned"),
        (3, "error", "orphan"),
        (4, "error", "sound"),
        (5, "error", None),
        (None, "error", None),
    ]
    first, second = report.files
    assert (first.records, first.traces, first.assistant_turns, first.tool_calls) == (5, 2, 1, 2)
    assert (first.errors, first.warnings) == (3, 1)
    assert (second.records, second.traces, second.errors) == (0, 0, 1)
    assert report.total("errors") == 4
    assert not report.ok
    assert str(told[1]) == (
        f"{mixed[0]}:3: messages[1].tool_call_id: no call before this message has the id 'x' "
        "(correct the id, or remove the message)"
    )


def test_warnings_alone_leave_a_file_valid(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": [USER]}))
    report = validate([path])
    assert report.ok
    assert report.total("warnings") == 1


def test_limit_ends_validation_where_a_run_would_end(mixed: list[Path]) -> None:
    told: list[TraceProblem] = []
    report = validate(mixed, sink=told.append, limit=2)
    assert [problem.line for problem in told] == [2]
    (first,) = report.files
    assert (first.records, first.traces) == (2, 2)
    assert len(validate(mixed, limit=3).files) == 2


def test_a_named_format_is_used_for_every_record(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"messages": [USER, TURN]}))
    told: list[TraceProblem] = []
    assert not validate([path], "tau-bench", told.append).ok
    assert told[0].field == "traj"
    with pytest.raises(TraceError, match="expected one of"):
        validate([path], "parquet")


def test_scan_and_read_agree_with_validation(mixed: list[Path]) -> None:
    told: list[TraceProblem] = []
    validate(mixed, sink=told.append)
    scanned = list(scan_traces(mixed, warnings=True))
    assert [item for item in scanned if isinstance(item, TraceProblem)] == told
    quiet = [item for item in scan_traces(mixed) if isinstance(item, TraceProblem)]
    assert quiet == [problem for problem in told if problem.severity == "error"]
    with pytest.raises(TraceError) as caught:
        list(read_traces(mixed))
    assert str(caught.value) == str(quiet[0])


def test_the_example_traces_are_sound() -> None:
    path = Path(__file__).parent.parent / "examples" / "traces.jsonl"
    told: list[TraceProblem] = []
    report = validate([path], sink=told.append)
    assert told == []
    assert report.total("traces") >= 8
    assert report.total("tool_calls") > report.total("traces")
    traces = list(read_traces([path]))
    assert all(trace.tools for trace in traces)
    assert any(len(m.tool_calls) > 1 for trace in traces for m in trace.messages)
    assert any(m.reasoning_content for trace in traces for m in trace.messages)


def test_seen_ids_tell_the_first_place_of_every_id() -> None:
    seen = SeenIds()
    ids = [f"trace-{number}" for number in range(20_000)]
    assert [seen.add(trace_id, i) for i, trace_id in enumerate(ids)] == [None] * len(ids)
    assert [seen.add(trace_id, 10**6) for trace_id in ids] == list(range(len(ids)))


def test_memory_does_not_grow_with_the_file_beyond_the_ids(tmp_path: Path) -> None:
    measured = (
        "import resource, sys\n"
        "from whiflash_agents.traces import validate\n"
        "assert validate(sys.argv[1:]).ok\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )

    def peak_kib(lines: int) -> int:
        path = tmp_path / f"{lines}.jsonl"
        with path.open("w") as file:
            for number in range(lines):
                record = {"id": f"trace-{number}", "messages": [USER, TURN], "note": "x" * 500}
                file.write(json.dumps(record) + "\n")
        command = [sys.executable, "-c", measured, str(path)]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    growth = peak_kib(60_000) - peak_kib(2_000)
    assert growth < 6_000  # 36 MB more to read; 24 bytes an id are 1.4 MB
