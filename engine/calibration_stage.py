"""Where costs are measured: sequences that no scheduler knows, in the free part of an engine's KV
arena, and the calls of a round over them, one at a time.

Contexts are made up. Keys, values and features are random numbers, on which no time depends, so
that no prompt has to be computed first. What is timed is what the loop times (`engine.py`,
`drafting.py`), so that predictions and observations speak of the same thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import torch

from .attention import PackedRow
from .drafters.base import Drafter, DraftLimit
from .drafters.context import DraftContext, draft_context
from .errors import SettingsError
from .features import FeatureBuffer
from .kv_cache import GRANULE, Extent
from .request import Request, SamplingParams
from .sampling import Sampler
from .sequence import ContextState, SequenceState
from .stopping import StopChecker
from .target import TargetBatch

if TYPE_CHECKING:
    from .engine import WhiFlashEngine

SHORT = 64  # positions before what is timed, where there is room
LONG = 1024  # as many before a forward behind a long context
BACKLOG = 256  # most rows of a catch-up
_EVERY_ROUND = 4  # tokens that a retrieving drafter catches up on before it drafts
_SWEPT = 128 << 20  # bytes of the target's weights that are read before a drafter is timed


class Stage:
    """Made-up sequences, side by side in one extent.

    Args:
        engine: an idle one, whose target, arena, networks and drafters take part.
        extent: positions that are nobody's.
        room: positions that a round may write behind a context.

    Attributes:
        short, long: positions of the contexts before what is timed.
        most_sequences: how many there is room for, of those that may run.
        most_tokens: as many as one sequence may verify in a round.
        most_backlog: rows that a catch-up may have here.
    """

    def __init__(self, engine: WhiFlashEngine, extent: Extent, room: int) -> None:
        self._target = target = engine.target
        self._cache = engine._cache
        self._drafters = engine.drafters
        self._contexts = engine._catch_up.contexts
        self._layers = engine._catch_up.layers
        self._extent = extent
        self._opened: list[tuple[Drafter, SequenceState]] = []
        space = min(target.max_context, extent.capacity)
        self.short = max(1, min(SHORT, space - room))
        self.long = max(self.short, min(LONG, space - room))
        self._stride = self.short + room
        self.most_sequences = min(engine.settings.max_running, extent.capacity // self._stride)
        self.most_tokens = engine.settings.max_draft_nodes + 1
        self.most_backlog = max(1, min(BACKLOG, space - self.short - 1))
        # It repeats itself, so that retrieval has something to find.
        phrase = Random(0).choices(range(target.vocab_size), k=SHORT // 2)
        length = self._stride + max(room, self.most_backlog) + _EVERY_ROUND
        self._text = (phrase * (length // len(phrase) + 1))[:length]
        self._weights: list[torch.Tensor] = []
        size = 0
        for weight in target.model.parameters():
            if size < _SWEPT and weight.is_floating_point():
                self._weights.append(weight.detach())
                size += weight.nbytes
        self._features = self._make_up()

    @classmethod
    @contextmanager
    def on(cls, engine: WhiFlashEngine) -> Iterator[Stage]:
        """A stage in the largest free part of the arena that is of use; it is given back and all
        sequences are closed, whatever happens.

        Raises:
            SettingsError: there is no free part that holds one round.
        """
        cache = engine._cache
        room = engine._room + 1  # the drafts and their root
        wanted = max(engine.settings.max_running * (SHORT + room), LONG + room)
        sizes = range(min(wanted, cache.positions), room, -GRANULE)
        extent = next((e for size in sizes if (e := cache.allocate(size)) is not None), None)
        if extent is None:
            raise SettingsError(
                f"measuring costs needs {room + 1} KV positions in a row, of the cache's "
                f"{cache.positions} {cache.free_positions} are free; measure before the first "
                "request, or raise kv_tokens"
            )
        try:
            stage = cls(engine, extent, room)
            try:
                yield stage
            finally:
                for drafter, sequence in list(stage._opened):
                    stage._close(drafter, sequence)
        finally:
            cache.free(extent)

    @torch.inference_mode()
    def _make_up(self) -> torch.Tensor:
        """Fill the extent of every plane; returns features for catching up, `[rows, layers,
        hidden]`. An arena is not zeroed, and numbers that are none, or next to none, take longer.
        """
        target, cache = self._target, self._cache
        generator = torch.Generator(target.device).manual_seed(0)  # torch's own stays as it is
        arenas = [*cache.keys, *cache.values]
        for plane in cache.beside:
            arenas += [*plane.keys, *plane.values]
        for arena in arenas:
            block = arena.narrow(1, self._extent.start, GRANULE).normal_(generator=generator)
            for at in range(self._extent.start + GRANULE, self._extent.end, GRANULE):
                arena.narrow(1, at, GRANULE).copy_(block)
        shape = (self.most_backlog, len(self._layers), target.hidden_size)
        features = torch.empty(shape, dtype=target.dtype, device=target.device)
        return features.normal_(generator=generator)

    # Verification ----------------------------------------------------------------------------

    def attended(self, tokens: int) -> int:
        """The sum over the tokens of `verify` of their context lengths, as the loop counts it."""
        return sum(count * (past + count) for _, past, count in self._rows(tokens))

    def verify(self, tokens: int) -> float:
        """Seconds of one forward of the target behind short contexts: of as few sequences as may
        verify so many tokens."""
        return self._forward(self._rows(tokens))

    def attended_long(self, tokens: int) -> int:
        return tokens * (self.long + tokens)

    def verify_long(self, tokens: int) -> float:
        """Seconds of one forward of one sequence behind the long context."""
        return self._forward([(self._extent.start, self.long, tokens)])

    def _rows(self, tokens: int) -> list[tuple[int, int, int]]:
        """(start, positions before, tokens) per sequence, equally many tokens each."""
        sequences = -(-tokens // self.most_tokens)
        counts = [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]
        return [
            (self._extent.start + i * self._stride, self.short, count)
            for i, count in enumerate(counts)
        ]

    def _forward(self, rows: Sequence[tuple[int, int, int]]) -> float:
        batch = TargetBatch()
        for start, past, count in rows:
            row = PackedRow(start, past, count)
            batch.add(row, self._text[:count], range(past, past + count), logits_from=0)
        return self._timed(lambda: self._target.forward(batch, self._cache, capture=self._layers))

    # Drafting --------------------------------------------------------------------------------

    def drafting(self, arm: str) -> Callable[[int], float]:
        """Seconds of a call of `arm`, over the number of sequences. An arm without a network also
        catches up, by what a round brings: the loop does not tell the two apart either."""
        drafter = self._drafters[arm]
        context = draft_context(drafter)
        if context is None:
            return lambda count: self._retrieve(arm, drafter, count)
        sequences = self._sequences(arm, self.most_sequences)
        for sequence in sequences:
            self._open(drafter, sequence)
            self._lag(sequence, context, 1)
        context.consume(sequences)  # the last row, from which drafting begins

        def draft(count: int) -> float:
            chosen = sequences[:count]
            limits = [self._limit(s) for s in chosen]
            self._sweep()
            return self._timed(lambda: drafter.draft(chosen, limits))

        return draft

    def _retrieve(self, arm: str, drafter: Drafter, count: int) -> float:
        sequences = self._sequences(arm, count)
        for sequence in sequences:
            self._open(drafter, sequence)
        drafter.catch_up(sequences)
        for sequence in sequences:
            end = len(sequence.tokens)
            sequence.tokens += self._text[end : end + _EVERY_ROUND]
            sequence.num_cached += _EVERY_ROUND
        limits = [self._limit(s) for s in sequences]

        def catch_up_and_draft() -> None:
            drafter.catch_up(sequences)
            drafter.draft(sequences, limits)

        self._sweep()
        seconds = self._timed(catch_up_and_draft)
        for sequence in sequences:
            self._close(drafter, sequence)
        return seconds

    def _limit(self, sequence: SequenceState) -> DraftLimit:
        return DraftLimit(sequence.num_remaining - 1, self.most_tokens - 1)

    # Catching up -----------------------------------------------------------------------------

    def catching_up(self, network: str) -> Callable[[int], float]:
        """Seconds in which the context of `network` consumes a backlog, over its rows."""
        context = self._contexts[network]
        (sequence,) = self._sequences(network, 1)
        sequence.tokens = self._text

        def catch_up(rows: int) -> float:
            sequence.num_cached = self.short + rows
            self._lag(sequence, context, rows)
            self._sweep()
            return self._timed(lambda: context.consume([sequence]))

        return catch_up

    def _lag(self, sequence: SequenceState, context: DraftContext, rows: int) -> None:
        """Let `context` lag behind by the last `rows` positions, whose features are there."""
        start = sequence.num_cached - rows
        sequence.contexts[context.name] = ContextState(start)
        sequence.features = FeatureBuffer(self._layers, start)
        sequence.features.append(self._features[:rows])

    # Sequences and time ----------------------------------------------------------------------

    def _sequences(self, name: str, count: int) -> list[SequenceState]:
        """New ones in decoding: the short context, and a bonus token."""
        target = self._target
        params = SamplingParams(max_tokens=target.max_context)
        prompt = self._text[: self.short + 1]
        return [
            SequenceState(
                request=Request(f"calibration of {name}, {i}", prompt, params),
                sampler=Sampler(
                    params,
                    vocab_size=target.vocab_size,
                    prompt_ids=prompt,
                    eos_token_ids=target.eos_token_ids,
                    seed=0,
                    device=target.device,
                ),
                stop=StopChecker(params, eos_token_ids=target.eos_token_ids, decode=None),
                tokens=list(prompt),
                num_prompt=len(prompt),
                seed=0,
                num_cached=self.short,
                extent=Extent(self._extent.start + i * self._stride, self._stride),
                contexts={network: ContextState(self.short) for network in self._contexts},
            )
            for i in range(count)
        ]

    def _open(self, drafter: Drafter, sequence: SequenceState) -> None:
        drafter.open(sequence)
        self._opened.append((drafter, sequence))

    def _close(self, drafter: Drafter, sequence: SequenceState) -> None:
        sequence.num_prompt = len(sequence.tokens)  # there is no output to learn from
        self._opened.remove((drafter, sequence))
        drafter.close(sequence)

    def _sweep(self) -> None:
        """Read weights of the target: in the loop its forward lies between any two drafts and
        drives the drafters' weights out of the caches."""
        for weight in self._weights:
            weight.sum()

    def _timed(self, call: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
