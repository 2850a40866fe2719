"""What a step gives to the target's forward: chunks of prompts and draft trees, packed in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attention import PackedRow
from .draft_tree import DraftTree
from .drafting import Draft
from .sequence import SequenceState
from .target import TargetBatch


@dataclass(slots=True)
class Verified:
    """A sequence that gets new tokens in this step: its tree, and where that begins among the
    step's logits and packed tokens."""

    sequence: SequenceState
    tree: DraftTree
    first_row: int
    first_token: int = 0
    drafts: Draft | None = None  # None: the last chunk of a prompt


def pack_prompts(batch: TargetBatch, chunks: Sequence[tuple[SequenceState, int]]) -> list[Verified]:
    """Add the next chunks of prompts; those that end in this step yield their first token."""
    ending = []
    for sequence, count in chunks:
        assert sequence.extent is not None
        start = sequence.num_cached
        last = count == sequence.num_pending
        first_row = batch.add(
            PackedRow(sequence.extent.start, start, count),
            sequence.tokens[start : start + count],
            range(start, start + count),
            logits_from=count - 1 if last else None,
        )
        if last:
            ending.append(Verified(sequence, DraftTree(sequence.tokens[-1]), first_row))
    return ending


def pack_tree(batch: TargetBatch, sequence: SequenceState, drafts: Draft) -> Verified:
    """Add a decoding sequence's tree, whose logits are wanted at every node."""
    assert sequence.extent is not None
    tree, past = drafts.tree, sequence.num_cached
    positions = [past + depth for depth in tree.depths]
    row = PackedRow(sequence.extent.start, past, len(tree))
    if not tree.is_chain:
        row.tree = tree.visibility()
        row.tail_positions = torch.tensor(positions)
    first_token = len(batch.token_ids)
    first_row = batch.add(row, tree.tokens, positions, logits_from=0)
    return Verified(sequence, tree, first_row, first_token, drafts)
