"""From a file to its records, one at a time: lines, elements of a JSON list, or one document.

Memory is bounded by the largest record, never by the file. `open_source` deals with `-` (stdin),
gzip and zstd; `iter_records` decides how the records stand in the file:

- a name that ends in `.jsonl` or `.ndjson`: one record per line;
- a file that begins with `[`, unless its first element is a message: the elements of the list;
- a first line that is complete JSON: one record per line;
- otherwise, a first line of just `{` or `[`, or a name that ends in `.json` or `.traj`: one
  document, which is one record;
- anything else: one record per line, of which the first is told as broken.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

import orjson

from .json_list import ListElements
from .problems import RecordError

MAX_RECORD_BYTES = 64 * 1024 * 1024
STDIN = "-"
_CHUNK = 256 * 1024
_HEAD = 8192
_LINE_SUFFIXES = (".jsonl", ".ndjson")
_DOCUMENT_SUFFIXES = (".json", ".traj")
_BLANK = b" \t\r\n"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(slots=True)
class RawRecord:
    """The bytes of one record, or the reason why there are none.

    `line` counts from 1 and is where the record begins; `listed` says that it is an element of a
    JSON list, whose place in the list then belongs to the path of a field.
    """

    line: int
    data: bytes
    listed: bool = False
    error: RecordError | None = None


def display_name(path: str) -> str:
    """The path as messages show it."""
    return "<stdin>" if path == STDIN else path


def file_stem(path: str) -> str:
    """The file's name without directory, compression suffix and one more suffix."""
    if path == STDIN:
        return "stdin"
    name = PurePath(path).name
    if name.endswith((".gz", ".zst")):
        name = name.rpartition(".")[0]
    return PurePath(name).stem or name or "traces"


@contextmanager
def open_source(path: str) -> Iterator[io.BufferedReader]:
    """The decompressed bytes of `path`, without a UTF-8 byte-order mark; `-` is stdin.

    Compression is told by content, not by name. Raises RecordError if the file cannot be opened or
    is UTF-16.
    """
    with ExitStack() as stack:
        try:
            raw: Any = sys.stdin.buffer if path == STDIN else stack.enter_context(open(path, "rb"))
            head = raw.read(4)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise RecordError(
                None,
                f"cannot be read: {getattr(error, 'strerror', None) or error}",
                "name a readable file of traces",
            ) from None
        stream: Any = _Rejoined(head, raw)
        if head.startswith(_GZIP_MAGIC):
            stream = stack.enter_context(gzip.GzipFile(fileobj=io.BufferedReader(stream)))
        elif head.startswith(_ZSTD_MAGIC):
            stream = _ZstdFrames(stream)
        with _reading_errors():
            start = stream.read(len(_UTF8_MARK))
        if start.startswith(_UTF16_MARKS):
            raise RecordError(None, "the file is UTF-16", "save it as UTF-8")
        if start == _UTF8_MARK:
            start = b""
        yield io.BufferedReader(_Rejoined(start, stream), _CHUNK)


class _Rejoined(io.RawIOBase):
    """A stream with bytes that were already read from it put back in front."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = memoryview(head)
        # read1 hands on what a pipe has, where read would wait for a full buffer
        self._read: Callable[[int], bytes] = getattr(rest, "read1", rest.read)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: memoryview | bytes
        if self._head:
            data = self._head[: len(buffer)]
            self._head = self._head[len(data) :]
        else:
            data = self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _ZstdFrames(io.RawIOBase):
    """The content of zstd frames, one after the other. A frame that breaks off raises EOFError,
    where zstandard's own reader just ends and would lose the rest without a word."""

    _CHUNK = 2048  # small, because 4 bytes can stand for a block of 128 KiB

    def __init__(self, compressed: io.RawIOBase) -> None:
        import zstandard

        self._compressed = io.BufferedReader(compressed)
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
                self._begun = False
            data = data or self._compressed.read(self._CHUNK)
            if not data:
                if self._begun:
                    raise EOFError("the zstd frame is incomplete")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)


@contextmanager
def _reading_errors() -> Iterator[None]:
    """Turns whatever reading a damaged file raises into RecordError."""
    try:
        yield
    except RecordError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(error) from None
    except Exception as error:  # zstandard's own class, known only once it is imported
        if type(error).__module__.partition(".")[0] != "zstandard":
            raise
        raise _damaged(error) from None


def _damaged(error: Exception) -> RecordError:
    return RecordError(
        None,
        f"reading stopped here: {error or type(error).__name__}",
        "the file is damaged or incomplete; write or fetch it again",
    )


def iter_records(
    path: str, is_message: Callable[[Any], bool], *, max_record_bytes: int = MAX_RECORD_BYTES
) -> Iterator[RawRecord]:
    """The records of a file, in order; blank lines are skipped.

    `is_message(value)` tells a list of messages (one record) from a list of records. A record that
    is longer than `max_record_bytes` comes as an error, and reading goes on after it. Raises
    RecordError if the file as a whole cannot be read.
    """
    with open_source(path) as stream, _reading_errors():
        head = b""
        while len(head) < _HEAD and b"\n" not in head:  # a pipe need not give more than a line
            part = stream.read1(_CHUNK)
            if not part:
                break
            head += part
        if _looks_binary(head[:_HEAD]):
            raise RecordError(
                None, "looks like a binary file", "name a text file of JSON records, in UTF-8"
            )
        stream = io.BufferedReader(_Rejoined(head, stream), _CHUNK)
        plain = path.removesuffix(".gz").removesuffix(".zst").lower()
        if plain.endswith(_LINE_SUFFIXES):
            yield from _lines(stream, 1, max_record_bytes)
            return
        blanks = _skip_blanks(stream)
        line = 1 + blanks
        if stream.peek(1)[:1] == b"[":
            elements = ListElements(stream, line, max_record_bytes)
            first = elements.next()
            if first is None or not _is_listed_message(first.data, is_message):
                while first is not None:
                    yield RawRecord(first.line, first.data, listed=True, error=first.error)
                    first = elements.next()
                return
            stream = io.BufferedReader(_Rejoined(elements.consumed(), stream), _CHUNK)
        yield from _lines_or_document(stream, line, plain, max_record_bytes)


def _looks_binary(head: bytes) -> bool:
    """Whether a file that begins so holds no JSON anywhere, where an error for each of its
    thousands of lines would help nobody. A file that begins as JSON does is read, unless already
    its first line holds NUL: that is UTF-16, or binary by chance."""
    text = head.lstrip(_BLANK)
    if text[:1] in (b"{", b"["):
        return b"\0" in text.partition(b"\n")[0]
    if b"\0" in text:
        return True
    decoded = text.decode("utf-8", "replace")
    return decoded.count("\ufffd") * 4 > len(decoded)


def _is_listed_message(data: bytes, is_message: Callable[[Any], bool]) -> bool:
    try:
        return is_message(orjson.loads(data))
    except orjson.JSONDecodeError:
        return False


def _lines_or_document(
    stream: io.BufferedReader, line: int, name: str, limit: int
) -> Iterator[RawRecord]:
    first = stream.readline(limit + 1)
    if not first:
        return
    complete = first.endswith(b"\n") or len(first) <= limit
    document = first.strip() in (b"{", b"[") or name.endswith(_DOCUMENT_SUFFIXES)
    if document and complete and not _is_json(first):
        data = first + stream.read(limit + 1 - len(first))
        error = _too_long("document", limit) if len(data) > limit else None
        yield RawRecord(line, b"" if error else data, error=error)
        return
    yield from _lines(stream, line, limit, first)


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


def _skip_blanks(stream: io.BufferedReader) -> int:
    """Consumes white space before the first record; the number of line ends in it."""
    newlines = 0
    while ahead := stream.peek(1):
        blank = len(ahead) - len(ahead.lstrip(_BLANK))
        newlines += ahead.count(b"\n", 0, blank)
        stream.read(blank)
        if blank < len(ahead):
            break
    return newlines


def _lines(
    stream: io.BufferedReader, line: int, limit: int, first: bytes | None = None
) -> Iterator[RawRecord]:
    # Only "\n" ends a line: JSON allows a bare "\r", and U+2028 inside strings.
    readline = stream.readline
    data = readline(limit + 1) if first is None else first
    while data:
        if len(data) > limit and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = readline(_CHUNK)
            yield RawRecord(line, b"", error=_too_long("line", limit))
        else:
            data = data.strip(_BLANK)
            if data:
                yield RawRecord(line, data)
        line += 1
        data = readline(limit + 1)


def _too_long(what: str, limit: int) -> RecordError:
    return RecordError(
        None,
        f"the {what} is longer than the limit of {limit} bytes",
        "split the trace, or raise max_record_bytes",
    )
