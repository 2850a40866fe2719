"""Tiny drafter checkpoints in every public layout, written field by field and tensor by tensor.

Names and shapes are spelled out here and not taken from the networks, so that a reader that renames
or drops something is seen.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import VOCAB
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from whiflash_agents.engine.drafters.dflash_model import DFlashConfig
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Config
from whiflash_agents.engine.drafters.layers import LayerConfig
from whiflash_agents.engine.target import Target

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 8, 32, 48, 4, 2, 8
DRAFT_VOCAB = 40
MASK = VOCAB - 1

# What the checkpoints below describe, unless they are changed.
LAYER = LayerConfig(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    max_positions=512,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 5000.0},
    qk_norm=False,
)
EAGLE3 = Eagle3Config(
    layer=LAYER,
    feature_layers=(2, 4, 5),
    target_hidden_size=HIDDEN,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
)
DFLASH = DFlashConfig(
    layers=replace(LAYER, num_layers=2, qk_norm=True),
    feature_layers=(2, 4, 6),
    vocab_size=VOCAB,
    num_target_layers=LAYERS,
    block_size=6,
    mask_token_id=MASK,
)

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
}


@cache
def target(dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, vocab: int = VOCAB) -> Target:
    """A target deep enough for EAGLE-3's usual layers, 2, 4 and 5."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return Target(AutoModelForCausalLM.from_config(config).to(dtype).eval())


def embedding() -> Tensor:
    return target().model.get_input_embeddings().weight.detach().clone()


def head() -> Tensor:
    return target().model.get_output_embeddings().weight.detach().clone()


_seeds = count()


def random(*shape: int) -> Tensor:
    """Random values, others at each call: tensors that are mixed up must be seen."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(next(_seeds)))


def layer_fields(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
    } | changes


def layer_tensors(prefix: str, *, inputs: int, qk_norm: bool) -> dict[str, Tensor]:
    """One decoder layer whose attention reads `inputs` features."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    tensors = {
        f"{prefix}input_layernorm.weight": random(HIDDEN),
        f"{prefix}post_attention_layernorm.weight": random(HIDDEN),
        f"{attention}q_proj.weight": random(HEADS * DIM, inputs),
        f"{attention}k_proj.weight": random(KV_HEADS * DIM, inputs),
        f"{attention}v_proj.weight": random(KV_HEADS * DIM, inputs),
        f"{attention}o_proj.weight": random(HIDDEN, HEADS * DIM),
        f"{mlp}gate_proj.weight": random(INNER, HIDDEN),
        f"{mlp}up_proj.weight": random(INNER, HIDDEN),
        f"{mlp}down_proj.weight": random(HIDDEN, INNER),
    }
    if qk_norm:
        tensors[f"{attention}q_norm.weight"] = random(DIM)
        tensors[f"{attention}k_norm.weight"] = random(DIM)
    return tensors


def vocabulary() -> dict[str, Tensor]:
    """`d2t` and `t2d` of a draft vocabulary of every second token."""
    ids = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": marked}


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
    } | layer_fields(**changes)


def eagle3_tensors(
    *, prefix: str = "midlayer.", qk_norm: bool = False, features: int = 3
) -> dict[str, Tensor]:
    return {
        "fc.weight": random(HIDDEN, features * HIDDEN),
        f"{prefix}hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        **layer_tensors(prefix, inputs=2 * HIDDEN, qk_norm=qk_norm),
        **vocabulary(),
    }


def dflash_config(**changes: Any) -> dict[str, Any]:
    """z-lab's, of two layers; what `dflash_config` is to hold besides goes under `own`."""
    own = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]} | changes.pop("own", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 6,
        "dflash_config": own,
    } | layer_fields(**changes)


def dflash_tensors(features: int = 3) -> dict[str, Tensor]:
    return {
        "fc.weight": random(HIDDEN, features * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        **layer_tensors("layers.0.", inputs=HIDDEN, qk_norm=True),
        **layer_tensors("layers.1.", inputs=HIDDEN, qk_norm=True),
    }


def speculators_config(kind: str, *, layer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`layer` changes the fields of `transformer_layer_config`."""
    inner = layer_fields() | {"num_hidden_layers": 1 if kind == "eagle3" else 2} | layer
    own: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": None}
    if kind == "dflash":
        own = {"aux_hidden_state_layer_ids": [2, 4, 6], "block_size": 6, "mask_token_id": MASK}
    return {
        "speculators_model_type": kind,
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": inner,
        **own,
    } | changes


def write(folder: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint folder with `model.safetensors`; without `config.json` for None."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_holds(model: Any, tensors: dict[str, Tensor], renamed: tuple[str, str]) -> None:
    """Every tensor of the network is the checkpoint's, under its name there."""
    state = model.state_dict()
    for name, tensor in state.items():
        there = name.removeprefix("head.").replace(*renamed)
        assert torch.equal(tensor, tensors[there].to(tensor.dtype)), name
    assert len(state) > 10
