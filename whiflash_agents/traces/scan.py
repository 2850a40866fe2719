"""Reading traces: `read_traces` stops at the first bad record, `scan_traces` tells it and goes on.

Both stream: memory is bounded by the largest record plus 16 to 24 bytes per trace id (`trace_ids`).
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from whiflash_agents.engine.errors import TraceError

from .checks import Finding, check_trace
from .formats import TraceFormat, detect_format, find_format, is_message, refuse_output_row
from .json_text import parse_json
from .problems import RecordError, TraceProblem, shown
from .recorded_fields import recorded_field
from .records import MAX_RECORD_BYTES, STDIN, RawRecord, display_name, file_stem, iter_records
from .schema import Trace
from .trace_ids import SeenIds


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


def _read_before(name: str, earlier: str) -> RecordError:
    message = "is named twice" if name == earlier else f"is the same file as {earlier}"
    return RecordError(None, message, "name each file once")


_NO_RECORDS = Finding(
    "warning", None, "holds no records", "check what wrote it, or leave the file out"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record stands, in the words of messages."""

    path: str
    line: int | None
    row: int | None = None
    prefix: str = ""  # the record's place in a JSON list

    @classmethod
    def of(cls, record: RawRecord, path: str, row: int) -> _Place:
        return cls(path, record.line, row, f"[{row}]" if record.listed else "")

    def error(self, error: RecordError, trace_id: str | None = None) -> TraceProblem:
        return self.problem(Finding("error", error.field, error.message, error.remedy), trace_id)

    def problem(self, finding: Finding, trace_id: str | None) -> TraceProblem:
        severity, field, message, remedy = finding
        if self.prefix:
            joint = "." if field and not field.startswith("[") else ""
            field = f"{self.prefix}{joint}{field or ''}"
        return TraceProblem(
            self.path, self.line, field, message, remedy, self.row, severity, trace_id
        )


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
        self._last: TraceFormat | None = None  # neighbours mostly have the same format
        self.records = 0
        self._seen = SeenIds()
        self._stems: Counter[str] = Counter()
        # Lines of all files are numbered through, so that 4 bytes tell where an id was first seen.
        self._names: list[str] = []
        self._first_ordinals: list[int] = []
        self._ordinal = 0
        self._files: dict[tuple[int, int], str] = {}

    def _same_file(self, path: str) -> str | None:
        """The name under which the file at `path` was scanned before, whatever path led to it."""
        if path == STDIN:
            return None
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # told where it is opened
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        key = (status.st_dev, status.st_ino)
        earlier = self._files.get(key)
        self._files.setdefault(key, path)
        return earlier

    def scan(self, path: str) -> Iterator[Trace | TraceProblem]:
        """The traces and problems (errors and warnings) of one file, in order."""
        name = display_name(path)
        self.records = 0
        earlier_name = self._same_file(path)
        if earlier_name is not None:
            yield _Place(name, None).error(_read_before(name, earlier_name))
            return
        stem = file_stem(path)
        self._stems[stem] += 1
        if self._stems[stem] > 1:  # of two files called alike, the second gets names of its own
            stem = f"{stem}~{self._stems[stem]}"
        self._names.append(name)
        self._first_ordinals.append(self._ordinal)
        line = 0
        try:
            records = iter_records(path, is_message, max_record_bytes=self._max_record_bytes)
            for row, record in enumerate(records):
                self.records = row + 1
                line = record.line
                try:
                    trace = self._read(record, stem, row)
                except RecordError as error:
                    yield _Place.of(record, name, row).error(error)
                    continue
                except ValidationError as error:
                    yield _Place.of(record, name, row).error(_as_record_error(error))
                    continue
                earlier = self._seen.add(trace.id, self._ordinal + line)
                if earlier is not None:
                    yield _Place.of(record, name, row).error(
                        RecordError(
                            "id",
                            f"{shown(trace.id)} is also the id of a trace at "
                            f"{self._locate(earlier)}",
                            "give each trace an id of its own; only the first was read",
                        ),
                        trace.id,
                    )
                    continue
                findings = check_trace(trace)
                if findings:
                    place = _Place.of(record, name, row)
                    value = parse_json(record.data)
                    for finding in findings:
                        field = recorded_field(value, finding.field, len(trace.messages))
                        yield place.problem(finding._replace(field=field), trace.id)
                    if any(finding.severity == "error" for finding in findings):
                        continue
                yield trace
            if not self.records:
                yield _Place(name, None).problem(_NO_RECORDS, None)
        except RecordError as error:  # of the file, not of a record
            yield _Place(name, line or None).error(error)
        self._ordinal += line + 1

    def _read(self, record: RawRecord, stem: str, row: int) -> Trace:
        if record.error is not None:
            raise record.error
        value = parse_json(record.data)
        default_id = f"{stem}:{row if record.listed else record.line}"
        if self._format is not None:
            return _read_as(self._format, value, default_id)
        known = self._last
        if known is None or not known.sniff(value):
            known = self._last = detect_format(value)
        return known.parse(value, default_id)

    def _locate(self, ordinal: int) -> str:
        file = bisect_right(self._first_ordinals, ordinal) - 1
        return f"{self._names[file]}:{ordinal - self._first_ordinals[file]}"


def _read_as(named: TraceFormat, value: Any, default_id: str) -> Trace:
    """The trace in `value`, read in the format that the caller named. Where the record does not
    look like it, the error tells what it looks like instead."""
    if named.sniff(value):
        return named.parse(value, default_id)
    try:
        return named.parse(value, default_id)
    except RecordError as error:
        refuse_output_row(value)
        try:
            fitting = detect_format(value).name
        except RecordError:
            raise error from None
        remedy = f"the record looks like --format {fitting}; name that, or leave it out"
        raise RecordError(error.field, error.message, remedy) from None


def _as_record_error(error: ValidationError) -> RecordError:
    """The first complaint of the schema, for what a reader let through."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return RecordError(path or None, f"{first['msg']}, found {shown(first['input'])}", "correct it")
