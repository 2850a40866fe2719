"""The EAGLE-3 network (Li et al., 2503.01840): one decoder layer over target features.

Row t pairs the target's features of position t with the embedding of token t + 1 and has RoPE
position t. This module is arithmetic only: it knows neither sequences nor the KV arena, so that
drafting (`eagle3.py`), training and tests share it. Variants that change the arithmetic are flags
of `Eagle3Config`, named as in the `speculators` format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .layers import MLP, Attention, DraftHead, LayerConfig, Rotary


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What an EAGLE-3 checkpoint says of itself.

    Attributes:
        layer: its single decoder layer.
        feature_layers: target hidden states that it reads, in Hugging Face indexing (0 is the
            embedding output), in the order in which they are concatenated.
        target_hidden_size: width of each of them.
        vocab_size: the target's vocabulary.
        draft_vocab_size: its own; smaller ones come with `d2t` offsets.
        norm_before_residual: the residual is `hidden_norm(h)` instead of `h`.
        norm_before_fc: one RMS norm over the concatenated features before `fc`.
        fc_norm: one RMS norm per feature before `fc`.
        norm_output: the final norm's output is what the next step gets as its feature.
        own_embedding: it has its own token embedding instead of the target's.
    """

    layer: LayerConfig
    feature_layers: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False


class Eagle3Layer(nn.Module):
    """The decoder layer: attention reads `[norm(embedding), norm(feature)]`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(config)


class Eagle3Model(nn.Module):
    """Weights of an EAGLE-3 drafter and the steps that they take part in.

    Attributes:
        embed_tokens: its own embedding, or None for the target's.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer, width = config.layer, len(config.feature_layers) * config.target_hidden_size
        eps = layer.rms_norm_eps
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, layer.hidden_size) if config.own_embedding else None
        )
        self.input_norm = nn.RMSNorm(width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.feature_layers
            )
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, layer.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(layer)
        self.norm = nn.RMSNorm(layer.hidden_size, eps=eps)
        self.head = DraftHead(
            layer.hidden_size,
            config.draft_vocab_size,
            reduced=config.draft_vocab_size != config.vocab_size,
        )
        self.rotary = Rotary(layer)

    def project(self, features: Tensor) -> Tensor:
        """Target features `[rows, layers * target_hidden]` -> `[rows, hidden]`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(features)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, `[rows, 2 * hidden]`, and the residual, `[rows, hidden]`.

        Args:
            embedded: `[rows, hidden]`, embeddings of the tokens after each row's position.
            hidden: `[rows, hidden]`, projected features, or outputs of the step before.
        """
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        return x, normed if self.config.norm_before_residual else hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From attention's heads `[rows, heads * head_dim]` to the layer's output `[rows, hidden]`,
        which is also the next step's feature (normed where `norm_output` says so)."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`finish`'s output -> logits over the draft vocabulary, `[rows, draft_vocab]`."""
        return self.head(hidden if self.config.norm_output else self.norm(hidden))

    def forward(self, features: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        """All rows of one text at once, causally, from true features only.

        Differentiable; the reference for what drafting does in pieces.

        Args:
            features: `[rows, layers * target_hidden]`, of positions t.
            embedded: `[rows, hidden]`, embeddings of tokens t + 1.
            positions: `[rows]`, int64.

        Returns:
            the layer's output `[rows, hidden]`.
        """
        x, residual = self.attention_input(embedded, self.project(features))
        attention = self.midlayer.self_attn
        rotation = self.rotary(positions, x.dtype)
        query = attention.queries(x, rotation).transpose(0, 1)
        keys, values = attention.keys_values(x, rotation)
        window = self.config.layer.window(0)
        visible = positions[:, None] >= positions[None, :]
        if window is not None:
            visible &= positions[:, None] - positions[None, :] < window
        attended = scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=visible, enable_gqa=True
        )
        return self.finish(attended[0].transpose(0, 1).flatten(1), residual)
