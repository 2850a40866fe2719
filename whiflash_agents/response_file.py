"""Responses that a target gave, kept in a file line by line as they are finished.

To regenerate thousands of responses takes hours, so what is done is never lost: a run that was
killed goes on behind the last whole line. The first line says what the responses depend on; a run
that would generate others refuses the file and names the differences.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson
from filelock import FileLock, Timeout

from whiflash_agents.engine.errors import ChangedError, OutputError

FORMAT = "whiflash-agents responses"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Response:
    """One turn that the target wrote.

    Attributes:
        id: of the row, `trace#turn`.
        prompt_ids, token_ids: prompt, and what came behind it, with the end-of-turn token if it
            ended by itself.
        finish_reason: `stop`, `tool_calls` or `length`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str


class ResponseFile:
    """A file of responses, open for more. A context manager: nobody else may write meanwhile.

    Args:
        path: new, empty, or of the same settings.
        settings: all that the responses depend on, as JSON takes it.

    Raises:
        ChangedError: the file is of other settings.
        OutputError: it is no such file, damaged, cannot be written, or being written to.

    Attributes:
        responses: what it holds, by id.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.responses: dict[str, Response] = {}
        self._settings = json.loads(json.dumps(settings, sort_keys=True, default=str))
        if not self.path.parent.is_dir():
            raise OutputError(
                f"responses {self.path} cannot be written: there is no directory "
                f"{self.path.parent}; create it first"
            )
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        self._stream: BinaryIO | None = None
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"responses {self.path} are being written by another run; wait for it, or name "
                "another file (--responses)"
            ) from None
        except OSError as error:
            raise self._refused(error) from None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def add(self, response: Response) -> None:
        """Append a response, whole and on disk before this returns.

        Raises:
            OutputError: it cannot be written.
        """
        row = {
            "id": response.id,
            "prompt_ids": response.prompt_ids,
            "token_ids": response.token_ids,
            "finish_reason": response.finish_reason,
        }
        self._write(row)
        self.responses[response.id] = response

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        try:
            self._stream = open(self.path, "ab+")  # noqa: SIM115 (`close` does)
            whole = self._read()
            self._stream.truncate(whole)  # a torn last line is generated again
        except OSError as error:
            raise self._refused(error) from None
        if not whole:
            self._write({"format": FORMAT, "version": VERSION, "settings": self._settings})

    def _read(self) -> int:
        """Take in all whole lines; returns how many bytes they have."""
        assert self._stream is not None  # opened just before
        self._stream.seek(0)
        whole = 0
        for number, line in enumerate(self._stream, start=1):
            if not line.endswith(b"\n"):
                if number == 1 and not line.startswith(b'{"format":"' + FORMAT.encode()[:4]):
                    raise self._strange()  # somebody's text without a line break is not torn
                break
            whole += len(line)
            try:
                row = orjson.loads(line)
            except ValueError:
                row = None
            if number == 1:
                self._check_header(row)
                continue
            try:
                response = Response(
                    row["id"],
                    tuple(row["prompt_ids"]),
                    tuple(row["token_ids"]),
                    row["finish_reason"],
                )
            except (KeyError, TypeError):
                raise OutputError(
                    f"{self.path}:{number}: no response that a run wrote; remove this line, and "
                    "its turn is generated again"
                ) from None
            self.responses[response.id] = response
        return whole

    def _check_header(self, header: Any) -> None:
        from whiflash_agents.engine.training.identity import changes

        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise self._strange()
        if header.get("version") != VERSION:
            raise OutputError(
                f"{self.path} has version {header.get('version')!r} of this format, expected "
                f"{VERSION}; name another file (--responses)"
            )
        if differing := changes(self._settings, header.get("settings") or {}):
            raise ChangedError(
                f"the responses in {self.path} were generated otherwise",
                differing,
                "generate with the same settings, or name another file (--responses)",
            )

    def _strange(self) -> OutputError:
        return OutputError(
            f"{self.path} holds something else than responses; name another file (--responses)"
        )

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(f"responses {self.path} cannot be written: {error.strerror or error}")

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self._stream is not None  # open until `close`
        try:
            self._stream.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._refused(error) from None
