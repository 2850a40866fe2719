"""Real recordings, where they lie beside the project: all of them read without an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from whiflash_agents.traces import TraceProblem, read_traces, validate

RECORDINGS = Path(__file__).parent.parent.parent / "shared" / "data" / "traces"
pytestmark = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="no recordings beside the project")
TAU = RECORDINGS / "tau_airline.json"


def test_all_tau_trajectories_read() -> None:
    told: list[TraceProblem] = []
    report = validate([TAU], sink=told.append)
    assert report.ok
    assert report.total("traces") == 100
    assert report.total("assistant_turns") == 1229
    assert report.total("tool_calls") == 572
    # What is loose about them: ids of calls that come again.
    assert all("was used by an earlier call" in problem.message for problem in told)
    traces = {trace.id: trace for trace in read_traces([TAU])}
    assert len(traces) == 100
    trace = traces["tau-0-trial-0"]
    assert trace.messages[0].role == "system"
    assert trace.metadata["task_id"] == 0
    calls = [call for m in trace.messages for call in m.tool_calls]
    assert all(isinstance(call.arguments, dict) for call in calls)


def test_tau_trajectories_read_alike_as_lines_and_compressed(tmp_path: Path) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in json.loads(TAU.read_bytes()))
    path = tmp_path / "tau.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode(), 1))
    assert list(read_traces([path])) == list(read_traces([TAU]))


def test_swe_agent_function_calling() -> None:
    (trace,) = read_traces([RECORDINGS / "swe_agent_function_calling.traj"])
    assert trace.id == "swe_agent_function_calling:1"
    assert len(trace.assistant_turns) == 11
    first = trace.messages[2]
    assert first.content is not None
    assert first.content.startswith("Let's first start by reproducing")
    assert first.tool_calls[0].name == "create"
    assert first.tool_calls[0].arguments == {"filename": "reproduce.py"}
    assert trace.messages[3].tool_call_id == first.tool_calls[0].id


def test_swe_agent_thought_and_action() -> None:
    (trace,) = read_traces([RECORDINGS / "swe_agent_ctf.traj"])
    assert len(trace.assistant_turns) == 4
    assert not any(message.tool_calls for message in trace.messages)
    assert "tshark" in (trace.messages[2].content or "")
