"""Reading traces: `read_traces` stops at the first bad record, `scan_traces` tells it and goes on.

Both stream: memory is bounded by the largest record plus 16 to 24 bytes per trace id (`trace_ids`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from whiflash_agents.engine.errors import TraceError

from .checks import check_trace
from .formats import TraceFormat, detect_format, find_format, is_message
from .json_text import parse_json
from .problems import RecordError, Severity, TraceProblem, shown
from .records import MAX_RECORD_BYTES, STDIN, RawRecord, display_name, file_stem, iter_records
from .schema import Trace
from .trace_ids import SeenIds

_DUPLICATE_REMEDY = "give each trace an id of its own; only the first was read"


def read_traces(
    paths: Sequence[str | Path],
    *,
    format: str | None = None,
    limit: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Trace]:
    """The traces of all files, in order; at most `limit` of them.

    `format` is a name in `FORMATS`; without it each record's format is detected. `-` is stdin.
    Raises TraceError at the first record that cannot be read, with file, line, field and remedy.
    """
    yield from islice(_read_all(paths, format, max_record_bytes), limit)


def _read_all(
    paths: Sequence[str | Path], format: str | None, max_record_bytes: int
) -> Iterator[Trace]:
    for item in scan_traces(paths, format=format, max_record_bytes=max_record_bytes):
        if isinstance(item, TraceProblem):
            raise TraceError(str(item))
        yield item


def scan_traces(
    paths: Sequence[str | Path],
    *,
    format: str | None = None,
    warnings: bool = False,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Trace | TraceProblem]:
    """The traces of all files, and a TraceProblem of severity "error" for each record that gave
    none. With `warnings`, also problems of severity "warning", each before its trace.

    Raises TraceError only for an unknown `format` and for stdin named twice.
    """
    scanner = TraceScanner(paths, format=format, max_record_bytes=max_record_bytes)
    for path in scanner.paths:
        for item in scanner.scan(path):
            if warnings or isinstance(item, Trace) or item.severity == "error":
                yield item


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record stands, in the words of messages."""

    path: str
    line: int | None
    row: int | None
    prefix: str = ""  # the record's place in a JSON list, for the paths of fields

    def problem(
        self,
        severity: Severity,
        field: str | None,
        message: str,
        remedy: str,
        trace_id: str | None = None,
    ) -> TraceProblem:
        if self.prefix:
            field = f"{self.prefix}.{field}" if field else self.prefix
        return TraceProblem(
            self.path, self.line, field, message, remedy, self.row, severity, trace_id
        )

    def error(self, error: RecordError, trace_id: str | None = None) -> TraceProblem:
        return self.problem("error", error.field, error.message, error.remedy, trace_id)


class TraceScanner:
    """Scans files one after the other and remembers the ids seen across all of them.

    `paths` are the files in order; `records` counts those of the file scanned last. Raises
    TraceError for an unknown `format` and for stdin named twice.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        format: str | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self.paths = [str(path) for path in paths]
        if self.paths.count(STDIN) > 1:
            raise TraceError("stdin (-) is named twice: it can only be read once; name it once")
        self._format = find_format(format) if format is not None else None
        self._max_record_bytes = max_record_bytes
        self.records = 0
        self._seen = SeenIds()
        self._stems: Counter[str] = Counter()
        # Lines of all files are numbered through, so that 4 bytes tell where an id was first seen.
        self._names: list[str] = []
        self._first_ordinals: list[int] = []
        self._ordinal = 0

    def scan(self, path: str) -> Iterator[Trace | TraceProblem]:
        """The traces and problems (errors and warnings) of one file, in order."""
        name = display_name(path)
        stem = file_stem(path)
        self._stems[stem] += 1
        if self._stems[stem] > 1:  # of two files called alike, the second gets names of its own
            stem = f"{stem}~{self._stems[stem]}"
        self._names.append(name)
        self._first_ordinals.append(self._ordinal)
        self.records = 0
        line = 0
        try:
            records = iter_records(path, is_message, max_record_bytes=self._max_record_bytes)
            for row, record in enumerate(records):
                self.records = row + 1
                line = record.line
                prefix = f"[{row}]" if record.listed else ""
                yield from self._read(record, _Place(name, line, row, prefix), stem)
        except RecordError as error:
            yield _Place(name, line or None, None).error(error)
        self._ordinal += line + 1

    def _read(self, record: RawRecord, place: _Place, stem: str) -> Iterator[Trace | TraceProblem]:
        if record.error is not None:
            yield place.error(record.error)
            return
        unnamed = f"{stem}:{record.line}" if not record.listed else f"{stem}:{place.row}"
        try:
            value = parse_json(record.data)
            known: TraceFormat = self._format or detect_format(value)
            trace = known.parse(value, unnamed)
        except RecordError as error:
            yield place.error(error)
            return
        except ValidationError as error:
            yield place.error(_as_record_error(error))
            return
        earlier = self._seen.add(trace.id, self._ordinal + record.line)
        if earlier is not None:
            message = f"{shown(trace.id)} is also the id of the trace at {self._locate(earlier)}"
            yield place.problem("error", "id", message, _DUPLICATE_REMEDY, trace.id)
            return
        broken = False
        for finding in check_trace(trace):
            broken = broken or finding.severity == "error"
            yield place.problem(*finding, trace.id)
        if not broken:
            yield trace

    def _locate(self, ordinal: int) -> str:
        file = bisect_right(self._first_ordinals, ordinal) - 1
        return f"{self._names[file]}:{ordinal - self._first_ordinals[file]}"


def _as_record_error(error: ValidationError) -> RecordError:
    """The first complaint of the schema, for what a reader let through."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return RecordError(path or None, f"{first['msg']}, found {shown(first['input'])}", "correct it")
