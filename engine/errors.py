"""The project's exceptions. Each names the thing, its value, what was expected and what to do.

They live on the ground floor so that every floor can raise and catch them without loading torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class WhiFlashError(Exception):
    """Parent of every error this project raises on purpose."""


class RequestError(WhiFlashError, ValueError):
    """A request asks for something impossible or unsupported."""


class UnsupportedTargetError(WhiFlashError):
    """The target model cannot be driven by the engine (architecture, cache or attention)."""


class ContextLengthError(RequestError):
    """Prompt and requested tokens do not fit the target's context or the KV cache."""


class CheckpointError(WhiFlashError):
    """A checkpoint is missing, incomplete, or does not fit the target."""


class ModelNotFoundError(WhiFlashError):
    """A model, or one of its files, cannot be found or fetched."""


class TraceError(WhiFlashError, ValueError):
    """A trace cannot be read; the text names file, line, field, value and remedy."""


class SettingsError(WhiFlashError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class Change(NamedTuple):
    """One thing that is not what it was: its name, dotted where it is in another, and both values,
    None where there is none."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.then!r}, now {self.now!r}"


class ChangedError(SettingsError):
    """What an earlier run left was made from something else, so it cannot be gone on with.

    Args:
        found: what was left, and where.
        changes: all that differ.
        remedy: what to do.
    """

    def __init__(self, found: str, changes: Sequence[Change], remedy: str) -> None:
        self.found, self.changes, self.remedy = found, tuple(changes), remedy
        super().__init__(self.worded([str(change) for change in changes]))

    def worded(self, lines: Sequence[str]) -> str:
        """The message with `lines` for the changes: whoever knows other names for them tells it in
        these."""
        return f"{self.found} ({'; '.join(lines)}); {self.remedy}"


class OutputError(WhiFlashError):
    """The output of a run cannot be written where it was asked for."""


class WorkerError(WhiFlashError):
    """A worker could not start, or died while it held work."""
