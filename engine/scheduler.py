"""Which sequences run, and on which part of the KV arena.

Admission is first come, first served under a budget of arena positions. A prompt whose beginning
was computed before reuses those keys and values, drafters' included: in place when a finished
sequence left them behind, by a copy otherwise; and it waits when a running sequence is just about
to compute them, so that every distinct position is prefilled once. Long prompts are prefilled in
chunks beside the rounds of the others. When the arena is full, finished prefixes are dropped first,
then the youngest running sequence is preempted: it waits at the front and resumes with what it
generated so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .kv_cache import Extent, KVCache
from .sequence import ContextState, SequenceState, common_prefix_length

_RESERVE = 128  # output positions reserved at admission; more are claimed as the output grows
_LOOK_AHEAD = 16  # waiting sequences considered when the first ones wait for a prefix
_WORTH_WAITING = 16  # shared positions for which a prompt waits until another has computed them
_MAX_RETAINED = 64  # finished prefixes kept; the arena's size usually binds first


@dataclass(slots=True, eq=False)
class Retained:
    """Keys and values that a finished sequence left behind: those of the first `num_cached` of its
    `tokens`, of which the first `num_prompt` were its prompt. `context_rows` says how far each
    drafter's context reaches."""

    tokens: list[int]
    num_cached: int
    num_prompt: int
    extent: Extent
    context_rows: dict[str, int]


@dataclass(slots=True)
class Source:
    """The best place to take a prompt's beginning from. `lost` positions are computed again though
    the target has them, because a drafter's rows there depend on a token that differs."""

    length: int = 0
    lost: int = 0
    running: SequenceState | None = None
    retained: Retained | None = None


class Scheduler:
    """Waiting, running and retained sequences over one `KVCache`.

    Args:
        max_running: sequences that run at once.
        prefill_chunk: prompt tokens per step, all sequences together.
        scratch: positions that a round may write behind the committed ones.
        prefix_reuse: off computes every prompt from its first token.
        lookahead: tokens behind a position on which drafters' rows there depend.
        start: called for a sequence that just got its extent, before anybody can build on it.
        settle: called before others build on a sequence's prefix, to bring its drafters' contexts
            up to date.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_running: int,
        prefill_chunk: int,
        scratch: int,
        prefix_reuse: bool = True,
        lookahead: int = 0,
        start: Callable[[SequenceState], None] = lambda sequence: None,
        settle: Callable[[SequenceState], None] = lambda sequence: None,
    ) -> None:
        self.cache = cache
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.scratch = scratch
        self.prefix_reuse = prefix_reuse
        self.lookahead = lookahead
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.positions_recomputed = 0
        self._on_start = start
        self._settle = settle
        self._retained: list[Retained] = []  # least recently used first
        self._awaits: dict[str, tuple[SequenceState, int]] = {}

    # In and out ------------------------------------------------------------------------------

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. Alone, with all its output and a round's drafts, it must fit."""
        self.waiting.append(sequence)

    def finish(self, sequence: SequenceState, *, keep: bool = True) -> None:
        """A running sequence ended: with `keep`, retain what it computed for prompts that begin
        alike."""
        self.running.remove(sequence)
        assert sequence.extent is not None
        if self.prefix_reuse and keep and sequence.num_cached:
            self._settle(sequence)
            self._retained.append(
                Retained(
                    sequence.tokens,
                    sequence.num_cached,
                    min(sequence.num_prompt, sequence.num_cached),
                    sequence.extent,
                    _context_rows(sequence),
                )
            )
            if len(self._retained) > _MAX_RETAINED:
                self._evict()
        else:
            self.cache.free(sequence.extent)
        sequence.extent = None

    def drop(self, sequence: SequenceState) -> None:
        """Forget a sequence that waits or runs (abort)."""
        if sequence in self.running:
            self.finish(sequence)
        else:
            self.waiting.remove(sequence)
            self._awaits.pop(sequence.id, None)

    # Admission -------------------------------------------------------------------------------

    def admit(self) -> list[SequenceState]:
        """Start waiting sequences while there is room; returns those that started."""
        admitted = []
        index = 0
        while len(self.running) < self.max_running and index < min(len(self.waiting), _LOOK_AHEAD):
            sequence = self.waiting[index]
            if self._must_wait(sequence):
                index += 1
                continue
            if self._wanted(sequence) > self._obtainable():
                break  # no room: later, smaller ones must not starve it
            source = self._find_source(sequence)
            if source is None:
                index += 1
                continue
            self._place(sequence, source)
            del self.waiting[index]
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _must_wait(self, sequence: SequenceState) -> bool:
        if sequence.id not in self._awaits:
            return False
        other, until = self._awaits[sequence.id]
        if other.extent is not None and other.num_cached < until and other in self.running:
            return True
        del self._awaits[sequence.id]
        return False

    def _find_source(self, sequence: SequenceState) -> Source | None:
        """Where the prompt's beginning can be taken from; None when waiting for one pays."""
        best = Source()
        if not self.prefix_reuse:
            return best
        limit = len(sequence.tokens) - 1  # the last token is always computed: it yields the logits
        for retained in reversed(self._retained):
            shared = common_prefix_length(sequence.tokens, retained.tokens)
            length = min(shared - self.lookahead, retained.num_cached, limit)
            if length > best.length:
                lost = min(shared, retained.num_cached, limit) - length
                best = Source(length, lost, retained=retained)
            if length == limit:
                return best
        coming, coming_from = 0, None
        for other in self.running:
            shared = common_prefix_length(sequence.tokens, other.tokens)
            usable = min(shared - self.lookahead, limit)
            ready = min(usable, other.num_cached)
            if ready > best.length:
                lost = min(shared, other.num_cached, limit) - ready
                best = Source(ready, lost, running=other)
            if usable > coming and other.num_pending > 1:
                coming, coming_from = usable, other
        if coming_from is not None and coming - best.length >= _WORTH_WAITING:
            self._awaits[sequence.id] = (coming_from, coming)
            return None
        return best

    def _wanted(self, sequence: SequenceState) -> int:
        """Positions to start with: the prompt, a round's drafts, and some of the output."""
        return len(sequence.tokens) + self.scratch + min(sequence.num_remaining, _RESERVE)

    def _obtainable(self) -> int:
        """Positions that are free once every retained prefix is dropped or taken over."""
        return self.cache.free_positions + sum(r.extent.capacity for r in self._retained)

    def _place(self, sequence: SequenceState, source: Source) -> None:
        """Give the sequence an extent that begins with the source's keys and values.

        The caller has made sure that there is room (`_obtainable`).
        """
        wanted, retained = self._wanted(sequence), source.retained
        rows: dict[str, int] = {}
        if source.running is not None:
            self._settle(source.running)
            rows = _context_rows(source.running)
        elif retained is not None:
            rows = retained.context_rows
        if retained is not None and self._may_take_over(retained, source.length, wanted):
            self._retained.remove(retained)
            extent = self._widen(retained.extent, source.length, wanted, wanted)
            assert extent is not None
        else:
            extent = self._allocate(wanted, keep=retained)
            assert extent is not None
            origin = source.running or retained
            if origin is not None:
                assert origin.extent is not None
                self.cache.copy(origin.extent, extent, 0, source.length)
            if retained is not None:
                self._touch(retained)
        sequence.contexts = {
            name: ContextState(min(count, source.length)) for name, count in rows.items()
        }
        self.positions_recomputed += source.lost
        self._start(sequence, extent, source.length)

    def _may_take_over(self, retained: Retained, length: int, wanted: int) -> bool:
        """Whether a prompt may build on `retained` itself rather than on a copy, which crops it.

        A prompt that goes on where the retained one ended is its next turn (a template may write
        the last few tokens differently then). One that only begins alike gets a copy while there is
        room, because the retained one may go on, too.
        """
        rest = retained.num_prompt - length
        if rest < _WORTH_WAITING and rest <= length:
            return True
        return wanted > self._obtainable() - retained.extent.capacity

    def _start(self, sequence: SequenceState, extent: Extent, reused: int) -> None:
        sequence.extent = extent
        sequence.num_cached = reused
        if sequence.num_output == 0:
            sequence.cached_tokens = reused
        self._on_start(sequence)

    # Space -----------------------------------------------------------------------------------

    def reserve(self, sequence: SequenceState, positions: int) -> None:
        """Make `positions` fit into the extent of a running sequence, preempting if it must.

        The youngest sequence is preempted first; that may be `sequence` itself, whose `extent` is
        None afterwards.
        """
        most = len(sequence.tokens) + sequence.num_remaining + self.scratch
        # Moving costs in proportion to the length, so one that moves takes half as much again: what
        # an output moves in all stays in proportion to its length.
        ample = min(most, positions + max(_RESERVE, positions // 2))
        while sequence.extent is not None:
            extent = self._widen(sequence.extent, sequence.num_cached, positions, ample)
            if extent is not None:
                sequence.extent = extent
                return
            self._preempt(max(self.running, key=lambda s: s.arrival))

    def _preempt(self, victim: SequenceState) -> None:
        self.running.remove(victim)
        assert victim.extent is not None
        self.cache.free(victim.extent)
        victim.extent = None
        victim.num_cached = 0
        victim.contexts, victim.features = {}, None
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _widen(self, extent: Extent, used: int, positions: int, ample: int) -> Extent | None:
        """`extent` with room for `positions`; None when nothing helps.

        If it must be moved, it gets room for `ample`, where that is free.
        """
        while not self.cache.grow(extent, positions):
            wider = self.cache.allocate(ample)
            if wider is None and ample > positions:
                wider = self.cache.allocate(positions)
            if wider is not None:
                self.cache.copy(extent, wider, 0, used)
                self.cache.free(extent)
                return wider
            if not self._evict():
                break
        else:
            return extent
        if self.cache.free_positions + extent.capacity < positions:
            return None
        self._defragment(last=extent, used=used)
        return extent if self.cache.grow(extent, positions) else None

    def _allocate(self, positions: int, *, keep: Retained | None) -> Extent | None:
        """A new extent, dropping retained prefixes (but `keep`) until it fits."""
        while (extent := self.cache.allocate(positions)) is None and self._evict(keep):
            pass
        if extent is None and self.cache.free_positions >= positions:
            self._defragment()
            extent = self.cache.allocate(positions)
        return extent

    def _evict(self, keep: Retained | None = None) -> bool:
        """Drop the least recently used retained prefix; False when there is none."""
        victim = next((r for r in self._retained if r is not keep), None)
        if victim is None:
            return False
        self._retained.remove(victim)
        self.cache.free(victim.extent)
        return True

    def _defragment(self, *, last: Extent | None = None, used: int = 0) -> None:
        lengths = {id(s.extent): s.num_cached for s in self.running if s.extent is not None}
        lengths |= {id(r.extent): r.num_cached for r in self._retained}
        if last is not None:
            lengths[id(last)] = used
        self.cache.defragment(lengths, last=last)

    def _touch(self, retained: Retained) -> None:
        self._retained.remove(retained)
        self._retained.append(retained)

    # The step --------------------------------------------------------------------------------

    def prefill_chunks(self) -> list[tuple[SequenceState, int]]:
        """Tokens to compute in this step beside the rounds: (sequence, count), in the order in
        which the sequences started."""
        budget = self.prefill_chunk
        chunks = []
        for sequence in self.running:
            if budget == 0:
                break
            if not sequence.is_decoding:
                # The last token of one that was preempted enters with a round, not with a chunk.
                count = min(sequence.num_pending - (sequence.num_output > 0), budget)
                chunks.append((sequence, count))
                budget -= count
        return chunks


def _context_rows(sequence: SequenceState) -> dict[str, int]:
    return {name: state.rows for name, state in sequence.contexts.items()}
