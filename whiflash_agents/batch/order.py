"""Which row goes out next, and in which order output rows come back.

Turns of one trace share their history, so an engine reuses most of a prompt when it decodes them
one after the other. `RowOrder` therefore keeps as many traces open as there are decoding slots and
advances each of them turn by turn. Output leaves in input order, through a window of bounded
length: a long trace cannot make finished rows pile up behind it without end (failure kind 22).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .plan import Row, TracePlan

# Finished rows that may wait for an earlier one, as a multiple of the rows in flight (vLLM's 16).
WINDOW_FACTOR = 16


@dataclass(slots=True)
class _OpenTrace:
    plan: TracePlan
    next_index: int  # place, in the whole run, of the next row to hand out
    left: int
    in_flight: int = 0


class RowOrder:
    """Hands out rows of `plans` and returns output rows in input order.

    Args:
        plans: one per trace, in input order; consumed lazily.
        capacity: rows that may be out at once.
        slots: traces kept open side by side.
        window: rows between the next one to be written and the last one handed out.
    """

    def __init__(
        self, plans: Iterator[TracePlan], *, capacity: int, slots: int, window: int | None = None
    ) -> None:
        self._plans = plans
        self._capacity = capacity
        self._slots = slots
        self._window = WINDOW_FACTOR * capacity if window is None else window
        self._open: list[_OpenTrace] = []
        self._planned = 0  # rows of all traces opened so far
        self._written = 0
        self._out: dict[str, tuple[int, _OpenTrace]] = {}
        self._finished: dict[int, dict[str, Any]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._out)

    def next_row(self) -> Row | None:
        """The row to hand out now, or None: capacity or window is full, or no rows are left."""
        if len(self._out) >= self._capacity:
            return None
        trace = self._choose()
        if trace is None:
            return None
        row = next(trace.plan.rows)
        self._out[row.id] = (trace.next_index, trace)
        trace.next_index += 1
        trace.left -= 1
        trace.in_flight += 1
        return row

    def accept(self, output: dict[str, Any]) -> None:
        """Take back an output row."""
        index, trace = self._out.pop(output["custom_id"])
        trace.in_flight -= 1
        if not trace.left and not trace.in_flight:
            self._open.remove(trace)
        self._finished[index] = output

    def ready(self) -> Iterator[dict[str, Any]]:
        """Output rows whose turn has come."""
        while (output := self._finished.pop(self._written, None)) is not None:
            self._written += 1
            yield output

    def leftovers(self) -> Iterator[dict[str, Any]]:
        """Finished rows that still wait for an earlier one: what an interrupted run also keeps."""
        for index in sorted(self._finished):
            yield self._finished.pop(index)

    def _choose(self) -> _OpenTrace | None:
        limit = self._written + self._window
        eligible = [trace for trace in self._open if trace.left and trace.next_index < limit]
        idle = next((trace for trace in eligible if not trace.in_flight), None)
        if idle is not None:
            return idle
        if len(self._open) < self._slots and (trace := self._open_next(limit)):
            return trace
        if eligible:
            return min(eligible, key=lambda trace: trace.in_flight)
        return self._open_next(limit)

    def _open_next(self, limit: int) -> _OpenTrace | None:
        if self._planned >= limit:
            return None
        plan = next(self._plans, None)
        if plan is None:
            return None
        trace = _OpenTrace(plan, next_index=self._planned, left=plan.count)
        self._planned += plan.count
        self._open.append(trace)
        return trace
