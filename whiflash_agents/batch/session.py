"""`EngineSession`: one target, its chat format and one engine, turning rows into output rows.

The in-process runner and the Ray actor both drive a session. Decoding is continuous: a row that
is submitted while others run joins them as soon as a slot is free. A row that cannot be generated
becomes a failed row; the others go on (failure kind 17).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from whiflash_agents.embedded import default_agent
from whiflash_agents.engine.errors import ContextLengthError, WorkerError
from whiflash_agents.engine.request import Event, GenerationResult, Request, SamplingParams
from whiflash_agents.traces import Message

from .plan import Row
from .rows import failed_row, output_row
from .session_spec import Models, SessionSpec

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.costs import CostModel

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a session needs of `WhiFlashEngine`."""

    @property
    def totals(self) -> Any:
        """A dataclass of counters, `output_tokens` and `positions_prefilled` among them."""

    @property
    def costs(self) -> Any:
        """Its `CostModel`."""

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Event]: ...


def load_session(spec: SessionSpec, on_phase: Callable[[str], None] | None = None) -> EngineSession:
    """Load the models and build their engine. Raises what `Models.load` and `build_session`
    raise."""
    return build_session(spec, Models.load(spec), on_phase)


def build_session(
    spec: SessionSpec, models: Models, on_phase: Callable[[str], None] | None = None
) -> EngineSession:
    """An engine over `models` with the router that `spec` asks for, and its session.

    Raises:
        SettingsError, CheckpointError: the router cannot be built, or the engine.
    """
    from whiflash_agents.cost_store import load_or_measure
    from whiflash_agents.engine import EngineSettings, WhiFlashEngine
    from whiflash_agents.engine.drafters.registry import neural_drafters
    from whiflash_agents.router_building import build_router

    options, routing = spec.drafters, spec.routing
    built = build_router(spec, models)
    costly = spec.router == "cost-aware"
    budget = routing.verify_budget
    if budget == "auto":
        budget = "gain" if costly else "all"
    engine = WhiFlashEngine(
        models.target,
        router=built.router,
        drafters=neural_drafters(
            **{n: m for n, m in models.networks.items() if n in spec.drafter_paths},
            eagle3_depth=options.eagle3_depth,
            eagle3_top_k=options.eagle3_top_k,
            eagle3_tokens=options.eagle3_tokens,
            ddtree_nodes=options.ddtree_nodes,
        ),
        settings=EngineSettings(
            max_running=spec.concurrency,
            kv_tokens=spec.kv_tokens,
            prefill_chunk=spec.prefill_chunk,
            max_draft_nodes=options.max_draft_nodes,
            catch_up=options.catch_up,
            draft_prefill=options.draft_prefill,
            max_backlog=options.max_backlog,
            verify_budget=budget,
        ),
        decode=models.chat.decode,
    )
    machine = dict(models.machine)
    if built.threshold is not None:
        machine["entropy_threshold"] = built.threshold
    if built.notes:
        machine["notes"] = built.notes
    if on_phase is not None:
        for note in built.notes:
            on_phase(note)
    if costly or budget == "gain":
        known, machine["costs"] = load_or_measure(
            engine,
            key_parts={
                "drafters": {n: default_agent.place_of(p) for n, p in spec.drafter_paths.items()}
            },
            recalibrate=routing.recalibrate,
            on_phase=on_phase or logger.info,
        )
        engine.costs.table = known.table
    return EngineSession(
        engine, models.chat, spec, max_context=models.target.max_context, machine=machine
    )


@dataclass(slots=True)
class _Running:
    row: Row
    prompt_ids: list[int]
    notes: list[str]


class EngineSession:
    """Rows in, output rows out, over one engine in the calling thread.

    Args:
        engine: the engine; the session is its only user.
        chat: the model's chat format.
        spec: what was asked for.
        max_context: tokens of prompt and output together that the target can take.
        machine: where the engine runs; passed on to the figures of the run.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        spec: SessionSpec,
        *,
        max_context: int,
        machine: dict[str, Any],
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._spec = spec
        self._max_context = max_context
        self._machine = machine
        self._waiting: deque[Row] = deque()
        self._running: dict[str, _Running] = {}
        self._busy_traces: dict[str, int] = {}

    @property
    def costs(self) -> CostModel:
        """What the engine's rounds take, as it is known now."""
        costs: CostModel = self._engine.costs
        return costs

    @property
    def pending(self) -> int:
        """Rows submitted and not yet returned."""
        return len(self._waiting) + len(self._running)

    def submit(self, row: Row) -> None:
        """Take `row`; it is tokenised when its slot is free."""
        self._waiting.append(row)

    def advance(self, seconds: float) -> list[dict[str, Any]]:
        """Decode until at least one row is finished or `seconds` have passed.

        Raises `WorkerError` when the engine itself fails.
        """
        deadline = time.monotonic() + seconds
        while True:
            finished = self._fill_slots()
            if self._running:
                finished += self._step()
            if finished or not self.pending or time.monotonic() >= deadline:
                return finished

    def describe(self) -> dict[str, Any]:
        """Device, dtype, threads, and the engine's own totals."""
        return {**self._machine, "engine": asdict(self._engine.totals)}

    def _fill_slots(self) -> list[dict[str, Any]]:
        """Start waiting rows while slots are free; returns rows that could not be started."""
        failed: list[dict[str, Any]] = []
        while self._waiting and len(self._running) < self._spec.concurrency:
            row = self._take_waiting()
            try:
                self._start(row)
            except Exception as error:  # whatever a row's template or data raises is that row's end
                failed.append(failed_row(row, type(error).__name__, str(error), retriable=False))
        return failed

    def _take_waiting(self) -> Row:
        """The first row whose trace is not being decoded, so that it finds its history in the slot
        that the trace's previous turn just left; else the first row."""
        for at, row in enumerate(self._waiting):
            if row.trace_id not in self._busy_traces:
                del self._waiting[at]
                return row
        return self._waiting.popleft()

    def _start(self, row: Row) -> None:
        request, notes = self.request_of(row)
        self._engine.add(request)
        self._running[row.id] = _Running(row, list(request.prompt_ids), notes)
        self._busy_traces[row.trace_id] = self._busy_traces.get(row.trace_id, 0) + 1

    def request_of(self, row: Row) -> tuple[Request, list[str]]:
        """What the engine is asked for `row`, and notes on what was changed to make it possible.

        Raises:
            ContextLengthError: the prompt leaves no room for a turn.
        """
        messages = [Message.model_validate(message) for message in row.messages]
        prompt_ids = list(self._chat.prompt_ids(messages, row.tools))
        sampling = SamplingParams(**row.params, seed=row.seed)
        notes: list[str] = []
        if row.tools and not self._chat.shows_tools:
            notes.append(
                f"the chat template of {self._spec.name} does not show tools; {len(row.tools)} "
                "tools left out"
            )
        room = self._max_context - len(prompt_ids)
        if room < max(1, sampling.min_tokens):
            raise ContextLengthError(
                f"the prompt of {row.id} has {len(prompt_ids)} tokens, which leaves no room for a "
                f"turn of at least {max(1, sampling.min_tokens)} in the context of "
                f"{self._max_context} tokens of {self._spec.name}; shorten the trace or use a "
                "target with a longer context"
            )
        if sampling.max_tokens > room:
            notes.append(
                f"max_tokens lowered from {sampling.max_tokens} to {room}: the prompt has "
                f"{len(prompt_ids)} tokens and the context holds {self._max_context}"
            )
            sampling = replace(sampling, max_tokens=room)
        recorded_ids = self._recorded_ids(row, messages, notes)
        return Request(row.id, prompt_ids, sampling, recorded_ids), notes

    def _recorded_ids(self, row: Row, messages: list[Message], notes: list[str]) -> Sequence[int]:
        """Tokens of the recorded turn, for the drafters that retrieve. A hint: never an error."""
        if row.recorded is None or not self._spec.recorded_drafts:
            return ()
        if "lookup" not in self._spec.arms:  # no other drafter reads it
            return ()
        ids = self._chat.turn_ids(messages, row.tools, Message.model_validate(row.recorded))
        if not ids:
            notes.append("recorded turn not used for drafting: the chat template cannot write it")
        return ids

    def _step(self) -> list[dict[str, Any]]:
        try:
            events = self._engine.step()
        except Exception as error:
            logger.debug("engine step failed", exc_info=True)
            raise WorkerError(
                f"the engine failed while it decoded {', '.join(sorted(self._running))}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return [self._finish(event.result) for event in events if event.result is not None]

    def _finish(self, result: GenerationResult) -> dict[str, Any]:
        running = self._running.pop(result.id)
        row = running.row
        self._busy_traces[row.trace_id] -= 1
        if not self._busy_traces[row.trace_id]:
            del self._busy_traces[row.trace_id]
        if result.finish_reason not in ("stop", "length"):
            reason = result.error or f"generation ended with {result.finish_reason!r}"
            return failed_row(row, "GenerationError", reason, retriable=True)
        try:
            return output_row(
                row,
                result,
                self._chat,
                prompt_ids=running.prompt_ids,
                model=self._spec.name,
                notes=running.notes,
                rounds=self._spec.rounds,
            )
        except Exception as error:  # reading this row's text back must not end the others
            return failed_row(row, type(error).__name__, str(error), retriable=False)
