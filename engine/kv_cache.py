"""The KV cache: one preallocated arena of positions, shared by all sequences.

A sequence owns an `Extent`, a contiguous range of positions, so that attention reads a plain view
of the arena: nothing is gathered, padded or copied per round. Rolling back is a length change kept
by the sequence; an accepted tree path is compacted in place (`commit`); a prefix computed for one
sequence is copied to another (`copy`), all layers in one operation.

Drafters with keys and values of their own have a `Plane` beside the target's: the same positions,
other layers. What moves, copies or frees an extent does so in every plane, so a reused prefix
brings the drafters' context with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GRANULE = 64  # extents are multiples of this many positions, so that growing is rare


@dataclass(slots=True, eq=False)
class Extent:
    """A range of arena positions: `[start, start + capacity)`. Moves only by `defragment`."""

    start: int
    capacity: int

    @property
    def end(self) -> int:
        return self.start + self.capacity


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """Layers, key/value heads and head size of one model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_position(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class Plane:
    """Keys and values of one model over all positions of the arena.

    Attributes:
        keys, values: one tensor per layer, each `[kv_heads, positions, head_dim]`, views of a
            single allocation `[layers, kv_heads, positions, head_dim]`.
    """

    __slots__ = ("arenas", "keys", "values")

    def __init__(
        self, shape: PlaneShape, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # `empty` leaves pages of a CPU arena uncommitted until they are written, and no position is
        # ever read before it was written, so nothing needs to be zeroed.
        size = (shape.layers, shape.kv_heads, positions, shape.head_dim)
        self.arenas = tuple(torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        self.keys, self.values = (list(arena.unbind(0)) for arena in self.arenas)


class KVCache:
    """Keys and values of every layer for `positions` token positions.

    Attributes:
        keys, values: the target's (see `Plane`).
        beside: one plane per shape that was asked for, in that order.
    """

    def __init__(
        self,
        shape: PlaneShape,
        *,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
        beside: Sequence[PlaneShape] = (),
    ) -> None:
        positions -= positions % GRANULE
        self._target = Plane(shape, positions, dtype, device)
        self.beside = [Plane(other, positions, dtype, device) for other in beside]
        self._arenas = [a for plane in (self._target, *self.beside) for a in plane.arenas]
        self.keys, self.values = self._target.keys, self._target.values
        self.positions = positions
        self._extents: list[Extent] = []  # sorted by start

    # Space -----------------------------------------------------------------------------------

    @property
    def free_positions(self) -> int:
        return self.positions - sum(e.capacity for e in self._extents)

    def allocate(self, positions: int) -> Extent | None:
        """Reserve at least `positions`; None when no gap is wide enough (first fit)."""
        capacity = _round_up(positions)
        cursor = 0
        for extent in self._extents:
            if extent.start - cursor >= capacity:
                break
            cursor = extent.end
        else:
            if cursor + capacity > self.positions:
                return None
        extent = Extent(cursor, capacity)
        insort(self._extents, extent, key=lambda e: e.start)
        return extent

    def grow(self, extent: Extent, positions: int) -> bool:
        """Widen `extent` in place to at least `positions`; False if its neighbour is in the way."""
        capacity = _round_up(positions)
        if capacity <= extent.capacity:
            return True
        index = self._index(extent)
        limit = self._extents[index + 1].start if index + 1 < len(self._extents) else self.positions
        if extent.start + capacity > limit:
            return False
        extent.capacity = capacity
        return True

    def free(self, extent: Extent) -> None:
        del self._extents[self._index(extent)]

    def defragment(self, lengths: dict[int, int], *, last: Extent | None = None) -> None:
        """Pack all extents to the front, so that the free positions form one gap behind them.

        `lengths[id(extent)]` is how many of an extent's positions hold data worth moving; every
        extent needs an entry, since what is not moved is lost. `last` is put behind the others, so
        that it can grow into the gap.
        """
        parked = None
        if last is not None:
            n = lengths[id(last)]
            parked = [a.narrow(2, last.start, n).clone() for a in self._arenas]
            self.free(last)
        cursor = 0
        for extent in self._extents:
            if extent.start != cursor:
                self._move(extent.start, cursor, lengths[id(extent)])
                extent.start = cursor
            cursor = extent.end
        if last is not None and parked is not None:
            last.start = cursor
            self._extents.append(last)
            for arena, part in zip(self._arenas, parked, strict=True):
                arena.narrow(2, cursor, part.shape[2]).copy_(part)

    def _move(self, source: int, target: int, count: int) -> None:
        # Chunks no longer than the distance never overlap their own source.
        step = source - target
        for offset in range(0, count, step):
            n = min(step, count - offset)
            for arena in self._arenas:
                part = arena.narrow(2, source + offset, n)
                arena.narrow(2, target + offset, n).copy_(part)

    def _index(self, extent: Extent) -> int:
        index = bisect_left(self._extents, extent.start, key=lambda e: e.start)
        if index == len(self._extents) or self._extents[index] is not extent:
            raise KeyError(f"extent at position {extent.start} is not allocated")
        return index

    # Data ------------------------------------------------------------------------------------

    def copy(self, source: Extent, target: Extent, start: int, end: int) -> None:
        """Copy positions `[start, end)` of `source` to the same positions of `target`."""
        if end > start:
            for arena in self._arenas:
                part = arena.narrow(2, source.start + start, end - start)
                arena.narrow(2, target.start + start, end - start).copy_(part)

    def commit(self, extent: Extent, length: int, path: Sequence[int]) -> None:
        """Keep an accepted tree path of the target: row `length + path[i]` becomes `length + i`.

        `length` is the number of committed positions before the tree, `path` the accepted nodes
        from the root, so `path[0] == 0`. A path that is already contiguous costs nothing.
        """
        first = next((i for i, node in enumerate(path) if node != i), len(path))
        moved = path[first:]
        if not moved:
            return
        base = extent.start + length
        rows = torch.tensor([base + node for node in moved], device=self._target.arenas[0].device)
        for arena in self._target.arenas:  # drafters keep committed positions only
            # index_select copies first: sources may lie among the targets.
            arena.narrow(2, base + first, len(moved)).copy_(arena.index_select(2, rows))


def _round_up(positions: int) -> int:
    return -(-positions // GRANULE) * GRANULE
