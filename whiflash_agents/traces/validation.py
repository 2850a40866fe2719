"""Validation of trace files without a model: every problem told as it is found, and counts.

`whiflash-batch validate` is a thin shell over `validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .problems import TraceProblem
from .records import MAX_RECORD_BYTES, display_name
from .scan import TraceScanner


@dataclass(slots=True)
class FileReport:
    """Counts for one file.

    `records` is the number of records found, `traces` of those that can be used; `assistant_turns`
    and `tool_calls` count over the usable ones. A file that cannot be opened has one error and no
    records.
    """

    path: str
    records: int = 0
    traces: int = 0
    assistant_turns: int = 0
    tool_calls: int = 0
    errors: int = 0
    warnings: int = 0


@dataclass(slots=True)
class ValidationReport:
    """The counts of `FileReport` per file, and summed over all files."""

    files: list[FileReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every record can be used; warnings do not count."""
        return self.total("errors") == 0

    def total(self, count: str) -> int:
        """The sum over all files of one of FileReport's counts, by its name."""
        return sum(getattr(file, count) for file in self.files)


def validate(
    paths: Sequence[str | Path],
    format: str | None = None,
    sink: Callable[[TraceProblem], None] | None = None,
    *,
    limit: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> ValidationReport:
    """Reads all files to the end, hands each problem to `sink` at once, and returns the counts.

    With `limit`, reading ends at the trace of that number, as in a run; files behind it are not
    opened. Memory is that of `scan_traces`; nothing is kept per problem. Raises TraceError for an
    unknown `format` and for stdin named twice.
    """
    scanner = TraceScanner(paths, format=format, max_record_bytes=max_record_bytes)
    report = ValidationReport()
    for path in scanner.paths:
        if report.total("traces") == limit:
            break
        counts = FileReport(display_name(path))
        report.files.append(counts)
        for item in scanner.scan(path):
            if isinstance(item, TraceProblem):
                if item.severity == "error":
                    counts.errors += 1
                else:
                    counts.warnings += 1
                if sink is not None:
                    sink(item)
                continue
            counts.traces += 1
            for message in item.messages:
                if message.role == "assistant":
                    counts.assistant_turns += 1
                    counts.tool_calls += len(message.tool_calls)
            if report.total("traces") == limit:
                break
        counts.records = scanner.records
    return report
