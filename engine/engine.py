"""The routed drafting loop. A step runs one round for every running sequence:

1. the last forward left each sequence a bonus token and what the target knew there;
2. the router picks one drafter per sequence, or `none`;
3. drafters that were chosen catch up on what they missed, and
4. propose a draft tree per sequence;
5. the target verifies all trees in one packed forward, beside the next chunks of new prompts;
6. accepted paths are committed, stops applied, events emitted.

Output depends on the target, the prompt, the sampling parameters and the seed alone: not on the
drafter, the router, or who else is in the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .acceptance import Walk, verify
from .admission import new_sequence
from .budget import VerifyBudget
from .catch_up import CatchUp
from .clock import now
from .costs import CostModel, CostTable
from .drafters.base import Drafter
from .drafters.context import draft_context
from .drafters.registry import drafter_names, make_drafter
from .drafting import Drafting
from .engine_settings import LEAST_ROOM, EngineSettings
from .errors import RequestError, SettingsError
from .features import stack
from .memory import arena_positions
from .packing import Verified, pack_prompts, pack_tree
from .request import Event, FinishReason, GenerationResult, Request
from .routing.base import NONE, Router
from .routing.signals import read_signals
from .routing.static import StaticRouter
from .sampling import logprobs
from .scheduler import Scheduler
from .sequence import SequenceState
from .target import Target, TargetBatch, TargetOutput
from .telemetry import RoundRecord, Totals

__all__ = ["EngineSettings", "WhiFlashEngine"]


class WhiFlashEngine:
    """Continuous batching over one target.

    Args:
        target: the model.
        router: a router, or the name of a drafter (or `none`) to use in every round.
        drafters: drafters by name, for arms that are not built in or need other settings.
        costs: what rounds take here (`cost_calibration.measure_costs`); without, it is learnt from
            the rounds themselves.
        decode: token ids to text; needed for requests with stop strings only.

    Raises:
        SettingsError: there is no router, or no drafter that it names; a KV cache beyond the
            memory.
    """

    def __init__(
        self,
        target: Target,
        *,
        router: str | Router = NONE,
        drafters: Mapping[str, Drafter] | None = None,
        settings: EngineSettings | None = None,
        costs: CostModel | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.target = target
        self.settings = settings or EngineSettings()
        given = drafters or {}
        if isinstance(router, str) and router not in (names := {NONE, *given, *drafter_names()}):
            raise SettingsError(
                f"router {router!r} is not available; available: {', '.join(sorted(names))}. "
                "Drafters with weights are given as `drafters` "
                "(engine.drafters.registry.neural_drafters)"
            )
        self.router: Router = StaticRouter(router) if isinstance(router, str) else router
        if not isinstance(self.router, Router) or isinstance(self.router.arms, str):
            raise SettingsError(
                f"router {self.router!r} is no engine.routing.base.Router with a tuple of names of "
                "drafters as `arms`; derive it from that class"
            )
        self.drafters: dict[str, Drafter] = {
            name: given[name] if name in given else make_drafter(name) for name in self.router.arms
        }
        costs = costs or CostModel(CostTable())
        eager = self.settings.catch_up == "eager"
        self._catch_up = CatchUp(
            [c for d in self.drafters.values() if (c := draft_context(d)) is not None],
            max_backlog=0 if eager else self.settings.max_backlog,
        )
        # What a round may write behind the committed positions: trees to verify, or a drafter's
        # own rows while it drafts. Alike for every router: which requests are refused must not
        # depend on how they are drafted.
        self._room = max(self.settings.max_draft_nodes, LEAST_ROOM)
        for context in self._catch_up.contexts.values():
            if context.scratch > self._room:
                raise SettingsError(
                    f"drafter {context.name!r} writes {context.scratch} positions while it drafts "
                    f"(EAGLE-3: (depth - 1) * top_k; DFlash: its block), max_draft_nodes="
                    f"{self.settings.max_draft_nodes} leaves room for {self._room}; raise "
                    "max_draft_nodes, or lower depth or top_k"
                )
        self._decode = decode
        contexts = self._catch_up.contexts.values()
        planes = [context.plane_shape for context in contexts]
        positions = self.settings.kv_tokens
        if positions is None:
            wanted = self.settings.max_running * (target.max_context + self._room)
            positions = arena_positions(
                [target.plane, *planes], target.dtype, target.device, wanted=wanted
            )
        self._cache = target.new_cache(positions, beside=planes)
        for context, plane in zip(contexts, self._cache.beside, strict=True):
            context.bind(target, plane, full_prefill=self.settings.draft_prefill == "full")
        shapes = {"target": target.plane} | {c.name: c.plane_shape for c in contexts}
        self._totals = Totals(
            kv_bytes={
                name: shape.bytes_per_position(target.dtype) * self._cache.positions
                for name, shape in shapes.items()
            }
        )
        self._drafting = Drafting(
            self.router,
            self.drafters,
            self._catch_up,
            costs,
            max_nodes=self.settings.max_draft_nodes,
            vocab_size=target.vocab_size,
            device=target.device,
            budget=VerifyBudget(costs) if self.settings.verify_budget == "gain" else None,
        )
        self._scheduler = Scheduler(
            self._cache,
            max_running=self.settings.max_running,
            prefill_chunk=self.settings.prefill_chunk,
            scratch=max(self.settings.max_draft_nodes, self._catch_up.scratch)
            if self.drafters
            else 0,
            prefix_reuse=self.settings.prefix_reuse,
            lookahead=self._catch_up.lookahead,
            start=self._catch_up.start,
            settle=self._catch_up.settle,
        )
        self._sequences: dict[str, SequenceState] = {}
        self._arrivals = 0
        self._signal_seconds = 0.0
        self._ended: list[SequenceState] = []  # whose last round the router has yet to see
        self._subscribers: dict[str, deque[Event]] = {}
        self._unclaimed: list[Event] = []

    @property
    def costs(self) -> CostModel:
        """What rounds take here, as it is known now."""
        return self._drafting.costs

    @property
    def totals(self) -> Totals:
        """What the engine has done so far. Read it again for newer figures."""
        totals, catch_up = self._totals, self._catch_up
        totals.preemptions = self._scheduler.num_preemptions
        totals.positions_recomputed = self._scheduler.positions_recomputed
        totals.draft_seconds = self._drafting.seconds
        totals.route_seconds = self._drafting.route_seconds + self._signal_seconds
        if self._drafting.budget is not None:
            totals.nodes_drafted = self._drafting.budget.drafted
            totals.nodes_verified = self._drafting.budget.verified
        totals.router = self.router.figures()
        totals.costs = self._drafting.costs.as_dict()
        totals.catch_up_seconds = catch_up.seconds
        totals.draft_rows = dict(catch_up.rows)
        totals.feature_bytes = catch_up.feature_bytes
        totals.feature_bytes_peak = catch_up.feature_bytes_peak
        return totals

    # Asking ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthError: prompt and `max_tokens` exceed the target's context or the KV cache.
            RequestError: an id in use, an empty prompt, tokens outside the vocabulary, parameters
                that cannot be honoured.
        """
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is already in use; ids must be unique")
        sequence = new_sequence(
            request,
            self.target,
            self._cache,
            room=self._room,
            arrival=self._arrivals,
            decode=self._decode,
        )
        self._scheduler.add(sequence)
        self._arrivals += 1
        self._sequences[request.id] = sequence

    def abort(self, request_id: str) -> None:
        """End a request now; its tokens so far come with an event of the next step.

        Raises:
            KeyError: no request of that id waits or runs.
        """
        sequence = self._sequences[request_id]
        self._scheduler.drop(sequence)
        self._catch_up.measure(self._scheduler.running)
        text = sequence.stop.close()  # what was held back as the possible beginning of a stop
        self._deliver(Event(request_id, [], text, self._result(sequence, "abort", None)))
        self._close_routes()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or bool(self._unclaimed)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def generate(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Run `requests` to their ends; results in the order of the requests.

        All or nothing: when one cannot be added, or a step fails, none of them stays behind.
        """
        mine: deque[Event] = deque()
        added: list[str] = []
        results: dict[str, GenerationResult] = {}
        try:
            for request in requests:
                self._subscribe(request, mine)
                added.append(request.id)
            while len(results) < len(requests):
                self._run_step()
                for event in _drain(mine):
                    if event.result is not None:
                        results[event.id] = event.result
        finally:
            for request_id in added:
                self._unsubscribe(request_id, mine)
        return [results[request.id] for request in requests]

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request and yield its events; closing the iterator early aborts it."""
        mine: deque[Event] = deque()
        self._subscribe(request, mine)
        finished = False
        try:
            while not finished:
                if not mine:
                    self._run_step()
                for event in _drain(mine):
                    finished = event.result is not None
                    yield event
        finally:
            self._unsubscribe(request.id, mine)

    def _subscribe(self, request: Request, queue: deque[Event]) -> None:
        """Queue a request whose events go to `queue`, the one with its result being the last."""
        self.add(request)
        self._subscribers[request.id] = queue

    def _unsubscribe(self, request_id: str, queue: deque[Event]) -> None:
        """Abort the request if it has not ended; by then its id may belong to another one."""
        if self._subscribers.get(request_id) is queue:
            self.abort(request_id)

    # The step --------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One round for every running sequence; the events of all requests that were `add`ed."""
        if self._sequences:
            self._run_step()
        events, self._unclaimed = self._unclaimed, []
        return events

    def _run_step(self) -> None:
        started = time.perf_counter()
        self._reserve()
        for sequence in self._scheduler.admit():
            if sequence.admitted_at is None:
                sequence.admitted_at = started
                for drafter in self.drafters.values():
                    drafter.open(sequence)

        decoding = [s for s in self._scheduler.running if s.is_decoding]
        chunks = self._scheduler.prefill_chunks()
        prompt_tokens = sum(count for _, count in chunks)
        drafts = self._drafting.draft(decoding, prompt_tokens=prompt_tokens)
        batch = TargetBatch()
        verified = pack_prompts(batch, chunks)
        verified += [
            pack_tree(batch, sequence, drafted)
            for sequence, drafted in zip(decoding, drafts, strict=True)
        ]
        if not batch.rows:
            return
        before = now(self.target.device)
        output = self.target.forward(batch, self._cache, capture=self._catch_up.layers)
        forward_seconds = now(self.target.device) - before
        features = stack(output.features, self._catch_up.layers) if output.features else None
        # Counted only now: after a forward that failed, nothing unwritten passes for a prefix.
        first = 0
        for sequence, count in chunks:
            sequence.num_cached += count
            self._totals.positions_prefilled += count
            if features is not None:
                self._catch_up.append(sequence, features, range(first, first + count))
            first += count

        walks = verify(
            output.logits,
            [v.tree for v in verified],
            [v.first_row for v in verified],
            [v.sequence.sampler for v in verified],
            [len(v.sequence.tokens) for v in verified],
        )
        self._read_signals(output, verified, walks)
        packed = len(batch.token_ids)
        if not chunks:  # a prompt's tokens need no logits, so they are cheaper than drafts
            attended = sum(row.count * row.length for row in batch.rows)
            self._drafting.costs.observe_verify(packed, attended, forward_seconds)
        records = []
        for item, walk in zip(verified, walks, strict=True):
            record = self._commit(item, walk, output.logits, features)
            if record is not None:
                records.append((item.sequence, record, len(item.tree) / packed))

        self._catch_up.bound(self._scheduler.running)

        seconds = time.perf_counter() - started
        together = seconds - sum(r.catch_up_seconds + r.draft_seconds for _, r, _ in records)
        for sequence, record, share in records:
            own = record.catch_up_seconds + record.draft_seconds
            record.round_seconds = own + together * share
            self.router.observe(sequence, record)
            if self._drafting.budget is not None:
                self._drafting.budget.observe(sequence.id, record.drafter, record.accepted)
        self._close_routes()
        self._totals.steps += 1
        self._totals.rounds += len(records)
        self._totals.step_seconds += seconds
        self._totals.forward_seconds += forward_seconds

    def _close_routes(self) -> None:
        for sequence in self._ended:
            self.router.close(sequence)
        self._ended.clear()

    def _read_signals(
        self, output: TargetOutput, verified: Sequence[Verified], walks: Sequence[Walk]
    ) -> None:
        """What the router asked to know of each sequence, where its bonus token was chosen."""
        if not self.router.signals or not verified:
            return
        started = time.perf_counter()
        rows = [v.first_row + w.path[-1] for v, w in zip(verified, walks, strict=True)]
        known = read_signals(output.logits, output.hidden, rows, wanted=self.router.signals)
        for item, signals in zip(verified, known, strict=True):
            item.sequence.signals = signals
        self._signal_seconds += time.perf_counter() - started

    def _reserve(self) -> None:
        """Room for the next rows of those that decode, before others are admitted to it."""
        nodes = self._scheduler.scratch
        for sequence in [s for s in self._scheduler.running if s.is_decoding]:
            self._scheduler.reserve(sequence, sequence.num_cached + 1 + nodes)

    def _commit(
        self,
        item: Verified,
        walk: Walk,
        logits: torch.Tensor,
        features: torch.Tensor | None,
    ) -> RoundRecord | None:
        """Step 6 for one sequence; returns the round's record (None for a prompt's own token)."""
        sequence, tree = item.sequence, item.tree
        assert sequence.extent is not None
        position = sequence.num_output
        outcome = sequence.stop.check(walk.tokens)
        kept = walk.tokens[: outcome.kept]
        text, finish_reason, error = outcome.text, outcome.finish_reason, None
        if walk.problem is not None and finish_reason is None:
            finish_reason, error = "error", walk.problem
            if text is not None:
                text += sequence.stop.close() or ""
        self._cache.commit(sequence.extent, sequence.num_cached, walk.path)
        sequence.tokens.extend(kept)
        # Every token but the last has its keys and values; what a stop cut off is forgotten.
        sequence.num_cached = len(sequence.tokens) - 1
        if features is not None and item.drafts is not None:
            rows = [item.first_token + node for node in walk.path[: len(kept)]]
            self._catch_up.append(sequence, features, rows)
        self._totals.output_tokens += len(kept)
        if sequence.logprobs is not None:
            rows = [item.first_row + node for node in walk.path[: len(kept)]]
            n = sequence.request.sampling.top_logprobs
            sequence.logprobs.extend(logprobs(logits[rows], kept, n))

        record = None
        if item.drafts is not None:
            drafts = item.drafts
            record = RoundRecord(
                position=position,
                drafter=drafts.drafter,
                drafted=tree.num_drafted,
                accepted=min(len(walk.path) - 1, len(kept)),
                emitted=len(kept),
                backlog=drafts.backlog,
                catch_up_seconds=drafts.catch_up_seconds,
                draft_seconds=drafts.draft_seconds,
                switched=sequence.last_drafter not in ("", drafts.drafter),
                predicted=drafts.predicted,
            )
            sequence.last_drafter = drafts.drafter
            sequence.stats.rounds.append(record)

        result = None
        if finish_reason is not None:
            # What led to logits that admit no token is not worth building on.
            self._scheduler.finish(sequence, keep=finish_reason != "error")
            result = self._result(sequence, finish_reason, outcome.stop_reason, error)
        self._deliver(Event(sequence.id, kept, text, result))
        return record

    def _result(
        self,
        sequence: SequenceState,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        error: str | None = None,
    ) -> GenerationResult:
        del self._sequences[sequence.id]
        if sequence.admitted_at is not None:
            for drafter in self.drafters.values():
                drafter.close(sequence)
            self._ended.append(sequence)
        started = sequence.admitted_at
        return GenerationResult(
            id=sequence.id,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens,
            token_ids=sequence.output_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            text=sequence.stop.text if sequence.request.sampling.stop else None,
            logprobs=sequence.logprobs,
            seed=sequence.seed,
            stats=sequence.stats,
            seconds=0.0 if started is None else time.perf_counter() - started,
            error=error,
        )

    def _deliver(self, event: Event) -> None:
        queue = self._subscribers.get(event.id)
        if event.result is not None:
            self._subscribers.pop(event.id, None)
        (self._unclaimed if queue is None else queue).append(event)


def _drain(queue: deque[Event]) -> Iterator[Event]:
    while queue:
        yield queue.popleft()
