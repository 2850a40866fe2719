"""`EnginePool`: a `Runner` over Ray actors with one engine each.

Rows of one trace go to the same actor, because it holds their common history in its KV cache. The
pool asks every busy actor for its finished rows and never waits for one that is dead: an actor that
cannot start or dies ends the run with a `WorkerError` that gives the reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from whiflash_agents.batch.local import ROWS_PER_SLOT
from whiflash_agents.batch.plan import Row
from whiflash_agents.batch.session import EngineSession, load_session
from whiflash_agents.batch.session_spec import SessionSpec
from whiflash_agents.engine.errors import SettingsError, WhiFlashError, WorkerError
from whiflash_agents.settings import Settings

from .engine_worker import EngineWorker
from .local_ray import available_cpus, gpus_per_worker, ray, start_ray

START_SECONDS = 120.0  # for an actor's process to answer; loading the model has no limit
SLICE_SECONDS = 0.25  # longest call of `advance`: how long new rows may wait to join a batch
# Traces whose actor is remembered after their last row in flight, per row of capacity.
_REMEMBERED = 8


@dataclass(slots=True)
class _Worker:
    number: int
    actor: Any
    outbox: list[Row] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    call: Any = None
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return len(self.outbox) + len(self.held)


class EnginePool:
    """Starts `settings.run.workers` actors and loads the model in each.

    Uses the Ray session of this process if there is one; otherwise starts a local one and shuts it
    down on `close`.

    Args:
        load: builds a session inside the actor.

    Raises:
        SettingsError: no workers are asked for.
        WorkerError: an actor cannot start.
        WhiFlashError: whatever loading the model raises, as it was raised in the actor.
    """

    def __init__(
        self,
        spec: SessionSpec,
        settings: Settings,
        *,
        load: Callable[[SessionSpec], EngineSession] = load_session,
    ) -> None:
        count = settings.run.workers
        if count < 1:
            raise SettingsError("workers=0 asks for no actor; use LocalRunner, or set workers to 1")
        self._slots = spec.concurrency * count
        self._workers: list[_Worker] = []
        self._homes: OrderedDict[str, _Worker] = OrderedDict()
        self._failure: WhiFlashError | None = None
        self._owns_ray = start_ray(count)
        try:
            gpus = gpus_per_worker(spec.device, count)
            device = "cpu" if spec.device == "auto" and not gpus else spec.device
            # Ray gives an actor one OpenMP thread; the engine gets its share of the machine.
            spec = replace(spec, device=device, threads=max(1, available_cpus() // count))
            remote = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(EngineWorker)
            self._workers = [_Worker(number, remote.remote()) for number in range(count)]
            for worker in self._workers:
                self._answer(worker, worker.actor.process_id.remote(), timeout=START_SECONDS)
            loading = [(worker, worker.actor.load.remote(load, spec)) for worker in self._workers]
            for worker, call in loading:
                worker.description = self._answer(worker, call)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def capacity(self) -> int:
        return self._slots * ROWS_PER_SLOT

    def submit(self, row: Row) -> None:
        worker = self._homes.get(row.trace_id)
        if worker is None:
            worker = min(self._workers, key=lambda worker: worker.load)
            self._homes[row.trace_id] = worker
            if len(self._homes) > _REMEMBERED * self.capacity:
                self._homes.popitem(last=False)
        self._homes.move_to_end(row.trace_id)
        worker.outbox.append(row)

    def results(self, timeout: float) -> list[dict[str, Any]]:
        """Finished rows; waits up to `timeout` seconds for the first. With 0, nothing new starts.

        Raises `WorkerError` when an actor died or its engine failed.
        """
        if self._failure is not None:
            raise self._failure
        if timeout > 0:
            for worker in self._workers:
                if worker.call is None and worker.load:
                    worker.held.update(row.id for row in worker.outbox)
                    worker.call = worker.actor.advance.remote(worker.outbox, SLICE_SECONDS)
                    worker.outbox = []
        calls = {worker.call: worker for worker in self._workers if worker.call is not None}
        if not calls:
            return []
        finished: list[dict[str, Any]] = []
        ready, _ = ray.wait(list(calls), num_returns=1, timeout=timeout)
        if ready and len(calls) > 1:  # those that have answered by now as well
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in ready:
            worker = calls[call]
            worker.call = None
            try:
                outputs, worker.description = self._answer(worker, call)
            except WhiFlashError as error:
                self._failure = self._failure or error
                continue
            worker.held.difference_update(output["custom_id"] for output in outputs)
            finished += outputs
        if self._failure is not None and not finished:
            raise self._failure  # otherwise with the next call: finished rows come first
        return finished

    def describe(self) -> list[dict[str, Any]]:
        return [{"worker": worker.number, **worker.description} for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker.actor, no_restart=True)
        self._workers = []
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _answer(self, worker: _Worker, call: Any, *, timeout: float | None = None) -> Any:
        """The result of `call`, or the reason why there is none as an error of ours."""
        try:
            return ray.get(call, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, WhiFlashError):
                raise cause from None
            raise WorkerError(
                f"worker {worker.number} failed: {type(cause).__name__}: {cause}"
            ) from error
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(
                f"worker {worker.number} did not start within {timeout:.0f} s; Ray has "
                f"{ray.available_resources().get('CPU', 0):.0f} CPUs free and each worker takes "
                "one: lower workers, or decode in this process with workers 0"
            ) from None
        except ray.exceptions.RayError as error:
            rows = f" while it held {', '.join(sorted(worker.held))}" if worker.held else ""
            raise WorkerError(f"worker {worker.number} died{rows}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Ray's own words for a death, on one line and without its general advice."""
    text = " ".join(str(error).split())
    for opening in ("Worker exit detail: ", "The actor is dead because "):
        if opening in text:
            text = text.split(opening, 1)[1]
    return text.split(" Some common causes include", 1)[0]
