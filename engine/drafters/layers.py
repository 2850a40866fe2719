"""Decoder-layer parts that both neural drafters are built of: rotary embedding, attention, MLP.

Packed like the target: `[tokens, hidden]` for the tokens of all sequences together, so projections
and MLPs never see padding. Attention itself is left to whoever knows where keys and values live: a
drafter reads the KV arena, training and the references of the tests read plain tensors. Parameter
names are those of the public checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError

# Their frequencies change with the length of the text, so keys computed early would differ from
# those computed late: a drafter that catches up would not equal one that never slept.
_REFUSED_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Shape and arithmetic of a drafter's decoder layers.

    Attributes:
        rope: transformers' `rope_parameters` (`rope_type`, `rope_theta`, and what the type needs).
        max_positions: `max_position_embeddings`; beyond it the drafter is switched off.
        qk_norm: RMS norm on each head of queries and keys (Qwen3 has it, Llama has not).
        sliding: per layer, whether it sees `sliding_window` positions only.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0})
    qk_norm: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding: tuple[bool, ...] = ()
    sliding_window: int | None = None

    def window(self, layer: int) -> int | None:
        """Positions that layer `layer` sees, or None for all."""
        return self.sliding_window if self.sliding and self.sliding[layer] else None


class Rotary(nn.Module):
    """Rotary embedding by absolute position, from a table that grows with the positions seen.

    Raises:
        CheckpointError: a kind of scaling whose frequencies depend on the length of the text.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        kind = config.rope.get("rope_type", "default")
        if kind in _REFUSED_ROPE:
            raise CheckpointError(
                f"the drafter's rope_type is {kind!r}, whose frequencies change with the length of "
                "the text, so its keys cannot be computed late; use a drafter with rotary "
                "embedding of type default, linear, yarn or llama3"
            )
        if config.rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"the drafter rotates {config.rope['partial_rotary_factor']:g} of each head "
                "(partial_rotary_factor); drafters that rotate whole heads are supported"
            )
        embedding = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.num_heads * config.head_dim,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters={"rope_type": "default", **config.rope},
            )
        )
        # No buffers: rounded by `model.bfloat16()`, they would turn late positions by a radian.
        self._frequencies: Tensor = embedding.inv_freq.float()
        self._scaling = float(embedding.attention_scaling)
        self._table: Tensor | None = None

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each `[tokens, 1, head_dim]`, for `positions` `[tokens]` (int64)."""
        last = int(positions.max()) if positions.numel() else 0
        table = self._table
        if table is None or last >= table.shape[1] or table.device != positions.device:
            size = max(256, 1 << last.bit_length())
            with torch.inference_mode(False):  # training may use the table after drafting did
                known = torch.arange(size, dtype=torch.float32, device=positions.device)
                angles = (known[:, None] * self._frequencies.to(positions.device)).repeat(1, 2)
                table = torch.stack((angles.cos(), angles.sin())) * self._scaling
            self._table = table  # [2, size, head_dim]
        cos, sin = table[:, positions].to(dtype).unsqueeze(2)
        return cos, sin


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding to `x` `[tokens, heads, head_dim]`."""
    cos, sin = rotation
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Projections of one attention layer; `inputs` is twice the hidden size in EAGLE-3."""

    def __init__(self, config: LayerConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(inputs, heads * dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`[tokens, inputs]` -> `[tokens, heads, head_dim]`, rotated."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(q if self.q_norm is None else self.q_norm(q), rotation)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`[tokens, inputs]` -> keys (rotated) and values, each `[kv_heads, tokens, head_dim]`."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        k = rotate(k if self.k_norm is None else self.k_norm(k), rotation)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return k.transpose(0, 1), v.transpose(0, 1)


class MLP(nn.Module):
    """Gated MLP: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        if config.hidden_act not in ACT2FN:
            raise CheckpointError(
                f"the drafter's hidden_act {config.hidden_act!r} is not an activation that "
                "transformers knows"
            )
        self._act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._act(self.gate_proj(x)) * self.up_proj(x))


class DraftHead(nn.Module):
    """A drafter's own output head over a draft vocabulary.

    Attributes:
        d2t: `[draft_vocab]` int64 offsets, `target_id = draft_id + d2t[draft_id]`; None when the
            draft vocabulary is the target's.
    """

    def __init__(self, hidden_size: int, draft_vocab: int, *, reduced: bool) -> None:
        super().__init__()
        self.lm_head = nn.Linear(hidden_size, draft_vocab, bias=False)
        self.d2t: Tensor | None
        self.register_buffer(
            "d2t", torch.zeros(draft_vocab, dtype=torch.int64) if reduced else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids (any shape)."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
