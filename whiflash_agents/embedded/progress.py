"""Show how far the first-time preparation of the default model is: a bar when stderr is a
terminal, one plain line per stage and quarter otherwise (logs, Ray, CI)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Report(Protocol):
    def stage(self, name: str, *, size: int | None = None) -> Callable[[float], None]:
        """Begin a stage (`size` in bytes, if known); the result is called with the share done."""
        ...


@contextmanager
def open_report(title: str) -> Iterator[Report]:
    if not sys.stderr.isatty():
        print(title, file=sys.stderr, flush=True)
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    console.print(title, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Any) -> None:
        self._bars = bars

    def stage(self, name: str, *, size: int | None = None) -> Callable[[float], None]:
        task = self._bars.add_task(_label(name, size), total=1.0)
        return lambda share: self._bars.update(task, completed=share)


class _Lines:
    def stage(self, name: str, *, size: int | None = None) -> Callable[[float], None]:
        label = _label(name, size)
        shown = -1

        def show(share: float) -> None:
            nonlocal shown
            quarter = int(share * 4)
            if quarter > shown:
                shown = quarter
                print(f"{label}: {quarter * 25} %", file=sys.stderr, flush=True)

        return show


def _label(name: str, size: int | None) -> str:
    return name if size is None else f"{name} ({size / 1e6:.0f} MB)"
