"""Which trace ids were seen, in memory that is small and stated.

Each id takes a slot of 12 bytes in an open-addressing table: 8 bytes of its hash and 4 bytes for
where it stood. A table grows by half when three quarters are full, so an id takes 16 to 24 bytes:
about 20 MB per million traces. There are 64 tables, so that one grows at a time and the copies do
not add up. Two different ids are taken for the same one with a probability of n^2 / 2^65 over n
ids, which is 3e-8 for a million.
"""

from __future__ import annotations

from array import array

_TABLES = 64
_HASH_MASK = (1 << 64) - 1
_FULL = 0.75
_GROWTH = 1.5


class SeenIds:
    """Remembers ids and the ordinal (from 0, below 2^32) each was first seen with."""

    def __init__(self) -> None:
        self._tables = [_Table() for _ in range(_TABLES)]

    def add(self, trace_id: str, ordinal: int) -> int | None:
        """Remembers `trace_id`; the ordinal of its first appearance if it was known, else None."""
        key = (hash(trace_id) & _HASH_MASK) or 1
        return self._tables[key % _TABLES].add(key, ordinal)


class _Table:
    """Linear probing over the keys; 0 marks a free slot."""

    __slots__ = ("_count", "_keys", "_ordinals", "_room", "_size")

    def __init__(self) -> None:
        self._allocate(31)
        self._count = 0

    def _allocate(self, size: int) -> None:
        self._size = size
        self._room = int(size * _FULL)
        self._keys = array("Q", bytes(8 * size))
        self._ordinals = array("I", bytes(4 * size))

    def add(self, key: int, ordinal: int) -> int | None:
        keys, size = self._keys, self._size
        slot = (key >> 6) % size  # the low 6 bits chose the table
        while stored := keys[slot]:
            if stored == key:
                return self._ordinals[slot]
            slot += 1
            if slot == size:
                slot = 0
        keys[slot] = key
        self._ordinals[slot] = ordinal
        self._count += 1
        if self._count > self._room:
            self._grow()
        return None

    def _grow(self) -> None:
        old = zip(self._keys, self._ordinals, strict=True)
        self._allocate(int(self._size * _GROWTH) | 1)
        keys, size = self._keys, self._size
        for key, ordinal in old:
            if key:
                slot = (key >> 6) % size
                while keys[slot]:
                    slot = (slot + 1) % size
                keys[slot] = key
                self._ordinals[slot] = ordinal
