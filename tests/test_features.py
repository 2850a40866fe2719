"""The feature buffer: target features by position, in chunks, freed once they were read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whiflash_agents.engine.features import FeatureBuffer, stack

LAYERS, HIDDEN = (1, 4, 9), 2


def rows(start: int, count: int) -> torch.Tensor:
    """`[count, layers, hidden]`; a value tells its position, layer and entry."""
    positions = torch.arange(start, start + count)[:, None, None] * 100.0
    layers = torch.tensor(LAYERS)[None, :, None] * 10.0
    return positions + layers + torch.arange(HIDDEN)


def filled(*counts: int, start: int = 0) -> FeatureBuffer:
    buffer = FeatureBuffer(LAYERS, start)
    for count in counts:
        buffer.append(rows(buffer.end, count))
    return buffer


def test_layers_are_stacked_in_the_order_asked_for() -> None:
    features = {layer: torch.full((3, HIDDEN), float(layer)) for layer in (9, 1, 4)}
    stacked = stack(features, LAYERS)
    assert stacked.shape == (3, 3, HIDDEN)
    assert stacked[0, :, 0].tolist() == [1.0, 4.0, 9.0]


@pytest.mark.parametrize(("start", "end"), [(0, 9), (0, 1), (8, 9), (1, 3), (2, 6), (3, 4), (5, 6)])
def test_positions_are_read_across_chunks(start: int, end: int) -> None:
    buffer = filled(2, 3, 1, 3)
    assert (buffer.start, buffer.end) == (0, 9)
    got = buffer.read(start, end, LAYERS)
    assert torch.equal(got, rows(start, end - start).flatten(1))


def test_layers_are_read_side_by_side_in_the_readers_order() -> None:
    buffer = filled(2, 2)
    for layers in [(1,), (9, 1), (4, 9), (9, 4, 1), (4, 4)]:
        got = buffer.read(1, 4, layers)
        assert got.shape == (3, len(layers) * HIDDEN)
        wanted = rows(1, 3)[:, [LAYERS.index(layer) for layer in layers]].flatten(1)
        assert torch.equal(got, wanted)


def test_positions_begin_where_the_reused_prefix_ends() -> None:
    buffer = filled(4, start=70)
    assert torch.equal(buffer.read(71, 73, LAYERS), rows(71, 2).flatten(1))
    with pytest.raises(IndexError, match="positions 0 to 3 were asked for"):
        buffer.read(0, 4, LAYERS)


@pytest.mark.parametrize(("start", "end"), [(2, 5), (3, 10), (5, 5), (6, 5), (9, 10), (-1, 4)])
def test_freed_and_coming_positions_are_refused(start: int, end: int) -> None:
    buffer = filled(4, 5)
    buffer.release(3)
    with pytest.raises(IndexError, match="the buffer holds 3 to 8"):
        buffer.read(start, end, LAYERS)


def test_nothing_can_be_read_from_an_empty_buffer() -> None:
    buffer = filled(3)
    buffer.append(rows(3, 0))
    assert buffer.end == 3
    buffer.release(3)
    assert (buffer.start, buffer.end, buffer.nbytes) == (3, 3, 0)
    with pytest.raises(IndexError):
        buffer.read(3, 4, LAYERS)


def test_memory_falls_when_a_chunk_was_read() -> None:
    buffer = filled(4, 5, 6)
    each = len(LAYERS) * HIDDEN * 4
    assert buffer.nbytes == 15 * each
    buffer.release(4)
    assert buffer.nbytes == 11 * each
    buffer.release(8)  # in the middle of a chunk, which stays as a whole
    assert buffer.nbytes == 11 * each
    buffer.release(9)
    assert buffer.nbytes == 6 * each
    buffer.release(99)
    assert buffer.nbytes == 0
    assert (buffer.start, buffer.end) == (15, 15)


def test_memory_counts_what_a_view_keeps_alive() -> None:
    buffer = FeatureBuffer(LAYERS, 0)
    buffer.append(rows(0, 100)[:2])
    assert buffer.nbytes == 100 * len(LAYERS) * HIDDEN * 4


def test_what_was_read_outlives_its_release() -> None:
    buffer = filled(3, 3)
    got = buffer.read(1, 5, (4, 1))
    wanted = got.clone()
    buffer.release(6)
    buffer.append(rows(6, 3))
    assert torch.equal(got, wanted)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 5)),
        st.tuples(st.just("release"), st.integers(0, 30)),
        st.tuples(st.just("read"), st.integers(-1, 30), st.integers(-1, 30)),
    ),
    max_size=25,
)


@given(st.integers(0, 6), actions, st.permutations(LAYERS), st.integers(1, 3))
def test_the_buffer_is_a_list_whose_beginning_is_forgotten(
    start: int, todo: list[Any], order: list[int], count: int
) -> None:
    buffer = FeatureBuffer(LAYERS, start)
    model: dict[int, torch.Tensor] = {}
    coming, freed, layers = start, start, order[:count]
    for action, *args in todo:
        if action == "append":
            new = rows(coming, args[0])
            buffer.append(new)
            model |= {coming + i: row for i, row in enumerate(new)}
            coming += args[0]
        elif action == "release":
            buffer.release(args[0])
            freed = max(freed, min(args[0], coming))
            model = {at: row for at, row in model.items() if at >= freed}
        else:
            first, end = args
            if freed <= first < end <= coming:
                wanted = torch.stack([model[at] for at in range(first, end)])
                index = [LAYERS.index(layer) for layer in layers]
                assert torch.equal(buffer.read(first, end, layers), wanted[:, index].flatten(1))
            else:
                with pytest.raises(IndexError):
                    buffer.read(first, end, layers)
        assert (buffer.start, buffer.end) == (freed, coming)
        assert (buffer.nbytes == 0) == (freed == coming)
