"""From traces to rows: which turns a run generates, from which history, under which id and seed.

`replay` makes one row of every assistant turn, with the recorded history before it; `continue`
makes one row that writes the next assistant turn. Planning is lazy: a trace is turned into rows
when the run reaches it, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whiflash_agents.engine.errors import TraceError
from whiflash_agents.traces import Trace, TraceProblem, display_name, scan_traces

Mode = Literal["replay", "continue"]


@dataclass(frozen=True, slots=True)
class Row:
    """One assistant turn to generate. Plain data, so that it can travel to another process.

    `turn` counts the assistant turns of the trace from 0. `recorded` is the turn that the trace
    holds at this place (replay), else None. `params` are keyword arguments of `SamplingParams`
    without the seed.
    """

    id: str
    trace_id: str
    turn: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    recorded: dict[str, Any] | None
    seed: int
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The rows of one trace: how many, and an iterator that makes them one by one."""

    trace_id: str
    count: int
    rows: Iterator[Row]


def row_id(trace_id: str, turn: int) -> str:
    """The `custom_id` of a row."""
    return f"{trace_id}#{turn}"


def row_seed(run_seed: int, custom_id: str) -> int:
    """The seed of a row, in [0, 2**63): a hash of the run's seed and the row's id.

    It does not depend on the row's place in the input, so a run split over files or workers
    generates the same rows.
    """
    digest = hashlib.blake2b(f"{run_seed}\0{custom_id}".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def turns_of(trace: Trace, mode: Mode) -> list[int]:
    """Indices into `trace.messages` where a turn is to be generated (the end, for `continue`)."""
    if mode == "continue":
        return [len(trace.messages)]
    return trace.assistant_turns


def plan_trace(trace: Trace, mode: Mode, *, seed: int, params: Mapping[str, Any]) -> TracePlan:
    """The rows of `trace`. Rows share the trace's message objects; nothing is copied."""
    positions = turns_of(trace, mode)

    def rows() -> Iterator[Row]:
        messages = [message.model_dump() for message in trace.messages]
        done = len(trace.assistant_turns)
        for number, at in enumerate(positions):
            turn = number if mode == "replay" else done
            custom_id = row_id(trace.id, turn)
            yield Row(
                id=custom_id,
                trace_id=trace.id,
                turn=turn,
                messages=messages[:at],
                tools=trace.tools,
                recorded=messages[at] if mode == "replay" else None,
                seed=row_seed(seed, custom_id),
                params=dict(params),
            )

    return TracePlan(trace.id, len(positions), rows())


def plan_rows(
    traces: Iterable[Trace], mode: Mode, *, seed: int, params: Mapping[str, Any]
) -> Iterator[TracePlan]:
    """Plans in input order; traces without a turn to generate are left out."""
    for trace in traces:
        plan = plan_trace(trace, mode, seed=seed, params=params)
        if plan.count:
            yield plan


@dataclass(slots=True)
class InputCount:
    """What the first pass over the input found: everything is readable, and this is how much."""

    traces: int = 0
    rows: int = 0
    traces_without_turns: int = 0
    ending_in_a_turn: int = 0


def check_input(
    paths: Iterable[str | Path],
    mode: Mode,
    *,
    format: str | None,
    limit: int | None,
    names: Sequence[str] | None = None,
) -> InputCount:
    """Read the whole input once, before any model is loaded.

    Raises `TraceError` with the first problem (file, line, field, remedy) and the number of
    further ones, or if there is no record at all: behind a pipe, that is how a failed producer
    looks. The scan also refuses a trace id that occurs twice: rows are told apart by it. `names`
    are the inputs as the caller named them, for paths that stand for something else (a spool).
    """
    paths = list(paths)
    count = InputCount()
    first: TraceProblem | None = None
    further = -1
    for item in scan_traces(paths, format=format):
        if limit is not None and count.traces == limit:
            break
        if isinstance(item, TraceProblem):
            first = first or item
            further += 1
            continue
        count.traces += 1
        turns = len(turns_of(item, mode))
        count.rows += turns
        count.traces_without_turns += not turns
        count.ending_in_a_turn += bool(item.messages) and item.messages[-1].role == "assistant"
    if first:
        more = f" (and {further} more; `whiflash-batch validate` lists all)" if further else ""
        raise TraceError(f"{first}{more}")
    if not count.traces:
        named = ", ".join(display_name(str(name)) for name in names or paths)
        raise TraceError(f"{named}: no record found; name files of traces that are not empty")
    return count
