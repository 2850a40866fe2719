"""How training tells what it is doing, on standard error: what a run tells, and steps.

On a terminal a bar for the rows that are generated, then one for the steps; elsewhere plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from whiflash_agents.batch.progress import LINE_SECONDS, BarProgress, LineProgress, SilentProgress

if TYPE_CHECKING:
    from whiflash_agents.batch.figures import RunFigures
    from whiflash_agents.engine.training.held_out import Tally
    from whiflash_agents.engine.training.loop import StepReport

# Shown while training goes on; `first_figures` says how they are chosen.
_ACCURACY = "accuracy@1"
_LENGTH = "acceptance_length"
# What these figures are, where a table has no room for more and others are beside them.
_IN_TABLES = {
    _LENGTH: "acceptance length (greedy drafts from anywhere)",
    "coverage": "likeliest tokens in the draft vocabulary",
}


class TrainingProgress(Protocol):
    """Listens to a training; also a `batch.Progress`, for the rows that are generated first."""

    def phase(self, text: str) -> None: ...

    def update(self, figures: RunFigures) -> None: ...

    def step(self, report: StepReport) -> None:
        """A step was done."""

    def held_out(self, step: int, found: Tally) -> None:
        """What the held-out texts say after `step` steps."""

    def close(self) -> None: ...


class SilentTraining(SilentProgress):
    """Says nothing."""

    def step(self, report: StepReport) -> None:
        return

    def held_out(self, step: int, found: Tally) -> None:
        return


class LineTraining(LineProgress):
    """A line every few seconds, and one for every look at the held-out texts."""

    def __init__(self, interval: float = LINE_SECONDS) -> None:
        super().__init__(interval)
        self._step_interval = interval
        self._last_step = -float("inf")

    def phase(self, text: str) -> None:
        self.close()  # the rows are done
        super().phase(text)

    def step(self, report: StepReport) -> None:
        now = time.monotonic()
        if now - self._last_step < self._step_interval and report.step < report.total:
            return
        self._last_step = now
        parts = [f"step {report.step:,}/{report.total:,}", *step_figures(report)]
        if report.step < report.total:
            parts.append(f"about {_duration(report.seconds_left)} left")
        self._print(", ".join(parts))

    def held_out(self, step: int, found: Tally) -> None:
        self._print(held_out_line(step, found))

    def _print(self, text: str) -> None:
        print(f"whiflash-batch: {text}", file=sys.stderr, flush=True)


class BarTraining(BarProgress):
    """Bars, and a line above them for every look at the held-out texts."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._steps = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._step_task = self._steps.add_task("steps", total=None, figures="")

    def phase(self, text: str) -> None:
        super().close()  # the rows are done: two bars at once would tear each other
        super().phase(text)

    def step(self, report: StepReport) -> None:
        super().close()
        self._steps.start()
        left = f"{_duration(report.seconds_left)} left"
        self._steps.update(
            self._step_task,
            completed=report.step,
            total=report.total,
            figures=", ".join([*step_figures(report), left]),
        )

    def held_out(self, step: int, found: Tally) -> None:
        self._steps.console.print(held_out_line(step, found), style="dim", highlight=False)

    def close(self) -> None:
        super().close()
        self._steps.stop()


def training_progress(quiet: bool) -> TrainingProgress:
    """What suits standard error."""
    if quiet:
        return SilentTraining()
    return BarTraining() if sys.stderr.isatty() else LineTraining()


def counted(count: int, noun: str) -> str:
    """`1 text`, `2 texts`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def step_figures(report: StepReport) -> list[str]:
    """Loss, the first accuracies, and the pace."""
    return [
        f"loss {report.loss:.3f}",
        *first_figures(report.figures),
        f"{report.texts_per_second:.1f} texts/s",
    ]


def first_figures(figures: Mapping[str, float]) -> list[str]:
    """The accuracy of the first drafted token and the acceptance length, where they are told."""
    parts = []
    if _ACCURACY in figures:
        parts.append(f"first token {100 * figures[_ACCURACY]:.1f} %")
    if _LENGTH in figures:
        parts.append(f"acceptance length {figures[_LENGTH]:.2f}")
    return parts


def held_out_line(step: int, found: Tally) -> str:
    parts = [f"loss {found.loss:.3f}", *first_figures(found.means())]
    return f"held-out texts after step {step:,}: {', '.join(parts)}"


def figure_rows(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) of the last look at the held-out texts, for tables."""
    if not history:
        return []
    last = history[-1]
    rows = [("held-out loss", f"{last['loss']:.3f}")]
    for name, value in last["figures"].items():
        shown = f"{value:.2f}" if name == _LENGTH else f"{100 * value:.1f} %"
        rows.append((f"held-out {_IN_TABLES.get(name, name.replace('_', ' '))}", shown))
    return rows


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
