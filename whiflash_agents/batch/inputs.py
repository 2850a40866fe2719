"""Inputs that can be read only once (standard input, pipes) are spooled to disk first.

A run reads its traces twice: once to check them before a model is loaded, once to plan rows.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whiflash_agents.engine.errors import TraceError

STDIN = "-"


@contextmanager
def readable_twice(traces: Sequence[str | Path]) -> Iterator[list[Path]]:
    """Paths with the contents of `traces`, in order; spooled copies are removed at the end.

    Raises `TraceError` if there is no input, or one that must be spooled cannot be.
    """
    if not traces:
        raise TraceError("no trace file was given; name at least one, or - for standard input")
    if sum(str(trace) == STDIN for trace in traces) > 1:
        raise TraceError("standard input (-) was named twice, but it can be read only once")
    with tempfile.TemporaryDirectory(prefix="whiflash-input-") as folder:
        yield [_spooled(trace, Path(folder) / str(n)) for n, trace in enumerate(traces)]


def _spooled(trace: str | Path, folder: Path) -> Path:
    path = Path(trace)
    if str(trace) != STDIN and not path.is_fifo():
        return path  # the readers tell what is wrong with it
    folder.mkdir()
    try:
        if str(trace) == STDIN:
            copy = folder / "stdin"
            with copy.open("wb") as spool:
                shutil.copyfileobj(sys.stdin.buffer, spool)
        else:
            copy = folder / path.name
            with path.open("rb") as pipe, copy.open("wb") as spool:
                shutil.copyfileobj(pipe, spool)
    except OSError as error:
        raise TraceError(f"{trace}: cannot be read: {error.strerror}") from None
    return copy
