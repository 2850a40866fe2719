"""How a run tells what it is doing, on standard error: a bar on a terminal, plain lines elsewhere.

Plain lines survive being collected by job schedulers and by Ray, which prefix every line.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from .figures import AGREEMENTS, RunFigures, Speculation

if TYPE_CHECKING:
    from rich.table import Table

LINE_SECONDS = 5.0


class Progress(Protocol):
    """Listens to a run."""

    def phase(self, text: str) -> None:
        """Something other than decoding begins, such as loading the model."""

    def update(self, figures: RunFigures) -> None:
        """Rows were finished, or time has passed; called about twice a second while decoding."""

    def close(self) -> None:
        """The run is over. May be called twice."""


class SilentProgress:
    """Says nothing."""

    def phase(self, text: str) -> None:
        return

    def update(self, figures: RunFigures) -> None:
        return

    def close(self) -> None:
        return


class LineProgress:
    """A line for every phase, one every few seconds while rows are decoded, and one at the end."""

    def __init__(self, interval: float = LINE_SECONDS) -> None:
        self._interval = interval
        self._last = -math.inf
        self._figures: RunFigures | None = None
        self._told = -1  # rows done in the last line

    def phase(self, text: str) -> None:
        self._say(text)

    def update(self, figures: RunFigures) -> None:
        self._figures = figures
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        self._tell(figures)

    def close(self) -> None:
        """Says how far the run came, unless the last line said so already."""
        figures, self._figures = self._figures, None
        if figures is not None and figures.ok + figures.failed != self._told:
            self._tell(figures)

    def _tell(self, figures: RunFigures) -> None:
        done, total = figures.ok + figures.failed, figures.input.rows
        self._told = done
        parts = [f"{done}/{total} rows"]
        if prefilled := figures.engine_total("positions_prefilled"):
            parts.append(f"{prefilled:,} prompt tokens read")  # all there is to see at first
        parts += _rates(figures)
        if done and done < total:
            left = figures.running_seconds / done * (total - done)
            parts.append(f"about {_duration(left)} left")
        self._say(", ".join(parts))

    def _say(self, text: str) -> None:
        print(f"whiflash-batch: {text}", file=sys.stderr, flush=True)


class BarProgress:
    """A rich progress bar."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            TextColumn("rows"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("rows", total=None, rates="")

    def phase(self, text: str) -> None:
        # A line, not the bar: fetching a model for the first time draws a bar of its own.
        self._bar.console.print(text, style="dim", highlight=False)

    def update(self, figures: RunFigures) -> None:
        self._bar.start()
        self._bar.update(
            self._task,
            completed=figures.ok + figures.failed,
            total=figures.input.rows,
            rates=", ".join(_rates(figures)),
        )

    def close(self) -> None:
        self._bar.stop()


def _rates(figures: RunFigures) -> list[str]:
    parts = [f"{figures.failed} failed"] if figures.failed else []
    tokens = figures.engine_total("output_tokens")  # those of unfinished rows too
    if tokens and figures.running_seconds:
        parts.append(f"{tokens / figures.running_seconds:.1f} tokens/s")
    if figures.speculation.steps:
        parts.append(f"acceptance length {figures.speculation.mean_acceptance_length:.2f}")
    return parts


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def summary_table(figures: RunFigures) -> Table:
    """The figures of a finished run, for a reader."""
    from rich.table import Table

    title = f"{figures.target or 'no model loaded'}"
    table = Table(
        title=title + (" (interrupted)" if figures.interrupted else ""), title_style="bold"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    left = figures.input.rows - figures.ok - figures.failed
    rows: list[tuple[str, Any]] = [("rows ok", figures.ok), ("rows failed", figures.failed)]
    rows += [(f"  {kind}", count) for kind, count in figures.errors.most_common()]
    if left:
        rows.append(("rows not done", left))
    if figures.input.traces_without_turns:
        rows.append(("traces without assistant turn", figures.input.traces_without_turns))
    rows += [
        ("prompt tokens", figures.prompt_tokens),
        ("  of them cached", figures.cached_tokens),
        ("generated tokens", figures.generated_tokens),
        ("tokens/s", f"{figures.tokens_per_second:.1f}"),
        ("seconds loading, running", _seconds(figures)),
        ("tool calls, invalid", f"{figures.tool_calls}, {figures.invalid_tool_calls}"),
        ("rounds", figures.speculation.steps),
        ("acceptance length", _length(figures.speculation)),
    ]
    for name, group in sorted(figures.by_drafter.items()):
        rows.append((f"  drafter {name}", f"{_length(group)} in {group.steps} rounds"))
    if figures.switches:
        share = f"{100 * figures.switch_overhead:.1f} % of round time"
        rows.append(("switches", f"{figures.switches:,}, {share}"))
    for name, group in sorted(figures.by_span.items()):
        rows.append((f"  span {name}", f"{_length(group)} in {group.steps} rounds"))
    for name in AGREEMENTS:
        if compared := figures.compared[name]:
            equal = figures.equal[name]
            share = f"{100 * equal / compared:.1f} % ({equal}/{compared})"
            rows.append((f"agreement {name}", share))
    if figures.rows_with_notes:
        rows.append(("rows with notes", figures.rows_with_notes))
    for label, value in rows:
        table.add_row(label, f"{value:,}" if isinstance(value, int) else value)
    return table


def _length(group: Speculation) -> str:
    return f"{group.mean_acceptance_length:.2f}"


def _seconds(figures: RunFigures) -> str:
    return f"{figures.loading_seconds:.1f}, {figures.running_seconds:.1f}"
