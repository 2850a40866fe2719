"""Attention of packed rows over the KV arena, called by the target's own layers.

A forward packs the new tokens of all sequences into one row `[1, tokens]`: projections and MLPs run
over exactly these tokens, nothing is padded. Attention then runs per sequence over a view of its
extent, which makes its arithmetic independent of who else is in the batch. transformers calls
`attend` through its attention registry, with the `AttentionPlan` of the forward as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .errors import UnsupportedTargetError
from .kv_cache import KVCache

# Name in transformers' registry; with "flash" in it, it would mean a kernel of the hub.
NAME = "kv_arena"

# Up to this many query rows, the query heads that share a key head are stacked as further rows
# (measured on CPU: 1.3 to 2 times faster than enable_gqa there, slower above).
_FOLD_ROWS = 32

# Arguments that change the arithmetic of attention and that `attend` does not implement.
_REFUSED = ("softcap", "s_aux", "position_bias")


@dataclass(slots=True)
class PackedRow:
    """One sequence's share of a forward.

    Attributes:
        start: first arena position of the sequence's extent.
        past: positions before this row's tokens.
        count: new tokens; they occupy arena positions `start + past ...` in order.
        tree: bool visibility `[count, m]` over the last m positions, m >= count, of which all
            before are visible; None for a chain. The target verifies a tree at once (m == count);
            a drafter grows one level by level, below the levels before.
        tail_positions: `[m]`, the positions of those, for a tree (sliding windows need them).
        causal: False lets all new tokens see one another (a drafter's block).
    """

    start: int
    past: int
    count: int
    tree: Tensor | None = None
    tail_positions: Tensor | None = None
    causal: bool = True
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.past + self.count

    def visible(self, window: int | None) -> Tensor | None:
        """What the new tokens see, bool `[count, length]`; None when they see everything."""
        if not self.causal and self.tree is None:
            return None
        visible = torch.ones(self.count, self.length, dtype=torch.bool)
        if self.tree is None:
            visible[:, self.past :].tril_()
        else:
            visible[:, self.length - self.tree.shape[1] :] = self.tree
        if window is not None:
            tail = self.tail_positions
            if tail is None:
                tail = torch.arange(self.past, self.length)
            keys = torch.cat((torch.arange(self.length - len(tail)), tail))
            visible &= tail[-self.count :, None] - keys[None, :] < window
        return visible

    def mask(self, window: int | None, tile: int, dtype: torch.dtype, device: Any) -> Tensor | None:
        """Additive mask `[tile * count, length]`, built once per forward and window size; None
        when nothing is hidden."""
        key = (window, tile)
        if key not in self.masks:
            visible = self.visible(window)
            mask = None
            if visible is not None:
                mask = torch.zeros(visible.shape, dtype=dtype)
                mask.masked_fill_(~visible, float("-inf"))
                mask = mask.repeat(tile, 1).to(device)
            self.masks[key] = mask
        return self.masks[key]


@dataclass(slots=True)
class AttentionPlan:
    """Where the packed tokens of one forward go, and what each sequence sees.

    `targets` is the arena position of every packed token, `[tokens]`; None when there is one row,
    whose positions are a slice.
    """

    cache: KVCache
    rows: Sequence[PackedRow]
    targets: Tensor | None


@dataclass(slots=True)
class Probe:
    """Stands in for a plan on a model's first forward and records what its layers ask for."""

    layers: dict[int, LayerShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    key_dim: int
    value_dim: int


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    whiflash: AttentionPlan | Probe | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it.

    Args:
        query: `[1, heads, tokens, head_dim]`; key, value: `[1, kv_heads, tokens, head_dim]`, new.
        whiflash: the plan of this forward.

    Returns:
        `[1, tokens, heads, head_dim]` and no attention weights.

    Raises:
        UnsupportedTargetError: the layer asks for arithmetic that is not implemented here.
    """
    if whiflash is None:
        raise UnsupportedTargetError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, so its "
            "KV cache cannot be managed; use a target whose attention does (Llama, Qwen, Mistral)"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(whiflash, Probe):
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise UnsupportedTargetError(
                    f"{type(module).__name__} asks for attention with {name!r}, which is not "
                    "supported; use a target without it"
                )
        whiflash.layers[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    keys, values = whiflash.cache.keys[layer], whiflash.cache.values[layer]
    if whiflash.targets is None:
        row = whiflash.rows[0]
        keys.narrow(1, row.start + row.past, row.count).copy_(key[0])
        values.narrow(1, row.start + row.past, row.count).copy_(value[0])
        return attend_rows(query, keys, values, whiflash.rows, scaling, sliding_window), None

    keys.index_copy_(1, whiflash.targets, key[0])
    values.index_copy_(1, whiflash.targets, value[0])
    return attend_rows(query, keys, values, whiflash.rows, scaling, sliding_window), None


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Sequence[PackedRow],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of packed tokens, each row over its own sequence.

    Args:
        query: `[1, heads, tokens, head_dim]`, the rows' tokens in order.
        keys, values: `[kv_heads, positions, head_dim]` of the arena, new ones included.
        window: positions that a token sees, itself included; None for all.

    Returns:
        `[1, tokens, heads, head_dim]`.
    """
    if len(rows) == 1:
        return _attend_row(query, keys, values, rows[0], scaling, window)
    out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    offset = 0
    for row in rows:
        part = query.narrow(2, offset, row.count)
        out.narrow(1, offset, row.count).copy_(
            _attend_row(part, keys, values, row, scaling, window)
        )
        offset += row.count
    return out


def _attend_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row: PackedRow,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """`[1, heads, count, dim]` over one sequence -> `[1, count, heads, dim]`."""
    _, heads, count, dim = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    first, length = row.start, row.length
    if window is not None and count == 1 and row.tree is None and length > window:
        first, length = first + length - window, window  # what the window hides is never read
        window = None
    k = keys.narrow(1, first, length).unsqueeze(0)
    v = values.narrow(1, first, length).unsqueeze(0)
    masked_window = window if window is not None and row.length > window else None

    if count == 1 and row.tree is None:
        folded = query.reshape(1, kv_heads, groups, dim)
        return scaled_dot_product_attention(folded, k, v, scale=scaling).view(1, 1, heads, dim)
    if row.past == 0 and row.causal and row.tree is None and masked_window is None:
        out = scaled_dot_product_attention(
            query, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2)
    if count <= _FOLD_ROWS:
        folded = query.reshape(1, kv_heads, groups * count, dim)
        mask = row.mask(masked_window, groups, query.dtype, query.device)
        out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
        return out.view(1, heads, count, dim).transpose(1, 2)
    mask = row.mask(masked_window, 1, query.dtype, query.device)
    out = scaled_dot_product_attention(
        query, k, v, attn_mask=mask, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)
