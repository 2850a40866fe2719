"""Checkpoints that must not load: a drafter that loads wrongly would still seem to work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch

from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
from whiflash_agents.engine.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def refusal(
    load: Any, folder: Path, config: dict[str, Any], tensors: Tensors, **target: Any
) -> str:
    tc.write(folder, config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder, tc.target(**target))
    message = str(caught.value)
    assert str(folder) in message
    return message


def eagle3_refusal(folder: Path, tensors: Tensors | None = None, **fields: Any) -> str:
    found = tc.eagle3_tensors() if tensors is None else tensors
    return refusal(load_eagle3, folder, tc.eagle3_config(**fields), found)


def dflash_refusal(folder: Path, tensors: Tensors | None = None, **fields: Any) -> str:
    found = tc.dflash_tensors() if tensors is None else tensors
    return refusal(load_dflash, folder, tc.dflash_config(**fields), found)


# Which format -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_dflash_folder_is_no_eagle3_and_says_where_it_belongs(tmp_path: Path, layout: str) -> None:
    speculators = tc.speculators_config("dflash", layer={})
    config = tc.dflash_config() if layout == "z-lab" else speculators
    message = refusal(load_eagle3, tmp_path, config, tc.dflash_tensors())
    assert "holds a DFlash drafter, expected EAGLE-3" in message
    assert "load_dflash" in message


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_eagle3_folder_is_no_dflash_and_says_where_it_belongs(tmp_path: Path, layout: str) -> None:
    speculators = tc.speculators_config("eagle3", layer={})
    config = tc.eagle3_config() if layout == "original" else speculators
    message = refusal(load_dflash, tmp_path, config, tc.eagle3_tensors())
    assert "holds an EAGLE-3 drafter, expected DFlash" in message
    assert "load_eagle3" in message


@pytest.mark.parametrize("load", [load_eagle3, load_dflash])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafter (DFlash2DraftModel"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "first EAGLE generations"),
        ({"architectures": ["LagunaDFlashModel"]}, "variant of DFlash (LagunaDFlashModel)"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM and holds no drafter"),
        ({}, "architecture unknown and holds no drafter"),
        ({"architectures": "DFlashDraftModel"}, "expected a list of strings"),
        ({"speculators_model_type": "mtp"}, "'speculators_model_type' is \"mtp\""),
        ({"speculators_model_type": 3}, "expected a string"),
    ],
)
def test_other_formats_are_refused_by_name(
    tmp_path: Path, load: Any, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(load, tmp_path, config, tc.dflash_tensors())


# Tensors ----------------------------------------------------------------------------------------


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    del tensors["midlayer.self_attn.k_proj.weight"]
    message = eagle3_refusal(tmp_path, tensors)
    assert "tensor 'midlayer.self_attn.k_proj.weight' is missing" in message
    assert "expected with shape [16, 64]" in message
    assert "more problems" not in message


def test_missing_tensor_goes_by_its_name_in_that_layout(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors(prefix="layers.0.")
    del tensors["layers.0.hidden_norm.weight"]
    config = tc.speculators_config("eagle3", layer={"model_type": "llama"})
    message = refusal(load_eagle3, tmp_path, config, tensors)
    assert "'layers.0.hidden_norm.weight' is missing" in message


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    message = dflash_refusal(tmp_path, tc.dflash_tensors() | {"layers.2.new": tc.random(3)})
    assert f"{tmp_path / 'model.safetensors'}: tensor 'layers.2.new' of shape [3]" in message
    assert "unexpected" in message


def test_wrong_shape_is_told_with_the_right_one_and_the_number_of_others(tmp_path: Path) -> None:
    changed = {"norm.weight": tc.random(31), "hidden_norm.weight": tc.random(31), "x": tc.random(1)}
    message = dflash_refusal(tmp_path, tc.dflash_tensors() | changed)
    assert "has shape [31], expected [32] (and 2 more problems" in message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    changed = {"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}
    assert "'fc.weight' is of type int8" in dflash_refusal(tmp_path, tc.dflash_tensors() | changed)
    changed = {"fc.weight": torch.zeros(32, 96).to(torch.float8_e4m3fn)}
    again = dflash_refusal(tmp_path, tc.dflash_tensors() | changed)
    assert "'fc.weight' is of type float8_e4m3fn" in again


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_zlab_drafter_with_an_embedding_or_head_of_its_own_is_refused(
    tmp_path: Path, name: str
) -> None:
    tensors = tc.dflash_tensors() | {name: tc.random(tc.VOCAB, tc.HIDDEN)}
    assert f"tensor {name!r}" in dflash_refusal(tmp_path, tensors)


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_flag_and_its_tensors_must_agree(tmp_path: Path, flag: str) -> None:
    name = "input_norm.weight" if flag == "norm_before_fc" else "fc_norm.0.weight"
    assert f"tensor {name!r} is missing" in eagle3_refusal(tmp_path / "a", **{flag: True})
    tensors = tc.eagle3_tensors() | {name: tc.random(96)}
    assert f"tensor {name!r} of shape [96] is unexpected" in eagle3_refusal(tmp_path / "b", tensors)


def test_verifier_copies_belong_to_speculators_only(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors() | {"verifier_norm.weight": tc.random(tc.HIDDEN)}
    assert "'verifier_norm.weight'" in eagle3_refusal(tmp_path, tensors)


def test_query_norms_must_fit_the_kind_of_speculators_layer(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors(prefix="layers.0.", qk_norm=True)
    config = tc.speculators_config("eagle3", layer={"model_type": "llama"})
    message = refusal(load_eagle3, tmp_path, config, tensors)
    assert "'layers.0.self_attn.k_norm.weight' of shape [8] is unexpected" in message
    assert "(and 1 more problems" in message


def test_reduced_head_must_be_there(tmp_path: Path) -> None:
    config = tc.speculators_config("dflash", layer={})
    message = refusal(load_dflash, tmp_path, config, tc.dflash_tensors() | tc.vocabulary())
    assert "'lm_head.weight' is missing" in message


def test_features_that_fc_takes_must_be_named(tmp_path: Path) -> None:
    message = eagle3_refusal(tmp_path, tc.eagle3_tensors(features=5))
    assert "it takes 5 target features, and 3 layers are read ([2, 4, 5])" in message
    assert "eagle_aux_hidden_state_layer_ids" in message


def test_length_head_must_be_there_where_the_config_says_so(tmp_path: Path) -> None:
    message = dflash_refusal(tmp_path, own={"use_thresh_head_two_model": True})
    assert "'thresh_head_two_model.*' is missing" in message


def test_length_head_that_the_config_does_not_know_is_unexpected(tmp_path: Path) -> None:
    tensors = tc.dflash_tensors() | {"thresh_head_two_model.0.weight": tc.random(4, 4)}
    message = dflash_refusal(tmp_path, tensors, own={"use_thresh_head_two_model": False})
    assert "'thresh_head_two_model.0.weight' of shape [4, 4] is unexpected" in message


# Another target ---------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_eagle3, load_dflash])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"hidden": 64}, "64, the target's hidden size"),
        ({"vocab": 104}, "vocab_size' is 96; expected 104, the target's vocabulary"),
    ],
)
def test_drafter_of_another_target_is_refused(
    tmp_path: Path, load: Any, target: dict[str, int], said: str
) -> None:
    if load is load_eagle3:
        folders = [(tc.eagle3_config(), tc.eagle3_tensors())]
        folders.append((tc.speculators_config("eagle3", layer={}), tc.eagle3_tensors()))
    else:
        folders = [(tc.dflash_config(), tc.dflash_tensors())]
        folders.append((tc.speculators_config("dflash", layer={}), tc.dflash_tensors()))
    for number, (config, tensors) in enumerate(folders):
        message = refusal(load, tmp_path / str(number), config, tensors, **target)
        assert said in message
        assert "Give the target that this drafter was trained for" in message


def test_drafter_of_a_target_of_other_depth_is_refused(tmp_path: Path) -> None:
    message = dflash_refusal(tmp_path, num_target_layers=36)
    assert "'num_target_layers' is 36; expected 8" in message


def test_narrower_drafter_without_an_embedding_is_refused(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors() | {"fc.weight": tc.random(tc.HIDDEN, 3 * 64)}
    config = tc.eagle3_config(target_hidden_size=64)
    message = refusal(load_eagle3, tmp_path, config, tensors, hidden=64)
    assert "'embed_tokens.weight' is missing, expected with shape [96, 32]" in message


# Fields -----------------------------------------------------------------------------------------

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2; expected 1"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"intermediate_size": "48"}, "'intermediate_size' is \"48\""),
        ({"num_attention_heads": True}, "'num_attention_heads' is true"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3; expected a divisor of the 4"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"draft_vocab_size": None}, "'draft_vocab_size' is missing"),
        ({"draft_vocab_size": 0}, "'draft_vocab_size' is 0"),
        ({"model_type": "deepseek_v3"}, "'model_type' is \"deepseek_v3\"; expected one of llama"),
        ({"hidden_act": "none"}, "hidden_act 'none'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"norm_output": 1}, "'norm_output' is 1; expected true or false"),
        ({"norm_before_fc": True, "fc_norm": True}, "one excludes the other"),
        ({"use_moe": True}, "'use_moe' is true"),
        ({"parallel_drafting": True}, "'parallel_drafting' is true"),
        ({"target_layer_ids": [1, 3, 5]}, "'target_layer_ids' is [1, 3, 5]"),
        ({IDS: [2, 4, 8]}, "layer ids from 0 to 7"),
        ({IDS: [2, 4, -1]}, "layer ids from 0 to 7"),
        ({IDS: [2, 4, 4]}, "distinct layer ids"),
        ({IDS: []}, "distinct layer ids"),
        ({IDS: "2,4,5"}, "distinct layer ids"),
        ({IDS: [2, 4, 5.0]}, "distinct layer ids"),
        ({"eagle_config": {IDS: [1, 3, 7]}}, f"'eagle_config.{IDS}' is [1, 3, 7]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
        ({"eagle_config": 3}, "'eagle_config' is 3; expected an object"),
        (
            {IDS: [2, 4, 5], "eagle_config": {IDS: [2, 4, 5]}},
            f"'eagle_config.{IDS}' is [2, 4, 5]; expected [1, 3, 4]",
        ),
    ],
    ids=str,
)
def test_eagle3_field_that_is_wrong_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    assert said in eagle3_refusal(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dflash_config": None}, "'dflash_config' is missing"),
        ({"own": {"mask_token_id": None}}, "'dflash_config.mask_token_id' is missing"),
        ({"own": {"mask_token_id": 96}}, "'dflash_config.mask_token_id' is 96; expected a token"),
        ({"own": {"target_layer_ids": None}}, "'dflash_config.target_layer_ids' is missing"),
        ({"own": {"target_layer_ids": [1, 3, 8]}}, "layer ids from 0 to 7"),
        ({"block_size": None}, "'block_size' is missing"),
        ({"block_size": 1}, "'block_size' is 1"),
        ({"own": {"block_size": 7}}, "'block_size' is 6; expected 7, as in dflash_config"),
        ({"own": {"selector_rank": 8}}, "DFlash 2"),
        ({"conv_kernel_size": 2}, "DFlash 2"),
        ({"own": {"projector_type": "domino"}}, "'dflash_config.projector_type' is \"domino\""),
        ({"own": {"attention_mode": "mla"}}, "'dflash_config.attention_mode' is \"mla\""),
        ({"own": {"causal": True}}, "'dflash_config.causal' is true; expected false"),
        ({"own": {"novelty": 3}}, "'dflash_config.novelty' is 3"),
        ({"is_causal": True}, "'is_causal' is true"),
        ({"own": {"output_multiplier": "2"}}, "'dflash_config.output_multiplier' is \"2\""),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "kind chunked_attention"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
            "'use_sliding_window' is missing; expected true",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}
            | {"use_sliding_window": True},
            "'sliding_window' is 0",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
            | {"use_sliding_window": True, "own": {"causal": False}},
            "write is_causal instead",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "type 'spiral'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": 3}, "cannot be read as a qwen3 config"),
        ({"partial_rotary_factor": 0.5}, "rotates 0.5 of each head"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "'rope_theta' is 5000.0; expected 1.0"),
        (
            {
                "rope_theta": None,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1.0, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 2.0, "rope_type": "default"},
                },
            },
            "the same parameters for all kinds of layers",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
            "'rope_scaling.factor' is 2.0; expected 4.0",
        ),
    ],
    ids=str,
)
def test_dflash_field_that_is_wrong_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    config = tc.dflash_config(**fields)
    assert said in refusal(load_dflash, tmp_path, config, tc.dflash_tensors())


@pytest.mark.parametrize(
    ("kind", "layer", "fields", "said"),
    [
        ("eagle3", {"num_hidden_layers": 2}, {}, "'transformer_layer_config.num_hidden_layers'"),
        ("eagle3", {"model_type": "laguna"}, {}, "'transformer_layer_config.model_type' is"),
        ("eagle3", {}, {IDS: [2, 4, 8]}, "layer ids from 0 to 7"),
        ("eagle3", {}, {"target_hidden_size": 64}, "'target_hidden_size' is 64; expected 32"),
        ("dflash", {}, {"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids' is mis"),
        ("dflash", {}, {"mask_token_id": None}, "'mask_token_id' is missing"),
        ("dflash", {}, {"mask_token_id": 96}, "'mask_token_id' is 96"),
        ("dflash", {}, {"block_size": 1}, "'block_size' is 1"),
        ("dflash", {}, {"draft_vocab_size": None}, "'draft_vocab_size' is missing"),
        ("dflash", {}, {"target_hidden_size": 64}, "'target_hidden_size' is 64"),
        ("dflash", {"hidden_size": 64}, {}, "'transformer_layer_config.hidden_size' is 64"),
        ("dflash", {"vocab_size": None}, {}, "'transformer_layer_config.vocab_size' is 151936"),
        ("dflash", {}, {"transformer_layer_config": None}, "'transformer_layer_config' is missing"),
    ],
    ids=str,
)
def test_speculators_field_that_is_wrong_is_refused_by_name(
    tmp_path: Path, kind: str, layer: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    load = load_eagle3 if kind == "eagle3" else load_dflash
    config = tc.speculators_config(kind, layer=layer, **fields)
    assert said in refusal(load, tmp_path, config, tc.dflash_tensors())


def test_usual_layers_are_not_taken_from_a_target_too_shallow_for_them(tmp_path: Path) -> None:
    import tiny

    folder = tc.write(tmp_path, tc.eagle3_config(), tc.eagle3_tensors())
    with pytest.raises(CheckpointError, match=r"the usual \[2, 1, -1\] do not suit its 2 layers"):
        load_eagle3(folder, tiny.target())
