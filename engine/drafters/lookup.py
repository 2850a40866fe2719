"""The `lookup` drafter: retrieval of what followed the same words before.

Sources, per sequence: its prompt and own output, the recorded turn of the trace being replayed,
and rows that finished earlier in the run. Each source is a `SuffixIndex`; the longest suffix of the
sequence that occurs in a source says where to copy from. No model is involved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from ..draft_tree import DraftTree
from ..errors import SettingsError
from ..sequence import SequenceState
from .base import DraftLimit

_ORDERS = (16, 8, 4, 2)  # suffix lengths that are indexed, longest first; powers of two
_SEPARATOR = -1  # between the rows of the shared index; no draft crosses it
_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that powers stay invertible mod 2**64
_POWERS = {order: pow(_BASE, order, 1 << 64) for order in (1, 2, 4, 8)}
_BULK = 64  # tokens from which hashing them with numpy is faster
_LONGEST = 32  # a suffix match is measured up to this length


class SuffixIndex:
    """Where each suffix of the indexed orders last ended, in a text that only grows.

    Each order keeps a table from the hash of that many tokens to the position of the last of them.
    Adding a token and finding a match take constant time, whatever the length of the text. Hashes
    are checked against the tokens, so a collision costs a draft and never a wrong length.
    """

    __slots__ = ("_tables", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._tables: dict[int, dict[int, int]] = {order: {} for order in _ORDERS}

    def __len__(self) -> int:
        return len(self.tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> SuffixIndex:
        copied = SuffixIndex()
        copied.tokens = self.tokens.copy()
        copied._tables = {order: table.copy() for order, table in self._tables.items()}
        return copied

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`, keeping for each suffix its latest position.

        The last token is indexed with the next call: nothing follows it yet, and so the end of a
        text finds its earlier occurrence rather than itself.
        """
        start = max(0, len(self.tokens) - 1)
        self.tokens.extend(tokens)
        if len(tokens) >= _BULK:
            self._index_bulk(start)
        else:
            for end in range(start + 1, len(self.tokens)):
                for order, code in suffix_hashes(self.tokens, end):
                    self._tables[order][code] = end - 1

    def _index_bulk(self, start: int) -> None:
        first = max(0, start - _ORDERS[0])  # context that the first new suffixes reach back to
        text = np.asarray(self.tokens[first:-1], dtype=np.int64).astype(np.uint64)
        codes = (text + np.uint64(1)) * np.uint64(_BASE)
        order = 1
        while order < _ORDERS[0]:
            # The hash of 2n tokens ending at i is that of n ending at i plus that of the n before.
            longer = codes[order:] + codes[:-order] * np.uint64(_POWERS[order])
            order *= 2
            codes = longer
            if not len(codes):
                break
            ends = range(first + order - 1, first + order - 1 + len(codes))
            skip = max(0, start - ends.start)
            self._tables[order].update(zip(codes[skip:].tolist(), ends[skip:], strict=True))

    def matches(
        self, hashes: Sequence[tuple[int, int]], tail: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Places where the end of `tail` occurs: (length of the match, index after it).

        One place per order at most, longest orders first. `hashes` are `suffix_hashes` of `tail`.
        """
        seen: set[int] = set()
        for order, code in hashes:
            at = self._tables[order].get(code)
            if at is None or at in seen:
                continue
            seen.add(at)
            length = 0
            reach = min(at + 1, len(tail), _LONGEST)
            while length < reach and self.tokens[at - length] == tail[-1 - length]:
                length += 1
            if length >= order:
                yield length, at + 1


def suffix_hashes(tokens: Sequence[int], end: int) -> list[tuple[int, int]]:
    """(order, hash) of the suffixes of `tokens[:end]`, longest order first."""
    codes = []
    code, factor, length = 0, 1, 0
    for order in reversed(_ORDERS):
        if order > end:
            break
        while length < order:
            code += (tokens[end - 1 - length] + 1) * _BASE * factor
            factor = factor * _BASE & _MASK
            length += 1
        code &= _MASK
        codes.append((order, code))
    codes.reverse()
    return codes


@dataclass(frozen=True, slots=True)
class _Match:
    """The end of a sequence occurs in `source`, over `length` tokens; what followed stands from
    `after` on. Nearer sources have a lower `rank`."""

    length: int
    rank: int
    source: SuffixIndex
    after: int


@dataclass(slots=True)
class _State:
    """One sequence: its own text, the recorded turn behind the prompt's end, and how drafts fared.

    `length` is the current draft length: doubled after a draft that was accepted whole, halved
    after one that was mostly rejected. `matches` are those behind `matched_at` tokens.
    """

    own: SuffixIndex
    recorded: SuffixIndex | None
    length: int
    drafted: list[int]
    drafted_at: int = -1
    matches: list[_Match] = field(default_factory=list)
    matched_at: int = -1


class LookupDrafter:
    """Longest-suffix retrieval, as a chain (`width=1`) or as a tree of up to `width` alternatives.

    Args:
        max_tokens: longest path proposed.
        width: alternatives merged into one tree, best first.
        shared_tokens: capacity of the index over finished rows; 0 switches it off. It is kept in
            two halves, and the older one is dropped when the younger is full, so its memory is
            bounded (about 400 bytes a token).
    """

    name = "lookup"

    def __init__(
        self, *, max_tokens: int = 32, width: int = 1, shared_tokens: int = 131_072
    ) -> None:
        if max_tokens < 1 or width < 1 or shared_tokens < 0:
            raise SettingsError(
                f"lookup: max_tokens={max_tokens}, width={width}, shared_tokens={shared_tokens}; "
                "expected max_tokens and width of at least 1 and shared_tokens of at least 0"
            )
        self.max_tokens = max_tokens
        self.width = width
        self.shared_tokens = shared_tokens
        self._states: dict[str, _State] = {}
        self._young = SuffixIndex()
        self._old = SuffixIndex()
        self._borrowed = False  # whether a copy has the same index of finished rows

    def __deepcopy__(self, memo: dict[int, Any]) -> LookupDrafter:
        """A drafter that goes its own way from here. The index of finished rows, which is large and
        grows between rows only, is copied when one of the two closes a row."""
        copied = LookupDrafter(
            max_tokens=self.max_tokens, width=self.width, shared_tokens=self.shared_tokens
        )
        for state in self._states.values():
            state.matches, state.matched_at = [], -1  # they may point to the shared index
        copied._states = copy.deepcopy(self._states, memo)
        copied._young, copied._old = self._young, self._old
        self._borrowed = copied._borrowed = True
        return copied

    # Life of a sequence ----------------------------------------------------------------------

    def open(self, sequence: SequenceState) -> None:
        recorded = None
        if recorded_ids := list(map(index, sequence.request.recorded_ids)):
            recorded = SuffixIndex()
            tail = slice(max(0, sequence.num_prompt - _LONGEST), sequence.num_prompt)
            recorded.extend(sequence.tokens[tail])
            recorded.extend(recorded_ids)
        self._states[sequence.id] = _State(SuffixIndex(), recorded, min(8, self.max_tokens), [])

    def close(self, sequence: SequenceState) -> None:
        del self._states[sequence.id]
        if self.shared_tokens and sequence.num_output:
            half = self.shared_tokens // 2
            row = sequence.tokens[max(0, sequence.num_prompt - _LONGEST) :]
            row = [_SEPARATOR, *row][:half]
            if len(self._young) + len(row) > half:
                self._old, self._young = self._young, SuffixIndex()
            elif self._borrowed:
                self._young = copy.deepcopy(self._young)
            self._borrowed = False
            self._young.extend(row)

    def backlog(self, sequence: SequenceState) -> int:
        return len(sequence.tokens) - len(self._states[sequence.id].own)

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            state = self._states[sequence.id]
            state.own.extend(sequence.tokens[len(state.own) :])
            self._adapt(state, sequence)

    def _adapt(self, state: _State, sequence: SequenceState) -> None:
        if not state.drafted:
            return
        came = sequence.tokens[state.drafted_at : state.drafted_at + len(state.drafted)]
        accepted = 0
        while accepted < len(came) and came[accepted] == state.drafted[accepted]:
            accepted += 1
        if accepted == len(state.drafted):
            state.length = min(self.max_tokens, state.length * 2)
        elif accepted * 2 < len(state.drafted):
            state.length = max(2, state.length // 2)
        state.drafted = []

    # Drafting --------------------------------------------------------------------------------

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        return [self._draft(s, limit) for s, limit in zip(sequences, limits, strict=True)]

    def _draft(self, sequence: SequenceState, limit: DraftLimit) -> DraftTree:
        state = self._states[sequence.id]
        tree = DraftTree(sequence.tokens[-1])
        depth = min(limit.depth, self.max_tokens)
        if depth < 1 or limit.nodes < 1:
            return tree
        paths = self._continuations(state, sequence.tokens, depth)
        if not paths:
            return tree
        best = paths[0][: limit.nodes]
        for path in paths[: self.width]:
            tree.add_path(path, max_nodes=limit.nodes + 1)
        state.drafted, state.drafted_at = best, len(sequence.tokens)
        return tree

    def evidence(self, sequence: SequenceState) -> int:
        """How much speaks for the draft that the sequence would get now: 0 if there is none, else
        the bits of the length of its match (2 for 2 or 3 tokens, 3 for 4 to 7, up to 6)."""
        self.catch_up([sequence])
        state = self._states[sequence.id]
        for match in self._matches(state, sequence.tokens):
            if self._path(match, state, 1):
                return match.length.bit_length()
        return 0

    def _continuations(self, state: _State, tokens: list[int], depth: int) -> list[list[int]]:
        """What followed each match, best first."""
        paths = []
        for match in self._matches(state, tokens):
            # A short match is weak evidence, so its draft is short whatever went well before.
            path = self._path(match, state, min(depth, state.length, 2 + 2 * match.length))
            if path:
                paths.append(path)
        return paths

    def _matches(self, state: _State, tokens: list[int]) -> list[_Match]:
        """Where the end of the text occurs: longest match first, then the nearer source."""
        if state.matched_at == len(tokens):
            return state.matches
        hashes = suffix_hashes(tokens, len(tokens))
        sources = [s for s in (state.recorded, state.own, self._young, self._old) if s]
        found: list[_Match] = []
        for rank, source in enumerate(sources):
            for length, after in source.matches(hashes, tokens):
                found.append(_Match(length, rank, source, after))
                if self.width == 1:
                    break  # only the longest of a source can win
        found.sort(key=lambda match: (-match.length, match.rank))
        state.matches, state.matched_at = found[: self.width], len(tokens)
        return state.matches

    def _path(self, match: _Match, state: _State, reach: int) -> list[int]:
        """What followed the match, up to `reach` tokens."""
        source = match.source
        path = source.tokens[match.after : match.after + reach]
        if source is state.own and len(path) < reach:
            # The match overlaps the end: the text repeats itself, with this period.
            path = (path * (reach // len(path) + 1))[:reach]
        if _SEPARATOR in path:
            path = path[: path.index(_SEPARATOR)]
        return path
