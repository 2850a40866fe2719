"""The protocol by which a run hands rows out: submit a row, collect output rows.

`batch/local.py` implements it with an engine in this process, `workers/pool.py` with Ray actors;
a run does not know which one it drives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from whiflash_agents.settings import Settings

from .plan import Row
from .session_spec import SessionSpec

OutputRow = dict[str, Any]


class Runner(Protocol):
    """Where rows are generated."""

    @property
    def capacity(self) -> int:
        """Rows that may be held at once (submitted and not yet returned by `results`)."""

    @property
    def slots(self) -> int:
        """Rows that are decoded at once; the rest of `capacity` waits close to the engine."""

    def submit(self, row: Row) -> None:
        """Take `row`. Rows of one trace are decoded by the same engine, in the order given."""

    def results(self, timeout: float) -> list[OutputRow]:
        """Output rows that are finished; waits up to `timeout` seconds for the first one.

        A row that cannot be generated comes back as a failed row. Raises `WorkerError` when rows
        can no longer be generated at all.
        """

    def describe(self) -> list[dict[str, Any]]:
        """One entry per engine: device, dtype, totals; for the figures of the run."""

    def close(self) -> None:
        """Drop what is unfinished and free engines and processes. May be called twice."""


RunnerFactory = Callable[[SessionSpec, Settings], Runner]
