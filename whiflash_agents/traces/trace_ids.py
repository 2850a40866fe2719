"""Which trace ids were seen, in memory that is small and stated.

Each id takes one slot of 12 bytes in an open-addressing table: 8 bytes of its hash and 4 bytes for
where it stood. The table grows by half when three quarters are full, so an id takes 16 to 24 bytes:
about 20 MB per million traces. Two different ids are taken for the same one with a probability of
n^2 / 2^65 over n ids, which is 3e-8 for a million.
"""

from __future__ import annotations

from array import array

_HASH_MASK = (1 << 64) - 1
_FULL = 0.75
_GROWTH = 1.5


class SeenIds:
    """Remembers ids and the ordinal (from 0, below 2^32) each was first seen with."""

    def __init__(self) -> None:
        self._size = 1024
        self._count = 0
        self._hashes = array("Q", bytes(8 * self._size))  # 0: free
        self._ordinals = array("I", bytes(4 * self._size))

    def add(self, trace_id: str, ordinal: int) -> int | None:
        """Remembers `trace_id`; the ordinal of its first appearance if it was known, else None."""
        hashes, size = self._hashes, self._size
        key = (hash(trace_id) & _HASH_MASK) or 1
        slot = key % size
        while stored := hashes[slot]:
            if stored == key:
                return self._ordinals[slot]
            slot += 1
            if slot == size:
                slot = 0
        hashes[slot] = key
        self._ordinals[slot] = ordinal
        self._count += 1
        if self._count > _FULL * size:
            self._grow()
        return None

    def _grow(self) -> None:
        old_hashes, old_ordinals = self._hashes, self._ordinals
        size = self._size = int(self._size * _GROWTH) | 1
        hashes = self._hashes = array("Q", bytes(8 * size))
        ordinals = self._ordinals = array("I", bytes(4 * size))
        for key, ordinal in zip(old_hashes, old_ordinals, strict=True):
            if key:
                slot = key % size
                while hashes[slot]:
                    slot += 1
                    if slot == size:
                        slot = 0
                hashes[slot] = key
                ordinals[slot] = ordinal
