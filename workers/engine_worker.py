"""`EngineWorker`: the Ray actor. One engine on one device, in the actor's only thread.

The pool calls `advance` again and again: each call brings new rows and takes finished ones away,
and the rows in between stay in the engine, so that new ones join the running batch. One thread and
one call at a time: threaded actors have leaked GPU memory, and the engine needs no lock this way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from whiflash_agents.batch.plan import Row
from whiflash_agents.batch.session import EngineSession
from whiflash_agents.batch.session_spec import SessionSpec


class EngineWorker:
    """What runs inside the actor. Building it does nothing, so that an actor that cannot load its
    model says so in the answer to `load` instead of dying without a reason."""

    def __init__(self) -> None:
        self._session: EngineSession | None = None

    def process_id(self) -> int:
        """Answers as soon as the actor's process runs."""
        return os.getpid()

    def load(
        self, load: Callable[[SessionSpec], EngineSession], spec: SessionSpec
    ) -> dict[str, Any]:
        """Build the session from files on this machine; returns its description."""
        self._session = load(spec)
        return self._session.describe()

    def advance(self, rows: list[Row], seconds: float) -> tuple[list[dict[str, Any]], Any]:
        """Take `rows`, decode until a row is finished or `seconds` have passed.

        Returns the finished output rows, and the session's own description with its totals so far.
        """
        assert self._session is not None  # the pool loads first
        for row in rows:
            self._session.submit(row)
        return self._session.advance(seconds), self._session.describe()
