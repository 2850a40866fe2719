"""The DFlash network (Chen et al., 2602.06036): a block of masks denoised in one forward.

Qwen3-style decoder layers without a causal mask. A block is `[bonus, MASK, ...]`, embedded by the
target's raw embedding; its layers also attend to keys and values made from target features of all
positions before the bonus token. This module is arithmetic only, like `eagle3_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .layers import MLP, Attention, DraftHead, LayerConfig, Rotary
from .length_head import LengthHead
from .local_head import LocalHead


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """What a DFlash checkpoint says of itself.

    Attributes:
        layers: its decoder layers.
        feature_layers: target hidden states that it reads, in Hugging Face indexing (z-lab's
            `target_layer_ids` plus one), in the order in which they are concatenated.
        vocab_size: the target's vocabulary.
        num_target_layers: layers of the target it was trained for; None where it does not say.
        block_size: slots of a block, the bonus token's included.
        mask_token_id: what fills the other slots.
        draft_vocab_size: of its own head; None when it uses the target's.
        own_embedding: it has its own token embedding instead of the target's.
        sample_from_anchor: slot i predicts the token after its position, so that the bonus token's
            slot drafts, too; otherwise slot i predicts the token at its position.
        sliding_causal: sliding layers see the block up to their own slot only.
        window_from: a sliding layer's window counts back from each slot (z-lab) or, for all slots
            alike, from the bonus token (`speculators`).
        embedding_scale, output_multiplier, logit_softcap: as in newer z-lab checkpoints.
        unused_length_head: names of tensors of a length head that the checkpoint has and that is
            not used, because it is of another shape or says something else.
    """

    layers: LayerConfig
    feature_layers: tuple[int, ...]
    vocab_size: int
    num_target_layers: int | None
    block_size: int
    mask_token_id: int
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    sample_from_anchor: bool = False
    sliding_causal: bool = True
    window_from: Literal["slot", "bonus"] = "slot"
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    unused_length_head: tuple[str, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Tokens that one block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def block_visible(self, layer: int, context: int) -> Tensor | None:
        """What the block's slots see in layer `layer`: None for everything, otherwise bool
        `[block_size, context + block_size]` over the context and then the block."""
        window = self.layers.window(layer)
        if window is None:
            return None
        slots = torch.arange(context, context + self.block_size)[:, None]
        keys = torch.arange(context + self.block_size)[None, :]
        if self.window_from == "bonus":
            visible = (keys >= context) | (keys >= context - window)
        else:
            visible = slots - keys < window
            if not self.sliding_causal:
                visible &= keys - slots < window
        if self.sliding_causal:
            visible = visible & (keys <= slots)
        return visible.expand(self.block_size, -1)


class DFlashLayer(nn.Module):
    """One decoder layer; its context keys and values come from `DFlashModel.context`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config, hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(config)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From attention's heads `[slots, heads * head_dim]` to the layer's output."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DFlashModel(nn.Module):
    """Weights of a DFlash drafter and the steps that they take part in.

    Attributes:
        embed_tokens: its own embedding, or None for the target's.
        head: its own output head, or None for the target's.
        local_head, length_head: what may be trained on top of it; None where there is none.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        layers = config.layers
        hidden, eps = layers.hidden_size, layers.rms_norm_eps
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        )
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(DFlashLayer(layers) for _ in range(layers.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.head = (
            DraftHead(
                hidden,
                config.draft_vocab_size,
                reduced=config.draft_vocab_size != config.vocab_size,
            )
            if config.draft_vocab_size is not None
            else None
        )
        self.rotary = Rotary(layers)
        self.local_head: LocalHead | None = None
        self.length_head: LengthHead | None = None

    def decoder_layers(self) -> list[DFlashLayer]:
        """`layers`, with their type."""
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def context(self, features: Tensor) -> Tensor:
        """Target features `[rows, layers * hidden]` -> context features `[rows, hidden]`, from
        which every layer takes its context keys and values."""
        return self.hidden_norm(self.fc(features))

    def block_tokens(self, bonus: Tensor) -> Tensor:
        """`[sequences]` bonus tokens -> `[sequences, block_size]`: the bonus token itself, then
        masks."""
        block = bonus.new_full((len(bonus), self.config.block_size), self.config.mask_token_id)
        block[:, 0] = bonus
        return block

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the checkpoint's multiplier and soft cap to the head's logits."""
        config = self.config
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """One block of one text, from the features of all positions before it.

        Differentiable; the reference for what drafting does in pieces.

        Args:
            features: `[context, layers * hidden]`, of positions 0 to context - 1.
            embedded: `[block_size, hidden]`, the embedded block.

        Returns:
            the final norm's output, `[block_size, hidden]`.
        """
        context, size = len(features), len(embedded)
        rows = self.context(features)
        positions = torch.arange(context + size, device=embedded.device)
        before = self.rotary(positions[:context], embedded.dtype)
        within = self.rotary(positions[context:], embedded.dtype)
        hidden = embedded * self.config.embedding_scale
        for index, layer in enumerate(self.decoder_layers()):
            x = layer.input_layernorm(hidden)
            query = layer.self_attn.queries(x, within).transpose(0, 1)
            parts = [layer.self_attn.keys_values(rows, before)] if context else []
            parts.append(layer.self_attn.keys_values(x, within))
            keys, values = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
            attended = scaled_dot_product_attention(
                query[None],
                keys[None],
                values[None],
                attn_mask=self.config.block_visible(index, context),
                enable_gqa=True,
            )
            hidden = layer.finish(attended[0].transpose(0, 1).flatten(1), hidden)
        return self.norm(hidden)
