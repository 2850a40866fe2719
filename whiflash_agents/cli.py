"""The command line `whiflash-batch`: a thin shell over `WhiFlashBatch` and `traces.validate`.

Rows go to the output file or standard output, everything else to standard error. Everything that is
slow to import is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from whiflash_agents import __version__
from whiflash_agents.engine.errors import OutputError, WhiFlashError

from .cli_options import (
    EXIT_FAILED_ROWS,
    EXIT_USAGE,
    fail,
    progress_for,
    settings_options,
    table_console,
)
from .cli_study import bench, calibrate
from .cli_train_heads import train

if TYPE_CHECKING:
    from whiflash_agents.batch import RunFigures, Runner, SessionSpec, WhiFlashBatch
    from whiflash_agents.settings import Settings
    from whiflash_agents.traces import TraceProblem, ValidationReport


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="whiflash-batch")
def main() -> None:
    """Re-run recorded agent traces with speculative decoding.

    \b
    whiflash-batch validate traces.jsonl
    whiflash-batch run traces.jsonl -o rows.jsonl
    """


@main.command(
    epilog="""\b
Examples:
  whiflash-batch run traces.jsonl -o rows.jsonl
  whiflash-batch run traces.jsonl --workers 0 --max-tokens 64 --limit 2 | jq .whiflash.agreement
  zcat traces.jsonl.gz | whiflash-batch run - -o rows.jsonl --metrics run.json

Every setting can also stand in a TOML file ([sampling] max_tokens = 64) or in the environment
(WHIFLASH_MAX_TOKENS=64). The command line wins over the environment, and both over the file.

\b
Exit status: 0 all rows done, 1 some rows failed or the run broke off, 2 usage, or input that
is unreadable or holds no record, 130 interrupted by Ctrl-C, 143 by SIGTERM. Finished rows are
kept in any case; a second Ctrl-C aborts at once."""
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACES...")
@click.option(
    "-o",
    "--output",
    default="-",
    metavar="FILE",
    help="Where rows go, one JSON object per line.  [default: standard output]",
)
@click.option("--overwrite", is_flag=True, help="Replace output and metrics that already exist.")
@click.option("--metrics", metavar="FILE", help="Write the figures of the run to FILE, as JSON.")
@click.option("--config", metavar="FILE", help="Read settings from a TOML file.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary.")
@settings_options()
def run(
    traces: tuple[str, ...],
    output: str,
    overwrite: bool,
    metrics: str | None,
    config: str | None,
    quiet: bool,
    **values: Any,
) -> None:
    """Generate the assistant turns of recorded traces anew.

    TRACES are files of recorded conversations, or - for standard input. Every turn becomes one row
    in the envelope of OpenAI's Batch API, in the order of the input. A turn that cannot be
    generated becomes a row with an error; the run goes on.
    """
    from whiflash_agents.batch import LocalRunner, WhiFlashBatch
    from whiflash_agents.settings import load_settings

    if not values["stop"]:
        values["stop"] = None  # click gives an empty tuple for "not given"
    else:
        values["stop"] = list(values["stop"])
    try:
        settings = load_settings(values, config=config)
    except WhiFlashError as error:
        fail(error, EXIT_USAGE)
    progress = progress_for(quiet, output)
    runner = _start_pool if settings.run.workers else LocalRunner
    batch = WhiFlashBatch(settings, runner=runner, progress=progress)

    failure: WhiFlashError | None = None
    with _interrupts(batch) as received:
        try:
            batch.run(traces, output, overwrite=overwrite, metrics=metrics)
        except WhiFlashError as error:
            failure = error
        except KeyboardInterrupt:
            batch.figures.interrupted = True
    figures = batch.figures
    started = figures.target is not None  # a model was loaded, so rows were being decoded
    if started and not quiet:
        _print_summary(figures)
    if failure is not None:
        fail(failure, EXIT_FAILED_ROWS if started else EXIT_USAGE)
    if figures.interrupted:
        sys.exit(128 + (received[0] if received else signal.SIGINT))
    sys.exit(EXIT_FAILED_ROWS if figures.failed else 0)


@main.command(
    epilog="""\b
Example:
  whiflash-batch validate traces/*.jsonl

Exit status: 0 every record can be used (warnings aside), 1 the problems cannot be written,
2 some records cannot be used."""
)
@click.argument("traces", nargs=-1, required=True, metavar="TRACES...")
@click.option(
    "--format", metavar="NAME", help="Format of the traces.  [default: recognised by content]"
)
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), help="Read the first N traces only."
)
@click.option("-q", "--quiet", is_flag=True, help="Problems only, no summary.")
def validate(traces: tuple[str, ...], format: str | None, limit: int | None, quiet: bool) -> None:
    """Tell every problem of trace files, with file, line and field.

    Problems go to standard output, one per line, the summary to standard error. No model is loaded.
    """
    from whiflash_agents.traces import validate as validate_traces

    def tell(problem: TraceProblem) -> None:
        try:
            click.echo(f"{problem} [{problem.severity}]")
        except OSError as error:
            _drop_stdout()
            if isinstance(error, BrokenPipeError):  # `| head` has seen enough
                sys.exit(EXIT_FAILED_ROWS)
            reason = OutputError(f"standard output: cannot write: {error.strerror}")
            fail(reason, EXIT_FAILED_ROWS)

    try:
        report = validate_traces(traces, format, tell, limit=limit)
    except WhiFlashError as error:
        fail(error, EXIT_USAGE)
    if not quiet:
        _print_validation(report)
    sys.exit(0 if report.ok else EXIT_USAGE)


_DOCTOR_SETTINGS = ("target", "eagle3", "dflash", "device", "dtype", "max_backlog", "prefill_chunk")


@main.command(
    epilog="""\b
Examples:
  whiflash-batch doctor
  whiflash-batch doctor --target path/to/model --eagle3 path/to/eagle3 --dflash path/to/dflash

Exit status: 0 all is well, 1 something is missing or does not fit, 2 usage."""
)
@settings_options(*_DOCTOR_SETTINGS)
@click.option("--config", metavar="FILE", help="Read settings from a TOML file.")
def doctor(config: str | None, **values: Any) -> None:
    """Tell what is installed, which devices and models are found, and what is missing.

    With a drafter, also whether it belongs to the target and what it costs in memory. Nothing is
    downloaded but a drafter or target that is named by its hub name.
    """
    from rich.markup import escape
    from rich.table import Table

    from whiflash_agents.doctor import examine
    from whiflash_agents.settings import load_settings

    try:
        settings = load_settings(values, config=config)
    except WhiFlashError as error:
        fail(error, EXIT_USAGE)
    console = table_console(stderr=False)
    table = Table()
    table.add_column("area", no_wrap=True)
    table.add_column("what", overflow="fold", min_width=12)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    area, problems = "", 0
    for finding in examine(settings):
        shown = finding.area if finding.area != area else ""
        if shown and area:
            table.add_section()
        area = finding.area
        style = "bold red" if finding.is_problem else None
        table.add_row(shown, finding.name, finding.state, escape(finding.text), style=style)
        problems += finding.is_problem
    console.print(table)
    sys.exit(EXIT_FAILED_ROWS if problems else 0)


def _start_pool(spec: SessionSpec, settings: Settings) -> Runner:
    """The Ray pool; Ray is imported only once the input has been found in order."""
    from whiflash_agents.workers.pool import EnginePool

    return EnginePool(spec, settings)


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, or Python would report the same failure at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interrupts(batch: WhiFlashBatch) -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the run after what is finished; a second one aborts, a third kills.

    Yields a list that will hold the signal that was received.
    """
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            signal.signal(number, signal.SIG_DFL)
        elif not batch.decoding:
            os.write(2, b"\nwhiflash-batch: interrupted\n")
        if len(received) > 1 or not batch.decoding:
            raise KeyboardInterrupt
        batch.stop()
        os.write(2, b"\nwhiflash-batch: interrupted; keeping finished rows (again to abort)\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_summary(figures: RunFigures) -> None:
    from rich.console import Console

    from whiflash_agents.batch.progress import summary_table

    Console(stderr=True).print(summary_table(figures))


def _print_validation(report: ValidationReport) -> None:
    from rich.console import Console
    from rich.table import Table

    # Paths are longer than the 80 columns that rich takes for what is not a terminal.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    columns = ("records", "traces", "assistant_turns", "tool_calls", "errors", "warnings")
    table = Table(show_footer=len(report.files) > 1)
    table.add_column("file", footer="total", overflow="fold")
    for column in columns:
        total = f"{report.total(column):,}"
        table.add_column(column.replace("_", " "), footer=total, justify="right")
    for file in report.files:
        table.add_row(file.path, *(f"{getattr(file, column):,}" for column in columns))
    console.print(table)


for command in (bench, calibrate, train):
    main.add_command(command)

if __name__ == "__main__":
    main()
