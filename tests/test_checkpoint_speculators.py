"""Reading drafters that vLLM's `speculators` package saved: EAGLE-3 and DFlash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch
from tiny_checkpoints import SLIDING, assert_holds

from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Model


def eagle3(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Eagle3Model:
    return load_eagle3(tc.write(folder, config, tensors), tc.target())


def dflash(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> DFlashModel:
    return load_dflash(tc.write(folder, config, tensors), tc.target())


@pytest.mark.parametrize(("kind", "qk_norm"), [("llama", False), ("qwen3", True)])
def test_speculators_eagle3_loads(tmp_path: Path, kind: str, qk_norm: bool) -> None:
    tensors = tc.eagle3_tensors(prefix="layers.0.", qk_norm=qk_norm) | {
        "embed_tokens.weight": tc.embedding(),
        "verifier_norm.weight": tc.random(tc.HIDDEN),
        "verifier_lm_head.weight": tc.random(tc.DRAFT_VOCAB, tc.HIDDEN),
    }
    model = eagle3(tmp_path, tc.speculators_config("eagle3", layer={"model_type": kind}), tensors)
    assert model.config == replace(tc.EAGLE3, layer=replace(tc.LAYER, qk_norm=qk_norm))
    assert_holds(model, tensors, ("midlayer.", "layers.0."))


def test_speculators_eagle3_ids_name_hidden_states_as_they_stand(tmp_path: Path) -> None:
    config = tc.speculators_config(
        "eagle3", layer={"model_type": "llama"}, eagle_aux_hidden_state_layer_ids=[1, 3, 7]
    )
    model = eagle3(tmp_path, config, tc.eagle3_tensors(prefix="layers.0."))
    assert model.config.feature_layers == (1, 3, 7)


def speculators_dflash_tensors() -> dict[str, torch.Tensor]:
    return tc.dflash_tensors() | tc.vocabulary() | {"lm_head.weight": tc.random(40, tc.HIDDEN)}


def test_speculators_dflash_loads_with_its_reduced_head(tmp_path: Path) -> None:
    tensors = speculators_dflash_tensors()
    model = dflash(tmp_path, tc.speculators_config("dflash", layer={}), tensors)
    assert model.config == replace(
        tc.DFLASH, num_target_layers=None, draft_vocab_size=tc.DRAFT_VOCAB, window_from="bonus"
    )
    assert_holds(model, tensors, ("", ""))
    assert torch.equal(model.head.target_ids(torch.arange(3)), torch.tensor([0, 2, 4]))


def test_speculators_dflash_flags_are_read(tmp_path: Path) -> None:
    config = tc.speculators_config(
        "dflash",
        layer=SLIDING | {"model_type": "qwen3"},
        sample_from_anchor=True,
        sliding_window_non_causal=True,
    )
    found = dflash(tmp_path, config, speculators_dflash_tensors()).config
    assert found.sample_from_anchor
    assert not found.sliding_causal
    assert found.layers.sliding == (True, False)
    assert found.num_drafted == 6


def test_speculators_dflash_of_full_vocabulary_uses_the_targets_head(tmp_path: Path) -> None:
    config = tc.speculators_config("dflash", layer={}, draft_vocab_size=tc.VOCAB)
    without = dflash(tmp_path / "without", config, tc.dflash_tensors())
    copy = tc.dflash_tensors() | {"lm_head.weight": tc.head()}
    own = tc.dflash_tensors() | {"lm_head.weight": tc.random(tc.VOCAB, tc.HIDDEN)}
    assert without.head is None
    assert dflash(tmp_path / "copy", config, copy).head is None
    found = dflash(tmp_path / "own", config, own).head
    assert found is not None
    assert found.d2t is None


def test_speculators_dflash_may_have_its_own_embedding(tmp_path: Path) -> None:
    config = tc.speculators_config("dflash", layer={})
    tensors = speculators_dflash_tensors()
    shared = dflash(tmp_path / "a", config, tensors | {"embed_tokens.weight": tc.embedding()})
    assert shared.embed_tokens is None
    other = tc.random(tc.VOCAB, tc.HIDDEN)
    own = dflash(tmp_path / "b", config, tensors | {"embed_tokens.weight": other})
    assert own.config.own_embedding


def test_speculators_take_the_rotary_embedding_of_sliding_layers(tmp_path: Path) -> None:
    nested = {
        "full_attention": {"rope_theta": 1000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 2000.0, "rope_type": "default"},
    }
    layer = SLIDING | {"rope_theta": None, "rope_parameters": nested}
    config = tc.speculators_config("dflash", layer=layer)
    found = dflash(tmp_path, config, speculators_dflash_tensors()).config
    assert found.layers.rope["rope_theta"] == 2000.0


def test_speculators_layers_are_a_difference_to_their_class(tmp_path: Path) -> None:
    layer = {"rms_norm_eps": None, "rope_theta": None, "max_position_embeddings": None}
    config = tc.speculators_config("dflash", layer=layer)
    found = dflash(tmp_path, config, speculators_dflash_tensors()).config.layers
    assert (found.rms_norm_eps, found.rope["rope_theta"]) == (1e-6, 10000.0)
    assert found.max_positions == 32768  # Qwen3Config's
