"""Handing rows out and bringing output back in input order, within bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from whiflash_agents.batch.order import RowOrder
from whiflash_agents.batch.plan import Row, TracePlan


def plans(lengths: list[int]) -> Iterator[TracePlan]:
    def rows(trace_id: str, count: int) -> Iterator[Row]:
        for turn in range(count):
            yield Row(f"{trace_id}#{turn}", trace_id, turn, [], [], None, 0)

    for number, count in enumerate(lengths):
        yield TracePlan(str(number), count, rows(str(number), count))


def ids(lengths: list[int]) -> list[str]:
    return [f"{number}#{turn}" for number, count in enumerate(lengths) for turn in range(count)]


def fill(order: RowOrder) -> list[str]:
    out = []
    while (row := order.next_row()) is not None:
        out.append(row.id)
    return out


def finish(order: RowOrder, row_id: str) -> list[str]:
    order.accept({"custom_id": row_id})
    return [output["custom_id"] for output in order.ready()]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    slots=st.integers(1, 5),
    factor=st.integers(1, 3),
    window=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_every_row_goes_out_once_and_comes_back_in_input_order(
    lengths: list[int], slots: int, factor: int, window: int, seed: int
) -> None:
    rng = random.Random(seed)
    order = RowOrder(plans(lengths), capacity=slots * factor, slots=slots, window=window)
    out: list[str] = []
    handed: list[str] = []
    written: list[str] = []
    while True:
        new = fill(order)
        handed += new
        out += new
        assert order.in_flight == len(out) <= slots * factor
        assert len(handed) - len(written) <= window
        if not out:
            break
        row_id = out.pop(rng.randrange(len(out)))
        written += finish(order, row_id)
    assert written == ids(lengths)
    assert sorted(handed) == sorted(written)
    for trace in range(len(lengths)):
        turns = [row_id for row_id in handed if row_id.startswith(f"{trace}#")]
        assert turns == [f"{trace}#{turn}" for turn in range(lengths[trace])]


def test_slots_are_filled_with_different_traces_before_a_second_turn_goes_out() -> None:
    order = RowOrder(plans([3, 3, 3]), capacity=4, slots=2)
    assert fill(order) == ["0#0", "1#0", "0#1", "1#1"]


def test_a_trace_goes_on_before_a_new_one_is_opened() -> None:
    order = RowOrder(plans([2, 2, 2]), capacity=2, slots=2)
    assert fill(order) == ["0#0", "1#0"]
    assert finish(order, "1#0") == []
    assert fill(order) == ["1#1"]
    assert finish(order, "1#1") == []
    assert fill(order) == ["2#0"]
    assert finish(order, "0#0") == ["0#0"]


def test_traces_of_one_turn_fill_the_whole_capacity() -> None:
    order = RowOrder(plans([1] * 9), capacity=6, slots=3)
    assert len(fill(order)) == 6


def test_long_first_trace_cannot_make_finished_rows_pile_up() -> None:
    order = RowOrder(plans([1] + [1] * 1000), capacity=4, slots=4, window=10)
    stuck = fill(order)[0]
    handed = 4
    for number in range(1, 1000):
        if number >= handed:
            break
        finish(order, f"{number}#0")
        handed += len(fill(order))
    assert handed == 10  # the window, however many rows could have been done meanwhile
    assert len(finish(order, stuck)) == 10


def test_leftovers_are_finished_rows_in_input_order() -> None:
    order = RowOrder(plans([1, 1, 1]), capacity=3, slots=3)
    fill(order)
    assert finish(order, "2#0") == finish(order, "1#0") == []
    leftovers: list[dict[str, Any]] = list(order.leftovers())
    assert [output["custom_id"] for output in leftovers] == ["1#0", "2#0"]
