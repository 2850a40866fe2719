"""Checking the maps between a drafter's reduced vocabulary and the target's.

`d2t` holds offsets (`target_id = draft_id + d2t[draft_id]`), `t2d` marks the target ids that are in
the draft vocabulary. A map that is off by one drafts wrong tokens and shows nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weights import Weights

_REMEDY = "the map is damaged or belongs to another target; fetch the checkpoint again"
_INTEGERS = (torch.int64, torch.int32, torch.int16)


def check_maps(weights: Weights, draft_vocab: int, vocab: int) -> None:
    """Check `d2t` and `t2d` as far as they are there, against each other as well.

    Where both vocabularies are the same, they may be there as the identity only, and `d2t` is
    dropped.

    Raises:
        CheckpointError: wrong shape or type, target ids out of range or taken twice, or a `t2d`
            that marks others.
    """
    d2t = weights.tensors.get("d2t")
    t2d = weights.tensors.get("t2d")
    if d2t is not None:
        _check_form(weights, "d2t", d2t, draft_vocab)
        if d2t.dtype not in _INTEGERS:
            raise weights.error("d2t", f"is of type {_type(d2t)}, expected int64", _REMEDY)
        _check_range(weights, d2t, vocab)
    if t2d is not None:
        _check_form(weights, "t2d", t2d, vocab)
        if t2d.is_floating_point():
            raise weights.error("t2d", f"is of type {_type(t2d)}, expected bool", _REMEDY)
        marked = t2d.bool()
        count = int(marked.sum())
        if count != draft_vocab:
            raise weights.error(
                "t2d",
                f"marks {count} tokens, expected {draft_vocab}, as many as are drafted",
                _REMEDY,
            )
        if d2t is not None and not bool(marked[target_ids(d2t)].all()):
            wrong = target_ids(d2t)
            first = int(wrong[~marked[wrong]][0])
            raise weights.error("t2d", f"does not mark token {first}, which d2t maps to", _REMEDY)
    if draft_vocab == vocab and d2t is not None:
        if bool(d2t.any()):
            raise weights.error(
                "d2t", "is not all zero, although nothing is left out of the vocabulary", _REMEDY
            )
        del weights.tensors["d2t"]


def target_ids(d2t: Tensor) -> Tensor:
    """`[draft_vocab]` offsets -> target id of each draft id, int64."""
    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def _check_form(weights: Weights, name: str, tensor: Tensor, size: int) -> None:
    if list(tensor.shape) != [size]:
        raise weights.error(name, f"has shape {list(tensor.shape)}, expected {[size]}", _REMEDY)


def _check_range(weights: Weights, d2t: Tensor, vocab: int) -> None:
    ids = target_ids(d2t)
    outside = ((ids < 0) | (ids >= vocab)).nonzero().flatten()
    if len(outside):
        draft = int(outside[0])
        raise weights.error(
            "d2t",
            f"maps draft id {draft} to {int(ids[draft])}, expected a token from 0 to {vocab - 1} "
            "(d2t holds offsets)",
            _REMEDY,
        )
    known, counts = ids.unique(return_counts=True)
    if len(known) < len(ids):
        twice = int(known[counts > 1][0])
        raise weights.error("d2t", f"maps several draft ids to token {twice}", _REMEDY)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
