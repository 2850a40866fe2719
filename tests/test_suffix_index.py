"""The index behind `lookup`: it finds what a search by brute force finds."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whiflash_agents.engine.drafters.lookup import SuffixIndex, suffix_hashes

ORDERS = (16, 8, 4, 2)


def found_by_brute_force(text: list[int], tail: list[int]) -> list[tuple[int, int]]:
    """For each order, the last place where the tail's end occurs; the text's own end is none."""
    places: list[int] = []
    last = len(text) - 2  # nothing follows the last token yet
    for order in ORDERS:
        if order <= len(tail):
            ends = range(last, order - 2, -1)
            at = next((e for e in ends if text[e - order + 1 : e + 1] == tail[-order:]), None)
            if at is not None and at not in places:
                places.append(at)
    out = []
    for at in places:
        length = 0
        while length < min(at + 1, len(tail), 32) and text[at - length] == tail[-1 - length]:
            length += 1
        out.append((length, at + 1))
    return out


# Both sides of the length from which a piece is indexed in bulk.
lengths = st.lists(st.sampled_from([0, 1, 2, 17, 63, 64, 65, 90]), max_size=5)


@given(
    seed=st.integers(0, 10_000),
    words=st.integers(2, 5),
    lengths=lengths,
    tail=st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_matches_are_the_latest_places_of_the_longest_suffixes(
    seed: int, words: int, lengths: list[int], tail: list[int] | None
) -> None:
    index, text = SuffixIndex(), []
    draw = random.Random(seed)
    for length in lengths:
        piece = draw.choices(range(words), k=length)
        index.extend(piece)
        text += piece
    assert index.tokens == text
    end = text if tail is None else tail
    got = list(index.matches(suffix_hashes(end, len(end)), end))
    assert got == found_by_brute_force(text, end)


@given(seed=st.integers(0, 10_000), words=st.integers(2, 500), lengths=lengths)
def test_it_does_not_matter_in_how_many_pieces_a_text_came(
    seed: int, words: int, lengths: list[int]
) -> None:
    text = random.Random(seed).choices(range(words), k=sum(lengths))
    singly, pieces = SuffixIndex(), SuffixIndex()
    for token in text:
        singly.extend([token])
    for end in itertools.accumulate(lengths):
        pieces.extend(text[len(pieces) : end])
    assert singly.tokens == pieces.tokens
    assert singly._tables == pieces._tables


def test_a_hash_collision_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 5])
    tail = [7, 8]
    codes = dict(suffix_hashes([2, 3], 2))
    assert list(index.matches(list(codes.items()), tail)) == []
    assert list(index.matches(list(codes.items()), [2, 3])) == [(2, 3)]
