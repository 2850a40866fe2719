"""The draft context: a neural drafter's own keys and values of what was decided so far.

Row t of a context belongs to position t and lives at that position of the drafter's plane of the KV
arena. A context may lag behind its sequence by any number of rows; `consume` makes the missing ones
from the target's features in one batched operation. Two arms over one network (`dflash` and
`ddtree`) share a context. While drafting, rows behind the last one are scratch: written, read in
the same call, and overwritten by the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SettingsError
from ..kv_cache import Plane, PlaneShape
from ..sequence import SequenceState
from ..target import Target


@dataclass(slots=True)
class Backlog:
    """The rows that one call of `consume` makes, packed over sequences.

    Attributes:
        sequences, starts, ends: rows `starts[i]` to `ends[i] - 1` of each sequence.
        features: `[rows, layers * hidden]`.
        positions: `[rows]`, int64.
        targets: `[rows]`, their positions in the arena.
    """

    sequences: list[SequenceState]
    starts: list[int]
    ends: list[int]
    features: Tensor
    positions: Tensor
    targets: Tensor


class DraftContext(ABC):
    """Keys and values of one drafting network, all sequences.

    Attributes:
        name: of the network; states of sequences are kept under it.
        feature_layers: target hidden states it reads, in Hugging Face indexing.
        lookahead: row t depends on tokens up to t + lookahead, so that many tokens behind a reused
            prefix must be alike, too.
        plane_shape: of its keys and values.
        scratch: positions behind the context that drafting may write.
        max_positions: of the network; beyond it, it is not used.
        span: positions behind the context that drafting reaches.
    """

    name: str
    feature_layers: tuple[int, ...]
    lookahead: int
    plane_shape: PlaneShape
    scratch: int
    max_positions: int
    span: int

    def __init__(self) -> None:
        self._target: Target | None = None
        self._plane: Plane | None = None
        self.full_prefill = False

    def bind(self, target: Target, plane: Plane, *, full_prefill: bool) -> None:
        """Take the engine's plane; `full_prefill` runs whole layers over backlog rows, as drafters
        do without KV-only prefill (WhiFlash, section 3.4).

        Raises:
            SettingsError: it serves an engine already.
        """
        if self._plane is not None:
            raise SettingsError(
                f"this {self.name} drafter serves another engine, and its keys and values live "
                "there; build one drafter per engine (they may share the loaded model)"
            )
        self._target, self._plane, self.full_prefill = target, plane, full_prefill

    @property
    def target(self) -> Target:
        assert self._target is not None  # the engine binds before it drafts
        return self._target

    @property
    def plane(self) -> Plane:
        assert self._plane is not None
        return self._plane

    def backlog(self, sequence: SequenceState) -> int:
        """Rows of a running sequence that are missing."""
        return sequence.num_cached - sequence.contexts[self.name].rows

    def consume(self, sequences: Sequence[SequenceState]) -> None:
        """Make the missing rows of all `sequences` at once."""
        late = [s for s in sequences if self.backlog(s)]
        if not late:
            return
        starts = [s.contexts[self.name].rows for s in late]
        ends = [s.num_cached for s in late]
        features, positions, targets = [], [], []
        for sequence, start, end in zip(late, starts, ends, strict=True):
            assert sequence.features is not None
            assert sequence.extent is not None
            features.append(sequence.features.read(start, end, self.feature_layers))
            positions.append(torch.arange(start, end))
            targets.append(torch.arange(sequence.extent.start + start, sequence.extent.start + end))
        device = self.target.device
        backlog = Backlog(
            late,
            starts,
            ends,
            _cat(features),
            _cat(positions).to(device),
            _cat(targets).to(device),
        )
        with torch.inference_mode():
            last = self._consume(backlog)
        for sequence, end, row in zip(late, ends, last, strict=True):
            state = sequence.contexts[self.name]
            state.rows, state.last = end, row

    @abstractmethod
    def _consume(self, backlog: Backlog) -> Sequence[Tensor | None]:
        """Write the rows' keys and values; returns, per sequence, what drafting needs of its last
        row."""


class ContextDrafter:
    """What all drafters over a context share: their state per sequence is the engine's matter, and
    catching up is the context's.

    Attributes:
        scores: whether its trees must carry probabilities, even where those take work of their own.
    """

    context: DraftContext
    scores: bool = False

    def open(self, sequence: SequenceState) -> None:
        """Nothing: the engine starts the context's state."""

    def close(self, sequence: SequenceState) -> None:
        """Nothing: the engine drops the context's state."""

    def backlog(self, sequence: SequenceState) -> int:
        return self.context.backlog(sequence)

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        self.context.consume(sequences)


def draft_context(drafter: object) -> DraftContext | None:
    """The context that `drafter` drafts from; None for one that needs none."""
    context = getattr(drafter, "context", None)
    return context if isinstance(context, DraftContext) else None


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
