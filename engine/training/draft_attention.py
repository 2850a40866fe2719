"""Attention of many drafts of one text at once: each sees rows of the text and rows of its own.

Training runs every draft that a text could have had in one forward. The rows that come from the
text are the same for all of them, so their keys and values are made once, and no draft ever sees
another: nothing is computed only to be masked, except text behind a draft's beginning.
"""

from __future__ import annotations

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]


def attend_drafts(
    query: Tensor,
    text: KeysValues,
    own: KeysValues,
    text_visible: Tensor,
    own_visible: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the text's rows and the draft's own, together.

    Args:
        query: `[drafts, slots, heads, head_dim]`.
        text: keys and values of the text's rows, each `[kv_heads, rows, head_dim]`.
        own: those of the drafts, each `[kv_heads, drafts, own rows, head_dim]`; there may be none.
        text_visible: bool, `[drafts, slots or 1, rows]`.
        own_visible: bool, `[slots, own rows]`; None for all.

    Returns:
        `[drafts, slots, heads * head_dim]`.
    """
    (keys, values), (own_keys, own_values) = text, own
    drafts, slots, _, dim = query.shape
    kv_heads, rows = keys.shape[:2]
    # [kv_heads, drafts, heads of each, slots, head_dim]
    grouped = (query * dim**-0.5).reshape(drafts, slots, kv_heads, -1, dim).permute(2, 0, 3, 1, 4)
    shape = grouped.shape[:-1]
    packed = grouped.flatten(1, 3)
    scores = (packed @ keys.mT).view(*shape, rows)
    scores = scores.masked_fill(~text_visible[None, :, None], -torch.inf)
    within = (grouped.flatten(2, 3) @ own_keys.mT).view(*shape, -1)
    if own_visible is not None:
        within = within.masked_fill(~own_visible, -torch.inf)
    weights = torch.cat((scores, within), dim=-1).softmax(-1)
    of_text, of_own = weights.split((rows, within.shape[-1]), dim=-1)
    attended = (of_text.flatten(1, 3) @ values).view(*shape, dim)
    attended = attended + (of_own.flatten(2, 3) @ own_values).view(*shape, dim)
    return attended.permute(1, 3, 0, 2, 4).flatten(2)
