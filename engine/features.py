"""The feature buffer: hidden states of the target that drafters have not consumed yet.

One buffer per sequence holds the union of the layers that the enabled drafters read, by position,
captured once per forward. Each drafter takes the layers and positions it needs (EAGLE-3 pairs
position t with token t + 1, DFlash uses it as position t); rows that every drafter has consumed are
freed, so the buffer holds a backlog and never a history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class FeatureBuffer:
    """Features of positions `[start, end)` of one sequence.

    Args:
        layers: the hidden states it holds, in Hugging Face indexing, ascending.
        start: the first position that will be appended.
    """

    __slots__ = ("_chunks", "end", "layers", "start")

    def __init__(self, layers: Sequence[int], start: int) -> None:
        self.layers = tuple(layers)
        self.start = start
        self.end = start
        self._chunks: deque[Tensor] = deque()  # each [rows, layers, hidden], in order

    def append(self, rows: Tensor) -> None:
        """Add the features of the next positions, `[rows, layers, hidden]`; the buffer keeps the
        tensor, so it must not be a view of a larger one."""
        if len(rows):
            self._chunks.append(rows)
            self.end += len(rows)

    def read(self, start: int, end: int, layers: Sequence[int]) -> Tensor:
        """Features of positions `[start, end)`, `[rows, len(layers) * hidden]`, the layers side by
        side in the order given.

        Raises:
            IndexError: a position that was freed, or is not there yet.
        """
        if not self.start <= start < end <= self.end:
            raise IndexError(
                f"features of positions {start} to {end - 1} were asked for; the buffer holds "
                f"{self.start} to {self.end - 1}"
            )
        parts, at = [], self.start
        for chunk in self._chunks:
            first, last = max(start - at, 0), min(end - at, len(chunk))
            if first < last:
                parts.append(chunk[first:last])
            at += len(chunk)
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tuple(layers) != self.layers:
            rows = rows[:, [self.layers.index(layer) for layer in layers]]
        return rows.flatten(1)

    def release(self, before: int) -> None:
        """Free the rows of positions below `before`. Memory goes chunk by chunk, where a chunk is
        what one forward added."""
        while self._chunks and self.start + len(self._chunks[0]) <= before:
            self.start += len(self._chunks.popleft())
        if not self._chunks:
            self.start = self.end
        elif before > self.start:
            self._chunks[0] = self._chunks[0][before - self.start :]
            self.start = before

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(chunk.untyped_storage().nbytes() for chunk in self._chunks)


def stack(features: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    """A forward's features per layer, each `[tokens, hidden]`, as `[tokens, layers, hidden]`."""
    return torch.stack([features[layer] for layer in layers], dim=1)
