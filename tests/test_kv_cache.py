"""The KV arena against a plain-Python model: no operation loses, mixes or overlaps data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from whiflash_agents.engine.kv_cache import GRANULE, Extent, KVCache, PlaneShape

LAYERS, HEADS, DIM = 2, 2, 3
BESIDE = PlaneShape(1, 1, 5)  # a drafter's
SHAPE = PlaneShape(LAYERS, HEADS, DIM)
# Tells layers, heads and dimensions apart, so that none of them can be swapped unnoticed.
PATTERN = torch.arange(LAYERS * HEADS * DIM).view(LAYERS, HEADS, 1, DIM) / 16


def arena(positions: int) -> KVCache:
    return KVCache(
        SHAPE, positions=positions, dtype=torch.float32, device=torch.device("cpu"), beside=[BESIDE]
    )


def write(cache: KVCache, position: int, values: list[int]) -> None:
    """Write as a forward does, through the views of each layer."""
    column = torch.tensor(values, dtype=torch.float32).view(1, -1, 1)
    for layer in range(LAYERS):
        keys = cache.keys[layer].narrow(1, position, len(values))
        keys.copy_(column + PATTERN[layer])
        cache.values[layer].narrow(1, position, len(values)).copy_(-(column + PATTERN[layer]))


def read(cache: KVCache, position: int, count: int) -> list[int | None]:
    """The value written at each position; None where the parts do not agree on one."""
    keys = torch.stack([k.narrow(1, position, count) for k in cache.keys]) - PATTERN
    values = -torch.stack([v.narrow(1, position, count) for v in cache.values]) - PATTERN
    both = torch.cat((keys, values)).permute(2, 0, 1, 3).reshape(count, -1)
    agreed = (both == both[:, :1]).all(1).tolist()
    first = both[:, 0].tolist()
    return [int(v) if same else None for v, same in zip(first, agreed, strict=True)]


def round_up(positions: int) -> int:
    while positions % GRANULE:
        positions += 1
    return positions


class ArenaMachine(RuleBasedStateMachine):
    """Random operations; `content` is what each extent's positions must read (None: anything)."""

    extents = Bundle("extents")

    @initialize(
        target=extents,
        granules=st.integers(1, 9),
        extra=st.integers(0, GRANULE - 1),
        sizes=st.lists(st.integers(1, 3 * GRANULE), max_size=7),
    )
    def start(self, granules: int, extra: int, sizes: list[int]) -> object:
        self.size = granules * GRANULE
        self.cache = arena(self.size + extra)
        for data in self.cache._arenas:
            data.fill_(torch.nan)
        self.content: dict[Extent, list[int | None]] = {}
        self.next_value = 0
        for positions in sizes:
            extent = self.allocate_first_fit(positions)
            if extent is not None:
                self.write(extent, 0, extent.capacity)
        return multiple(*self.content)

    def allocate_first_fit(self, positions: int) -> Extent | None:
        capacity, taken = round_up(positions), self.taken()
        gaps = (s for s in range(self.size - capacity + 1) if not any(taken[s : s + capacity]))
        wanted = next(gaps, None)
        extent = self.cache.allocate(positions)
        if extent is None:
            assert wanted is None, f"a gap at {wanted} was not found"
            return None
        assert (extent.start, extent.capacity) == (wanted, capacity)
        self.content[extent] = [None] * capacity
        return extent

    def write(self, extent: Extent, start: int, count: int) -> None:
        values = list(range(self.next_value, self.next_value + count))
        self.next_value += count
        write(self.cache, extent.start + start, values)
        self.content[extent][start : start + count] = values

    def taken(self, *, without: Extent | None = None) -> list[bool]:
        taken = [False] * self.size
        for extent in self.content:
            if extent is not without:
                for position in range(extent.start, extent.end):
                    taken[position] = True
        return taken

    @rule(target=extents, positions=st.integers(1, 4 * GRANULE))
    def allocate(self, positions: int) -> object:
        extent = self.allocate_first_fit(positions)
        return multiple() if extent is None else extent

    @rule(extent=extents, positions=st.integers(1, 5 * GRANULE))
    def grow(self, extent: Extent, positions: int) -> None:
        before = (extent.start, extent.capacity)
        capacity = max(extent.capacity, round_up(positions))
        end = extent.start + capacity
        fits = end <= self.size and not any(self.taken(without=extent)[extent.start : end])
        assert self.cache.grow(extent, positions) == fits
        assert (extent.start, extent.capacity) == ((before[0], capacity) if fits else before)
        self.content[extent] += [None] * (extent.capacity - before[1])

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        self.cache.free(extent)
        del self.content[extent]
        with pytest.raises(KeyError, match="not allocated"):
            self.cache.free(extent)

    @rule(extent=extents, data=st.data())
    def fill(self, extent: Extent, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, extent.capacity - 1))
        self.write(extent, start, data.draw(st.integers(1, extent.capacity - start)))

    @rule(source=extents, copy=extents, data=st.data())
    def copy(self, source: Extent, copy: Extent, data: st.DataObject) -> None:
        if source is copy:
            return
        end = data.draw(st.integers(0, min(source.capacity, copy.capacity)))
        start = data.draw(st.integers(0, end))
        self.cache.copy(source, copy, start, end)
        self.content[copy][start:end] = self.content[source][start:end]

    @rule(extent=extents, data=st.data())
    def commit(self, extent: Extent, data: st.DataObject) -> None:
        nodes = data.draw(st.integers(1, min(20, extent.capacity)))
        length = data.draw(st.integers(0, extent.capacity - nodes))
        path = [0] + [n for n in range(1, nodes) if data.draw(st.booleans())]
        self.cache.commit(extent, length, path)
        before = list(self.content[extent])
        for index, node in enumerate(path):
            self.content[extent][length + index] = before[length + node]

    @rule(data=st.data())
    def defragment(self, data: st.DataObject) -> None:
        lengths = {
            id(e): data.draw(st.just(e.capacity) | st.integers(0, e.capacity)) for e in self.content
        }
        order = sorted(self.content, key=lambda e: e.start)
        last = data.draw(st.sampled_from([None, *order]))
        if last is not None:
            order.remove(last)
            order.append(last)
        capacities = [e.capacity for e in order]
        self.cache.defragment(lengths, last=last)
        for extent, content in self.content.items():
            length = lengths[id(extent)]
            content[length:] = [None] * (len(content) - length)
        cursor = 0
        for extent, capacity in zip(order, capacities, strict=True):
            assert (extent.start, extent.capacity) == (cursor, capacity)
            cursor += capacity
        rest = self.size - cursor
        if last is not None and rest:
            assert self.cache.grow(last, last.capacity + rest)  # the gap is behind it
            self.content[last] += [None] * rest

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "content"):
            return
        covered = 0
        for extent, content in self.content.items():
            assert extent.capacity == len(content)
            assert extent.capacity % GRANULE == 0
            assert extent.start % GRANULE == 0
            covered += extent.capacity
            got = read(self.cache, extent.start, extent.capacity)
            assert all(w is None or g == w for g, w in zip(got, content, strict=True))
        assert covered == sum(self.taken()), "extents overlap"
        assert self.cache.free_positions == self.size - covered


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def allocated(cache: KVCache) -> Extent:
    extent = cache.allocate(GRANULE)
    assert extent is not None
    return extent


def test_arena_is_as_large_as_whole_granules_allow() -> None:
    assert arena(3 * GRANULE + GRANULE - 1).positions == 3 * GRANULE


def test_bytes_per_position_is_what_the_arena_takes() -> None:
    cache = arena(2 * GRANULE)
    taken = sum(t.nbytes for t in (*cache.keys, *cache.values))
    one = SHAPE.bytes_per_position(torch.float32)
    assert taken == 2 * GRANULE * one


def test_extent_grows_in_place_until_its_neighbour_is_in_the_way() -> None:
    cache = arena(6 * GRANULE)
    first, second, third = (allocated(cache) for _ in range(3))
    assert not cache.grow(first, GRANULE + 1)
    cache.free(second)
    assert cache.grow(first, GRANULE + 1)
    assert (first.start, first.end) == (0, third.start)
    assert cache.grow(third, 4 * GRANULE)
    assert not cache.grow(third, 4 * GRANULE + 1)


def test_a_gap_of_exactly_the_right_width_is_used() -> None:
    cache = arena(6 * GRANULE)
    first, middle, last = (allocated(cache) for _ in range(3))
    cache.free(middle)
    again = cache.allocate(GRANULE)
    assert again is not None
    assert (again.start, again.end) == (first.end, last.start)


def test_data_longer_than_the_way_it_moves_arrives_whole() -> None:
    cache = arena(6 * GRANULE)
    gap = allocated(cache)
    extent = cache.allocate(5 * GRANULE)
    assert extent is not None
    values = list(range(5 * GRANULE))
    write(cache, extent.start, values)
    cache.free(gap)
    cache.defragment({id(extent): len(values)})
    assert extent.start == 0
    assert read(cache, 0, len(values)) == values


def test_committing_a_path_that_is_already_contiguous_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = arena(GRANULE)
    extent = allocated(cache)
    write(cache, 0, list(range(GRANULE)))
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    monkeypatch.setattr(torch.Tensor, "index_select", None)
    cache.commit(extent, 10, [0, 1, 2, 3])
    cache.commit(extent, 10, [0])
    with pytest.raises(TypeError):
        cache.commit(extent, 10, [0, 2])


def test_defragmenting_refuses_to_forget_an_extent() -> None:
    cache = arena(4 * GRANULE)
    gap, _ = allocated(cache), allocated(cache)
    cache.free(gap)
    with pytest.raises(KeyError):
        cache.defragment({})
