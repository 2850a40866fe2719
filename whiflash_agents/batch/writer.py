"""Where output goes: `OutputFile` checks a place before anything is loaded, then writes to it.

Everything that can be wrong with an output (same file as an input, a directory, not writable,
already holds something) is told before a model is loaded, and nothing that was already done is
lost: an existing file is touched only on demand, and then only when the first row is due.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from whiflash_agents.engine.errors import OutputError

STDOUT = "-"


def check_output(
    path: Path, *, option: str, inputs: Iterable[str | Path] = (), overwrite: bool = False
) -> None:
    """Whether a file may be written at `path`; touches nothing.

    Args:
        option, inputs, overwrite: as for `OutputFile`.

    Raises:
        OutputError: it may not.
    """
    if path.is_dir():
        raise OutputError(f"{option} {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(
            f"{option} {path} cannot be written: there is no directory {path.parent}; "
            "create it first"
        )
    for other in inputs:
        if _same_file(path, Path(other)):
            raise OutputError(
                f"{option} {path} is the same file as {other}, which this run also uses; "
                "name another"
            )
    if path.is_file() and path.stat().st_size and not overwrite:
        raise OutputError(
            f"{option} {path} already holds something; name another file, or replace it "
            "with --overwrite (from Python: overwrite=True)"
        )


def _same_file(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()  # neither is there yet


class OutputFile:
    """An output file, or standard output (`-`), as a context manager.

    A file that this object created and that is still empty at the end is removed again.

    Args:
        place: a path, or `-`.
        option: what the user calls this output, for messages.
        inputs: files this run also uses: never overwritten, whatever `overwrite` says.
        overwrite: allow a file that already holds something.
    """

    def __init__(
        self,
        place: str | Path,
        *,
        option: str = "output",
        inputs: Iterable[str | Path] = (),
        overwrite: bool = False,
    ) -> None:
        self._name = "standard output" if str(place) == STDOUT else str(place)
        self._path = None if str(place) == STDOUT else Path(place)
        self._option = option
        self._created = False
        self._real_stdout: int | None = None
        self._started = False
        self._stream: BinaryIO
        if self._path is None:
            self._stream = self._claim_stdout()
        else:
            check_output(self._path, option=option, inputs=inputs, overwrite=overwrite)
            self._stream = self._open(self._path)

    @property
    def can_replace(self) -> bool:
        """Whether what was written can be written anew: in a file, not in a pipe."""
        return self._path is not None and self._path.is_file()

    def write(self, data: bytes, *, anew: bool = False) -> None:
        """Append `data` and flush it. The first call empties a file that is to be overwritten, and
        so does any with `anew`.

        Raises `OutputError` when the place cannot take it (disk full, reader of a pipe gone).
        """
        try:
            if anew or not self._started:
                self._started = True
                if self._path is not None and self._path.is_file():
                    self._stream.truncate(0)
            self._stream.write(data)
            self._stream.flush()
        except BrokenPipeError:
            raise OutputError(f"{self._name}: its reader has closed it") from None
        except OSError as error:
            raise OutputError(f"{self._name}: cannot write: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, or give standard output back. May be called twice."""
        if self._path is None:
            self._release_stdout()
            return
        try:
            self._stream.close()
        except OSError as error:
            raise OutputError(f"{self._name}: cannot write: {error.strerror}") from None
        if self._created and not self._started:
            self._path.unlink(missing_ok=True)
            self._created = False

    def _open(self, path: Path) -> BinaryIO:
        self._created = not path.exists()
        try:
            return open(path, "ab")
        except OSError as error:
            raise OutputError(
                f"{self._option} {path} cannot be written: {error.strerror}"
            ) from None

    def _claim_stdout(self) -> BinaryIO:
        """Take standard output for rows alone: what any library prints meanwhile goes to stderr."""
        try:
            is_real = sys.stdout.fileno() == 1
        except (OSError, ValueError):  # replaced by an object without a descriptor
            is_real = False
        if not is_real:
            return sys.stdout.buffer
        sys.stdout.flush()
        self._real_stdout = os.dup(1)
        os.dup2(2, 1)
        return open(os.dup(self._real_stdout), "wb")

    def _release_stdout(self) -> None:
        if self._real_stdout is None:
            return
        sys.stdout.flush()
        os.dup2(self._real_stdout, 1)
        os.close(self._real_stdout)
        self._real_stdout = None
        try:
            self._stream.close()
        except OSError:  # the same failure that `write` has already reported
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
