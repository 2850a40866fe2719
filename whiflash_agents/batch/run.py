"""`WhiFlashBatch`: one run from trace files to output rows.

Everything that can be refused is refused before a model is loaded: outputs first, then every
record of the input. Then rows are planned lazily, handed to a runner with a bounded number in
flight, and written in input order.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from whiflash_agents.engine.errors import OutputError, WhiFlashError
from whiflash_agents.settings import Settings, option_name
from whiflash_agents.traces import read_traces

from .figures import RunFigures
from .inputs import readable_twice
from .local import LocalRunner, refuse_workers
from .order import RowOrder
from .plan import check_input, plan_rows
from .progress import Progress, SilentProgress
from .rows import encode_row
from .runner import Runner, RunnerFactory
from .session_spec import SessionSpec
from .writer import STDOUT, OutputFile

POLL_SECONDS = 0.5  # how often a stop request is looked at while nothing finishes


class WhiFlashBatch:
    """Re-runs recorded agent traces.

        batch = WhiFlashBatch(Settings.of(workers=0))
        figures = batch.run(["traces.jsonl"], "rows.jsonl")

    Args:
        settings: what to do; `Settings()` by default, which needs `runner` because it asks for a
            worker.
        runner: builds what generates rows: `LocalRunner` (this process) or
            `whiflash_agents.workers.pool.EnginePool` (Ray actors).
        progress: is told how far the run is.

    Raises:
        SettingsError: workers are asked for and `runner` is left out.

    Attributes:
        figures: of the run that is going on, or of the last one.
        decoding: whether rows are being decoded, so that `stop` has an effect.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        runner: RunnerFactory = LocalRunner,
        progress: Progress | None = None,
    ) -> None:
        self.settings = settings or Settings()
        if runner is LocalRunner:  # told here, not after a model was fetched
            refuse_workers(self.settings)
        self.figures = RunFigures()
        self.decoding = False
        self._make_runner = runner
        self._progress = progress or SilentProgress()
        self._stopping = False

    def run(
        self,
        traces: str | Path | Sequence[str | Path],
        output: str | Path,
        *,
        overwrite: bool = False,
        metrics: str | Path | None = None,
    ) -> RunFigures:
        """Write an output row for every planned turn to `output` (`-`: standard output).

        `traces` is one trace file or several.

        Raises `TraceError`, `OutputError`, `SettingsError` and the errors of model loading before
        anything is written; `WorkerError` and `OutputError` also later. Finished rows are kept
        in any case, and `metrics` is written for every run that began to decode.
        """
        traces = _several(traces)
        if str(metrics) == STDOUT:
            raise OutputError("metrics cannot go to standard output (-); name a file")
        with readable_twice(traces) as paths:
            inputs = [*paths, *(trace for trace in traces if str(trace) != "-")]
            with OutputFile(output, inputs=inputs, overwrite=overwrite) as rows_out:
                if metrics is None:
                    return self._write_rows(paths, traces, rows_out)
                taken = [*inputs, output]
                with OutputFile(
                    metrics, option="metrics", inputs=taken, overwrite=overwrite
                ) as metrics_out:
                    try:
                        self._write_rows(paths, traces, rows_out)
                    except BaseException:
                        if self.figures.target is not None:
                            metrics_out.write(_metrics_text(self.figures))
                        raise
                    metrics_out.write(_metrics_text(self.figures))
                    return self.figures

    def rows(self, traces: str | Path | Sequence[str | Path]) -> Iterator[dict[str, Any]]:
        """Yield the output rows of `traces` in input order instead of writing them."""
        traces = _several(traces)
        with readable_twice(traces) as paths:
            yield from self._rows(paths, traces)

    def stop(self) -> None:
        """End the run after what is already finished; safe to call from a signal handler."""
        self._stopping = True

    def _write_rows(
        self, paths: Sequence[Path], traces: Sequence[str | Path], output: OutputFile
    ) -> RunFigures:
        with closing(self._rows(paths, traces)) as rows:
            for row in rows:
                output.write(encode_row(row))
        output.write(b"")  # a run without rows leaves an empty file, not none
        return self.figures

    def _rows(
        self, paths: Sequence[Path], traces: Sequence[str | Path]
    ) -> Generator[dict[str, Any], None, None]:
        settings = self.settings
        figures = self.figures = RunFigures(settings=settings.model_dump())
        self._stopping = False
        try:
            self._progress.phase("checking the input")
            figures.input = check_input(
                paths,
                settings.run.mode,
                format=settings.run.format,
                limit=settings.run.limit,
                names=[str(trace) for trace in traces],
            )
            if not figures.input.rows:
                self._progress.phase(
                    "nothing to generate: no trace holds an assistant turn to replay; "
                    "--mode continue writes the next one"
                )
                return
            if settings.run.mode == "continue" and figures.input.ending_in_a_turn:
                self._progress.phase(
                    f"{figures.input.ending_in_a_turn} of {figures.input.traces} traces end with "
                    "an assistant turn; a further one is written after it"
                )
            runner = self._load()
            try:
                yield from self._decode(paths, runner)
            finally:
                runner.close()
        finally:
            self._progress.close()

    def _load(self) -> Runner:
        from whiflash_agents.models import resolve_drafter, resolve_model

        started = time.monotonic()
        self._progress.phase("finding the model")
        model = resolve_model(self.settings.model.target, self.settings.model.adapter)
        paths = {}
        for network in self.settings.networks:
            self._progress.phase(f"finding the {network} drafter")
            given = self.settings.drafter(network)
            assert given is not None  # settings refuse a router that lacks one
            paths[network] = resolve_drafter(given, network)
        if unused := self.settings.unused_settings():
            self._progress.phase(
                f"without effect under router {self.settings.router}: "
                f"{', '.join(map(option_name, unused))}"
            )
        costs = "; measuring costs, if this machine's are not known" if self._needs_costs() else ""
        self._progress.phase(f"loading {model.name}{costs}")
        runner = self._make_runner(SessionSpec.of(self.settings, model, paths), self.settings)
        notes = [note for its in runner.describe() for note in its.get("notes", ())]
        for note in dict.fromkeys(notes):  # of several workers, each has the same
            self._progress.phase(note)
        self.figures.target = model.name
        self.figures.loading_seconds = time.monotonic() - started
        return runner

    def _needs_costs(self) -> bool:
        settings = self.settings
        return settings.router == "cost-aware" or settings.routing.verify_budget == "gain"

    def _decode(self, paths: Sequence[Path], runner: Runner) -> Iterator[dict[str, Any]]:
        """Keep the runner filled and yield its output rows in input order.

        When the run ends early, finished rows that still waited for an earlier one come out too.
        """
        settings, figures = self.settings, self.figures
        traces = read_traces(paths, format=settings.run.format, limit=settings.run.limit)
        plans = plan_rows(
            traces,
            settings.run.mode,
            seed=settings.sampling.seed,
            params=settings.sampling.params(),
        )
        order = RowOrder(plans, capacity=runner.capacity, slots=runner.slots)
        started = time.monotonic()
        failure: BaseException | None = None
        self.decoding = True
        self._progress.update(figures)
        try:
            while not self._stopping:
                while (row := order.next_row()) is not None:
                    runner.submit(row)
                if not order.in_flight:
                    break
                self._collect(runner, order, POLL_SECONDS, started)
                yield from order.ready()
            else:
                self._collect(runner, order, 0, started)
                figures.interrupted = figures.ok + figures.failed < figures.input.rows
        except (WhiFlashError, KeyboardInterrupt) as error:
            failure = error
        finally:
            self.decoding = False
        yield from order.ready()
        yield from order.leftovers()
        if failure is not None:
            figures.interrupted = isinstance(failure, KeyboardInterrupt)
            raise failure

    def _collect(self, runner: Runner, order: RowOrder, timeout: float, started: float) -> None:
        for output in runner.results(timeout):
            order.accept(output)
            self.figures.add(output)
        self.figures.engines = runner.describe()
        self.figures.running_seconds = time.monotonic() - started
        self._progress.update(self.figures)


def _several(traces: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [traces] if isinstance(traces, str | Path) else traces


def _metrics_text(figures: RunFigures) -> bytes:
    return orjson.dumps(figures.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
