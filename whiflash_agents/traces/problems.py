"""What can be wrong with a trace: `TraceProblem`, told with file, line, field and remedy.

Readers raise `RecordError`, which knows only the record; the scan turns it into a `TraceProblem`,
which also knows where the record stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whiflash_agents.engine.errors import TraceError

Severity = Literal["error", "warning"]


class RecordError(TraceError):
    """A record cannot be read. `field` is a path inside it, such as `messages[2].content`.

    Whoever reads a part raises with a path relative to that part; whoever handed the part down
    completes it with `inside`. So a path costs nothing unless something is wrong.
    """

    def __init__(self, field: str | None, message: str, remedy: str) -> None:
        super().__init__(f"{field}: {message} ({remedy})" if field else f"{message} ({remedy})")
        self.field = field
        self.message = message
        self.remedy = remedy

    def inside(self, parent: str) -> RecordError:
        """The same error with its field, which was relative to `parent`, told in full."""
        if not self.field:
            return RecordError(parent, self.message, self.remedy)
        joint = "" if self.field.startswith("[") else "."
        return RecordError(f"{parent}{joint}{self.field}", self.message, self.remedy)


@dataclass(frozen=True, slots=True)
class TraceProblem:
    """One thing wrong with one place of a trace file.

    An "error" means that the record gave no trace; a "warning" means that it did, and something
    about it deserves a look. `line` counts from 1 and is None where the whole file is concerned;
    `row` counts the file's records from 0, blank lines left out. `trace_id` is set once the id of
    the record is known.
    """

    path: str
    line: int | None
    field: str | None
    message: str
    remedy: str
    row: int | None = None
    severity: Severity = "error"
    trace_id: str | None = None

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        field = f"{self.field}: " if self.field else ""
        return f"{place}: {field}{self.message} ({self.remedy})"


def expected(what: str, holder: object, key: str) -> str:
    """The message for a `holder[key]` that is not `what` was expected, or is not there at all."""
    if isinstance(holder, dict) and key not in holder:
        return f"is missing; expected {what}"
    value = holder.get(key) if isinstance(holder, dict) else holder
    return f"expected {what}, found {shown(value)}"


def shown(value: object, limit: int = 60) -> str:
    """`value` as an error message quotes it: its repr, cut to about `limit` characters."""
    text = repr(value[: limit + 1]) if isinstance(value, str) else None
    if text is None:
        if isinstance(value, (list, dict)):
            kind = "list" if isinstance(value, list) else "object"
            return f"a JSON {kind} of {len(value)}"
        text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
        text = "null" if value is None else text
    return text if len(text) <= limit else text[: limit - 3] + "..."
