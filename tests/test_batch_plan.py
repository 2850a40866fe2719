"""Planning: which turns become rows, with which history, id and seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import conversation, write_traces

from whiflash_agents.batch.plan import check_input, plan_rows, plan_trace, row_seed
from whiflash_agents.engine.errors import TraceError
from whiflash_agents.traces import Trace


def trace(*contents: str, trace_id: str = "t") -> Trace:
    return Trace.model_validate({"id": trace_id, "messages": conversation(*contents)})


def test_replay_makes_a_row_of_every_assistant_turn_with_the_history_before_it() -> None:
    plan = plan_trace(trace("a", "A", "b", "B", "c"), "replay", seed=1, params={"max_tokens": 3})
    rows = list(plan.rows)
    assert plan.count == len(rows) == 2
    assert [row.id for row in rows] == ["t#0", "t#1"]
    assert [[m["content"] for m in row.messages] for row in rows] == [["a"], ["a", "A", "b"]]
    assert [row.recorded["content"] for row in rows if row.recorded] == ["A", "B"]
    assert all(row.params == {"max_tokens": 3} for row in rows)


def test_continue_writes_the_turn_after_the_last_message() -> None:
    (row,) = plan_trace(trace("a", "A", "b"), "continue", seed=1, params={}).rows
    assert (row.id, row.turn, row.recorded) == ("t#1", 1, None)
    assert [m["content"] for m in row.messages] == ["a", "A", "b"]


def test_row_seed_depends_on_run_seed_and_id_only() -> None:
    seeds = {row_seed(seed, f"t#{turn}") for seed in range(20) for turn in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(5, "t#1") == row_seed(5, "t#1") == 5218743543683809689


def test_planning_is_lazy() -> None:
    read = []

    def traces():  # type: ignore[no-untyped-def]
        for number in range(1000):
            read.append(number)
            yield trace("a", "A", trace_id=str(number))

    plans = plan_rows(traces(), "replay", seed=0, params={})
    next(plans)
    next(plans)
    assert len(read) == 2


def test_trace_without_assistant_turn_has_no_rows_in_replay() -> None:
    traces = [trace("a"), trace("a", "A", trace_id="u")]
    assert [p.trace_id for p in plan_rows(traces, "replay", seed=0, params={})] == ["u"]
    assert len(list(plan_rows(traces, "continue", seed=0, params={}))) == 2


def test_first_pass_counts_traces_and_rows(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A", "b", "B"], "y": ["a"], "z": ["a"]})
    replay = check_input([path], "replay", format=None, limit=None)
    assert (replay.traces, replay.rows, replay.traces_without_turns) == (3, 2, 2)
    assert check_input([path], "continue", format=None, limit=None).rows == 3
    assert check_input([path], "continue", format=None, limit=2).rows == 2


def test_first_pass_tells_the_first_problem_with_its_place_and_counts_the_rest(
    tmp_path: Path,
) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    bad = json.dumps({"id": "y", "messages": [{"role": "user", "content": 3}]})
    with path.open("a") as file:
        file.write(f"{bad}\n{{not json\n")
    with pytest.raises(TraceError) as error:
        check_input([path], "replay", format=None, limit=None)
    assert str(error.value).startswith(f"{path}:2: messages[0].content")
    assert "and 1 more" in str(error.value)


def test_problem_behind_the_limit_does_not_count(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    with path.open("a") as file:
        file.write("{not json\n")
    assert check_input([path], "replay", format=None, limit=1).rows == 1


def test_trace_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    copy = tmp_path / "u.jsonl"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(TraceError, match="'x' is also the id of"):
        check_input([path, copy], "replay", format=None, limit=None)


def test_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "t.jsonl", {"x": ["a", "A"]})
    with pytest.raises(TraceError, match=r"expected one of .*openai"):
        check_input([path], "replay", format="opnai", limit=None)
