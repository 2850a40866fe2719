"""The elements of a JSON list, cut out one at a time without reading the list into memory.

Only brackets and strings are followed, to find where an element ends; what is inside is left to
the JSON parser, which sees each element once.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from .problems import RecordError

_CHUNK = 256 * 1024
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')
_OPENING = frozenset(b"[{")
_CLOSING = frozenset(b"]}")
_QUOTE, _COMMA, _END = b'",]'


@dataclass(slots=True)
class Element:
    """The bytes of one element, and the line (from 1) where it begins; or what is wrong there."""

    line: int
    data: bytes
    error: RecordError | None = None


class ListElements:
    """Reads the elements of a list from `stream`, which stands at its `[`.

    `line` is the number of the line where that is. An element longer than `limit` bytes comes as an
    error and is not kept in memory. Held at any time: one element and one chunk.
    """

    def __init__(self, stream: io.BufferedReader, line: int, limit: int) -> None:
        self._stream = stream
        self._line = line  # of the buffer's first byte
        self._limit = limit
        self._buffer = bytearray(stream.read(1))
        self._position = 1  # where scanning goes on
        self._start = 1  # where the current element begins
        self._count = 0
        self._state = "open"

    def consumed(self) -> bytes:
        """All bytes read from the stream, as long as `next()` was called at most once."""
        return bytes(self._buffer)

    def next(self) -> Element | None:
        """The next element; None after the last. Problems of the list itself come as elements."""
        if self._state == "open":
            if self._count:
                self._drop(self._start)
            return self._element()
        if self._state == "closed":
            self._state = "done"
            return self._trailing()
        return None

    def _element(self) -> Element | None:
        depth = 0
        in_string = False
        too_long = False
        while True:
            pattern = _IN_STRING if in_string else _STRUCTURE
            match = pattern.search(self._buffer, self._position)
            if match is None:
                # An escape at the very end leaves the position one past the buffer.
                self._position = max(self._position, len(self._buffer))
                if not too_long and len(self._buffer) - self._start > self._limit:
                    too_long = True
                if too_long:
                    self._drop(min(self._position, len(self._buffer)))
                chunk = self._stream.read1(_CHUNK)
                if not chunk:
                    self._state = "done"
                    return self._problem("the JSON list is not closed", "the file is incomplete")
                self._buffer += chunk
                continue
            byte = self._buffer[match.start()]
            self._position = match.end()
            if in_string:
                if byte == _QUOTE:
                    in_string = False
                else:
                    self._position += 1
            elif byte == _QUOTE:
                in_string = True
            elif byte in _OPENING:
                depth += 1
            elif depth and byte in _CLOSING:
                depth -= 1
            elif not depth and byte in (_COMMA, _END):
                return self._finished(match.start(), byte == _END, too_long)

    def _finished(self, end: int, last: bool, too_long: bool) -> Element | None:
        if last:
            self._state = "closed"
        raw = bytes(self._buffer[self._start : end])
        data = raw.strip()
        lead = len(raw) - len(raw.lstrip())
        line = self._line + self._buffer.count(b"\n", 0, self._start + lead)
        self._start = end + 1
        if not data and last and not self._count:
            return self.next()  # an empty list
        self._count += 1
        if too_long or len(data) > self._limit:
            return Element(
                line,
                b"",
                RecordError(
                    None,
                    f"the element is longer than the limit of {self._limit} bytes",
                    "split the trace, or raise max_record_bytes",
                ),
            )
        if not data:
            return Element(
                line, b"", RecordError(None, "a comma with nothing beside it", "remove the comma")
            )
        return Element(line, data)

    def _trailing(self) -> Element | None:
        self._drop(self._start)
        while True:
            rest = self._buffer.strip()
            if rest:
                return self._problem(
                    "there is more after the end of the JSON list",
                    "write one list, or one record per line in a .jsonl file",
                )
            self._drop(len(self._buffer))
            chunk = self._stream.read1(_CHUNK)
            if not chunk:
                return None
            self._buffer += chunk

    def _problem(self, message: str, remedy: str) -> Element:
        line = self._line + self._buffer.count(b"\n")
        return Element(line, b"", RecordError(None, message, remedy))

    def _drop(self, count: int) -> None:
        """Forgets the first `count` bytes of the buffer."""
        self._line += self._buffer.count(b"\n", 0, count)
        del self._buffer[:count]
        self._position -= count
        self._start = max(0, self._start - count)
