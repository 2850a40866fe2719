"""New drafters for a target, and what they know before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3, save_dflash, save_eagle3
from whiflash_agents.engine.errors import SettingsError, UnsupportedTargetError
from whiflash_agents.engine.target import Target
from whiflash_agents.engine.training.feature_source import ComputedFeatures
from whiflash_agents.engine.training.new_drafter import (
    choose_mask_token,
    new_dflash,
    new_eagle3,
)
from whiflash_agents.engine.training.texts import TrainingText
from whiflash_agents.engine.training.vocabulary import DraftVocabulary
from whiflash_agents.engine.training.warm_start import warm_start_dflash, warm_start_eagle3

_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),  # has biases
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=8),  # norms queries and keys
    "gemma": lambda: GemmaConfig(**_SIZES, head_dim=8),
}
VOCABULARY = DraftVocabulary(tuple(range(5, 65, 2)), tiny.VOCAB)


def target(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(3)
    net = AutoModelForCausalLM.from_config(_CONFIGS[architecture]()).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
    return Target(net.to(dtype), name=f"eight-{architecture}")


def features(of: Target, layers: Any, count: int = 20) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, tiny.VOCAB, (count,), generator=generator).tolist()
    return ComputedFeatures(of, layers)(TrainingText("a", tuple(ids), ((1, count),)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma"])
def test_a_new_drafter_is_saved_and_loaded_for_its_target(
    architecture: str, tmp_path: Path
) -> None:
    own = target(architecture)
    eagle = new_eagle3(own, VOCABULARY, intermediate_size=64)
    block = new_dflash(own, block_size=8, num_layers=3, mask_token_id=95)
    save_eagle3(eagle, tmp_path / "eagle3")
    save_dflash(block, tmp_path / "dflash")
    for network, loaded in (
        (eagle, load_eagle3(tmp_path / "eagle3", own)),
        (block, load_dflash(tmp_path / "dflash", own)),
    ):
        assert loaded.config == network.config
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert eagle.config.feature_layers == (2, 4, 5)
    assert eagle.head.target_ids(torch.arange(30)).tolist() == list(VOCABULARY.ids)
    assert block.config.feature_layers == (2, 3, 4, 5, 6)
    assert block.config.num_target_layers == 8


def test_random_weights_come_from_their_seed() -> None:
    own = target()
    first, again, other = (new_eagle3(own, VOCABULARY, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in first.parameters())


def test_feature_layers_are_spread_as_in_published_drafters() -> None:
    config = LlamaConfig(**(_SIZES | {"num_hidden_layers": 36}))
    deep = Target(AutoModelForCausalLM.from_config(config))
    # z-lab's Qwen3-8B drafter reads outputs of layers 1, 9, 17, 25 and 33.
    block = new_dflash(deep, block_size=8, num_layers=1, mask_token_id=95)
    assert block.config.feature_layers == (2, 10, 18, 26, 34)
    assert new_eagle3(deep, VOCABULARY).config.feature_layers == (2, 18, 33)


def test_targets_that_the_usual_layers_do_not_suit_ask_for_them() -> None:
    own = tiny.target()  # of two layers
    with pytest.raises(SettingsError, match="give feature_layers"):
        new_eagle3(own, VOCABULARY)
    with pytest.raises(SettingsError, match="give feature_layers"):
        new_dflash(own, block_size=4, num_layers=1, mask_token_id=95)
    assert new_eagle3(own, VOCABULARY, feature_layers=(0, 1)).fc.in_features == 64
    with pytest.raises(SettingsError, match="ascending hidden states from 1 to 2"):
        new_dflash(own, block_size=4, num_layers=1, mask_token_id=95, feature_layers=(1, 3))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"mask_token_id": 96}, "mask_token_id=96"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
    ],
)
def test_bad_sizes_are_refused(wrong: dict[str, Any], named: str) -> None:
    sizes = {"block_size": 4, "num_layers": 1, "mask_token_id": 95} | wrong
    with pytest.raises(SettingsError, match=named):
        new_dflash(target(), **sizes)


def test_a_vocabulary_of_another_target_is_refused() -> None:
    with pytest.raises(SettingsError, match="chosen from 90 tokens"):
        new_eagle3(target(), DraftVocabulary((1, 2), 90))


def test_the_mask_is_a_token_that_no_text_has() -> None:
    own = target()
    special = {"<s>": 1, "</s>": 2, "<tool>": 7, "<repo>": 8, "<file>": 9}

    def chosen(**more: int) -> int:
        return choose_mask_token(own, special | more, num_tokens=96, used=[7])

    assert chosen() == 9
    assert chosen(reserved_5=40) == 40
    assert chosen(reserved_5=40, MASK=41) == 41
    assert choose_mask_token(own, special, num_tokens=90, used=[7]) == 90
    with torch.no_grad():
        own.model.get_input_embeddings().weight[90:93] = 0
    assert choose_mask_token(own, special, num_tokens=90, used=[7]) == 93
    with pytest.raises(SettingsError, match="Give a mask_token_id"):
        choose_mask_token(own, special, num_tokens=96, used=[7, 8, 9])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_warm_eagle3_computes_the_target_s_last_layer(architecture: str) -> None:
    own = target(architecture)
    network = new_eagle3(own, VOCABULARY, feature_layers=(7,))
    warm_start_eagle3(network, own)
    found = features(own, (7,))
    stacked = found.features[7]
    with torch.no_grad():
        embedded = own.embedding[found.token_ids.roll(-1)]
        hidden = network(stacked, embedded, torch.arange(20))
        logits = network.logits(hidden)
        # Fed with what enters the last layer, it says what the target says.
        wanted = own.head(found.hidden)[:, list(VOCABULARY.ids)]
    assert torch.allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_warm_dflash_makes_the_target_s_keys_and_values_of_its_context(architecture: str) -> None:
    own = target(architecture)
    network = new_dflash(
        own, block_size=4, num_layers=3, mask_token_id=95, feature_layers=(2, 5, 6)
    )
    warm_start_dflash(network, own)
    found = features(own, (2, 5, 6))
    stacked = torch.cat([found.features[i] for i in (2, 5, 6)], -1)
    mean = sum(found.features.values()) / 3
    with torch.no_grad():
        rows = network.context(stacked)
        for layer, source in zip(network.layers, own.model.model.layers[5:], strict=True):
            rotation = network.rotary(torch.arange(20), rows.dtype)
            keys, values = layer.self_attn.keys_values(rows, rotation)
            normed = source.input_layernorm(mean)
            wanted = source.self_attn.v_proj(normed).view(20, 2, 8).transpose(0, 1)
            assert torch.allclose(values, wanted, atol=1e-4)
            key = source.self_attn.k_proj(normed).view(20, 2, 8)
            if architecture == "qwen3":
                key = source.self_attn.k_norm(key)
            # Without norms of its own, the target's keys are about as loud as the drafter's.
            loudness = keys.square().mean() / key.square().mean()
            assert loudness.item() == pytest.approx(1.0, rel=1e-3 if "3" in architecture else 0.5)
            assert torch.equal(layer.mlp.up_proj.weight, source.mlp.up_proj.weight)
    assert torch.equal(network.norm.weight, own.model.model.norm.weight)


def test_a_warm_start_in_bfloat16_makes_float32_weights() -> None:
    own = target(dtype=torch.bfloat16)
    network = new_eagle3(own, VOCABULARY)
    warm_start_eagle3(network, own)
    assert network.midlayer.mlp.up_proj.weight.dtype == torch.float32
    assert network.head.lm_head.weight.requires_grad


def test_what_cannot_begin_as_the_target_is_refused_by_name() -> None:
    own = target()
    with pytest.raises(SettingsError, match=r"gate_proj has shape \[64, 32\]"):
        warm_start_eagle3(new_eagle3(own, VOCABULARY, intermediate_size=64), own)
    with pytest.raises(SettingsError, match="num_layers=9"):
        warm_start_dflash(new_dflash(own, block_size=4, num_layers=9, mask_token_id=95), own)
    gemma = target("gemma")
    with pytest.raises(UnsupportedTargetError, match=r"'gemma'.*random weights"):
        warm_start_eagle3(new_eagle3(gemma, VOCABULARY), gemma)
    own.model.model.layers[-1].extra_norm = torch.nn.LayerNorm(32)
    with pytest.raises(UnsupportedTargetError, match="extra_norm"):
        warm_start_dflash(new_dflash(own, block_size=4, num_layers=1, mask_token_id=95), own)
