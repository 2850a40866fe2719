"""Who lags behind, and when it catches up (WhiFlash 2606.07710, section 3.4; `method.md` 5 and 6).

*Lazy*: nothing runs for a draft context that was not chosen; its backlog of target features waits
in the sequence's feature buffer and is consumed in one batched operation when a drafter over it is
chosen, when the backlog exceeds its bound (so the features of a long prompt, or of a long time
without this drafter, are never all held), or when other sequences are about to build on this one's
prefix. *Eager* is a bound of zero: every context follows every round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .drafters.context import DraftContext
from .features import FeatureBuffer
from .sequence import ContextState, SequenceState


class CatchUp:
    """The draft contexts of one engine.

    Args:
        contexts: those of the enabled drafters; a context that several share counts once.
        max_backlog: rows that a context may lag behind in a sequence; 0 is eager.

    Attributes:
        layers: the union of the target layers that the contexts read, ascending.
        seconds: time spent consuming backlogs so far.
        rows: rows made so far, per context.
        feature_bytes, feature_bytes_peak: held by the buffers of running sequences after the last
            step, and the most there was.
    """

    def __init__(self, contexts: Iterable[DraftContext], *, max_backlog: int) -> None:
        self.contexts = {context.name: context for context in contexts}
        self.layers = tuple(
            sorted({layer for c in self.contexts.values() for layer in c.feature_layers})
        )
        self.lookahead = max((c.lookahead for c in self.contexts.values()), default=0)
        self.scratch = max((c.scratch for c in self.contexts.values()), default=0)
        self.seconds = 0.0
        self.rows: dict[str, int] = dict.fromkeys(self.contexts, 0)
        self.feature_bytes = 0
        self.feature_bytes_peak = 0
        self._max_backlog = max_backlog

    # Life of a sequence ----------------------------------------------------------------------

    def start(self, sequence: SequenceState) -> None:
        """A sequence starts (or starts again after preemption) behind `num_cached` reused
        positions, of which the scheduler says how many each context has."""
        if not self.contexts:
            return
        for name in self.contexts:
            state = sequence.contexts.setdefault(name, ContextState())
            state.off = False
        self._watch_limits(sequence)
        for name, state in sequence.contexts.items():
            if not state.off and state.rows < sequence.num_cached:
                self._switch_off(sequence, name, "the reused prefix came without its context")
        self._renew_buffer(sequence)

    def append(self, sequence: SequenceState, features: Tensor, rows: Sequence[int]) -> None:
        """The target computed the next positions of a sequence.

        Args:
            features: `[tokens, layers, hidden]` of the whole forward.
            rows: which of its tokens they are, in order of position.
        """
        if sequence.features is None:
            return
        index = torch.tensor(rows, dtype=torch.int64, device=features.device)
        sequence.features.append(features.index_select(0, index))
        self._watch_limits(sequence)
        self._release(sequence)

    def available(self, context: DraftContext, sequence: SequenceState) -> bool:
        """Whether drafters over `context` can serve the sequence's next round."""
        return not sequence.contexts[context.name].off

    # Catching up -----------------------------------------------------------------------------

    def consume(self, context: DraftContext, sequences: Sequence[SequenceState]) -> float:
        """Bring `context` up to date with `sequences`; returns the seconds that it took."""
        started = time.perf_counter()
        self.rows[context.name] += sum(context.backlog(s) for s in sequences)
        context.consume(sequences)
        for sequence in sequences:
            self._release(sequence)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return seconds

    def bound(self, running: Sequence[SequenceState]) -> None:
        """After a step: contexts that lag too far catch up, whether they are chosen or not."""
        for context in self.contexts.values():
            late = [
                s
                for s in running
                if not s.contexts[context.name].off and context.backlog(s) > self._max_backlog
            ]
            if late:
                self.consume(context, late)
        self.measure(running)

    def measure(self, running: Sequence[SequenceState]) -> None:
        """Take the memory of the feature buffers of those that run."""
        self.feature_bytes = sum(s.features.nbytes for s in running if s.features is not None)
        self.feature_bytes_peak = max(self.feature_bytes_peak, self.feature_bytes)

    def settle(self, sequence: SequenceState) -> None:
        """Bring every context up to date with a sequence whose prefix others will build on."""
        for name, context in self.contexts.items():
            state = sequence.contexts.get(name)
            if state is not None and not state.off:
                self.consume(context, [sequence])

    # Limits and memory -----------------------------------------------------------------------

    def _watch_limits(self, sequence: SequenceState) -> None:
        """Switch off contexts that the sequence has outgrown (failure kind 11)."""
        for name, context in self.contexts.items():
            # In the next round: a prompt is whole then, behind an output one token is pending.
            reach = len(sequence.tokens) - (sequence.num_output > 0) + context.span
            if sequence.contexts[name].off or reach <= context.max_positions:
                continue
            if sequence.features is not None:
                self.consume(context, [sequence])  # so that shorter prompts can build on it
            self._switch_off(
                sequence,
                name,
                f"a context of {len(sequence.tokens)} tokens and a draft reach beyond its "
                f"max_position_embeddings of {context.max_positions}",
            )

    def _switch_off(self, sequence: SequenceState, name: str, reason: str) -> None:
        sequence.contexts[name].off = True
        sequence.contexts[name].last = None
        note = f"{name} switched off from output token {sequence.num_output} on: {reason}"
        if not any(known.startswith(f"{name} switched off") for known in sequence.stats.notes):
            sequence.stats.notes.append(note)

    def _renew_buffer(self, sequence: SequenceState) -> None:
        awake = any(not state.off for state in sequence.contexts.values())
        sequence.features = FeatureBuffer(self.layers, sequence.num_cached) if awake else None

    def _release(self, sequence: SequenceState) -> None:
        if sequence.features is None:
            return
        rows = [state.rows for state in sequence.contexts.values() if not state.off]
        if rows:
            sequence.features.release(min(rows))
        else:
            sequence.features = None
