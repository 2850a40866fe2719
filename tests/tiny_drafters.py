"""Tiny neural drafters over the tiny targets: random weights, and weights made to agree."""

from __future__ import annotations

from typing import Any

import tiny
import torch

from whiflash_agents.engine.drafters.dflash_model import DFlashConfig, DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Config, Eagle3Model
from whiflash_agents.engine.drafters.layers import LayerConfig

MASK = tiny.VOCAB - 1


def layers(**changes: Any) -> LayerConfig:
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 512,
    }
    return LayerConfig(**(fields | changes))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random weights whose distributions are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.7, 1.3, generator=generator)
    model.eval().requires_grad_(False)


def eagle3(*, seed: int = 1, draft_vocab: int = 40, layer: Any = None, **changes: Any) -> Any:
    """A random EAGLE-3 network over all of a tiny target's hidden states."""
    config = Eagle3Config(
        layer=layer or layers(),
        feature_layers=changes.pop("feature_layers", (0, 1, 2)),
        target_hidden_size=32,
        vocab_size=tiny.VOCAB,
        draft_vocab_size=draft_vocab,
        **changes,
    )
    model = Eagle3Model(config)
    randomise(model, seed)
    if model.head.d2t is not None:
        chosen = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(seed))
        chosen = chosen[:draft_vocab].sort().values
        model.head.d2t = chosen - torch.arange(draft_vocab)
    return model


def dflash(*, seed: int = 2, layer: Any = None, **changes: Any) -> Any:
    """A random DFlash network with two layers and blocks of six."""
    fields: dict[str, Any] = {
        "layers": layer or layers(num_layers=2),
        "feature_layers": (1, 2),
        "vocab_size": tiny.VOCAB,
        "num_target_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
    }
    model = DFlashModel(DFlashConfig(**(fields | changes)))
    randomise(model, seed)
    return model
