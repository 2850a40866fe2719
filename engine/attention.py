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
        past: committed positions before this row's tokens.
        count: new tokens; they occupy arena positions `start + past ...` in order.
        tree: `[count, count]` bool visibility among the new tokens, or None for a chain.
        positions: position of each new token, for a tree (sliding windows need them).
    """

    start: int
    past: int
    count: int
    tree: Tensor | None = None
    positions: Tensor | None = None
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.past + self.count

    def mask(self, window: int | None, tile: int, dtype: torch.dtype, device: Any) -> Tensor:
        """Additive mask `[tile * count, length]`, built once per forward and window size."""
        key = (window, tile)
        mask = self.masks.get(key)
        if mask is None:
            visible = torch.ones(self.count, self.length, dtype=torch.bool)
            if self.tree is None:
                visible[:, self.past :].tril_()
            else:
                visible[:, self.past :] = self.tree
            if window is not None:
                queries = self._positions()
                keys = torch.cat((torch.arange(self.past), queries))
                visible &= queries[:, None] - keys[None, :] < window
            mask = torch.zeros(visible.shape, dtype=dtype)
            mask.masked_fill_(~visible, float("-inf"))
            mask = mask.repeat(tile, 1).to(device)
            self.masks[key] = mask
        return mask

    def _positions(self) -> Tensor:
        if self.positions is not None:
            return self.positions
        return torch.arange(self.past, self.length)


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
        return _attend_row(query, keys, values, row, scaling, sliding_window), None

    keys.index_copy_(1, whiflash.targets, key[0])
    values.index_copy_(1, whiflash.targets, value[0])
    out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    offset = 0
    for row in whiflash.rows:
        part = query.narrow(2, offset, row.count)
        out.narrow(1, offset, row.count).copy_(
            _attend_row(part, keys, values, row, scaling, sliding_window)
        )
        offset += row.count
    return out, None


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
    if window is not None and count == 1 and length > window:
        first, length = first + length - window, window  # what the window hides is never read
        window = None
    k = keys.narrow(1, first, length).unsqueeze(0)
    v = values.narrow(1, first, length).unsqueeze(0)
    masked_window = window if window is not None and row.length > window else None

    if count == 1:
        folded = query.reshape(1, kv_heads, groups, dim)
        return scaled_dot_product_attention(folded, k, v, scale=scaling).view(1, 1, heads, dim)
    if row.past == 0 and row.tree is None and masked_window is None:
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
