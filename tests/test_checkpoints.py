"""Reading drafter checkpoints: every public layout and every flag in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch
from tiny_checkpoints import SLIDING, assert_holds

from whiflash_agents.engine.checkpoints import (
    load_dflash,
    load_eagle3,
    save_dflash,
)
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Model


def eagle3(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Eagle3Model:
    return load_eagle3(tc.write(folder, config, tensors), tc.target())


def dflash(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> DFlashModel:
    return load_dflash(tc.write(folder, config, tensors), tc.target())


# EAGLE-3, original ------------------------------------------------------------------------------


def test_original_eagle3_loads_with_the_papers_layers(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    model = eagle3(tmp_path, tc.eagle3_config(), tensors)
    assert model.config == tc.EAGLE3
    assert_holds(model, tensors, ("", ""))
    assert torch.equal(model.head.target_ids(torch.arange(3)), torch.tensor([0, 2, 4]))


def test_loaded_network_is_ready_to_run_in_the_targets_type(tmp_path: Path) -> None:
    folder = tc.write(tmp_path, tc.eagle3_config(), tc.eagle3_tensors())
    model = load_eagle3(folder, tc.target(torch.bfloat16))
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert model.head.d2t.dtype == torch.int64
    assert all(buffer.dtype == torch.float32 for buffer in model.rotary.buffers())
    hidden = model(
        torch.ones(5, 3 * tc.HIDDEN, dtype=torch.bfloat16),
        torch.ones(5, tc.HIDDEN, dtype=torch.bfloat16),
        torch.arange(5),
    )
    assert model.logits(hidden).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),  # as they stand
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),  # outputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3, 6]}}, (0, 4, 7)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
                "eagle_config": {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
                },
            },
            (2, 4, 7),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}, (1, 2, 3, 4, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
    ],
)
def test_original_eagle3_reads_the_layers_that_its_config_names(
    tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    model = eagle3(tmp_path, tc.eagle3_config(**fields), tc.eagle3_tensors(features=len(layers)))
    assert model.config.feature_layers == layers


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "Qwen3Eagle3Model", None])
def test_original_eagle3_goes_by_many_architecture_names(tmp_path: Path, name: str | None) -> None:
    names = ["LlamaForCausalLM"] if name is None else [name]
    model = eagle3(tmp_path, tc.eagle3_config(architectures=names), tc.eagle3_tensors())
    assert isinstance(model, Eagle3Model)


def test_query_and_key_norms_are_there_when_their_tensors_are(tmp_path: Path) -> None:
    model = eagle3(tmp_path, tc.eagle3_config(), tc.eagle3_tensors(qk_norm=True))
    assert model.config.layer.qk_norm
    assert model.midlayer.self_attn.q_norm is not None


FLAG_TENSORS = {
    "norm_before_residual": {},
    "norm_output": {},
    "norm_before_fc": {"input_norm.weight": tc.random(3 * tc.HIDDEN)},
    "fc_norm": {f"fc_norm.{n}.weight": tc.random(tc.HIDDEN) for n in range(3)},
}


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("flag", FLAG_TENSORS)
def test_flag_is_read_with_its_tensors(tmp_path: Path, layout: str, flag: str) -> None:
    if layout == "original":
        config, prefix = tc.eagle3_config(**{flag: True}), "midlayer."
    else:
        layer = {"model_type": "llama"}
        config = tc.speculators_config("eagle3", layer=layer, **{flag: True})
        prefix = "layers.0."
    tensors = tc.eagle3_tensors(prefix=prefix) | FLAG_TENSORS[flag]
    model = eagle3(tmp_path, config, tensors)
    assert model.config == replace(tc.EAGLE3, **{flag: True})
    assert_holds(model, tensors, ("midlayer.", prefix))


def test_biases_are_read(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    for name in [n for n in tensors if "_proj." in n]:
        tensors[name.replace("weight", "bias")] = tc.random(len(tensors[name]))
    model = eagle3(tmp_path, tc.eagle3_config(attention_bias=True, mlp_bias=True), tensors)
    assert_holds(model, tensors, ("", ""))
    assert model.midlayer.mlp.down_proj.bias is not None
    assert model.midlayer.self_attn.o_proj.bias is not None


def test_embedding_is_shared_when_it_is_the_targets(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    same = eagle3(
        tmp_path / "same", tc.eagle3_config(), tensors | {"embed_tokens.weight": tc.embedding()}
    )
    assert same.embed_tokens is None
    assert not same.config.own_embedding
    changed = tc.embedding()
    changed[3, 4] += 0.01
    own = eagle3(tmp_path / "own", tc.eagle3_config(), tensors | {"embed_tokens.weight": changed})
    assert own.config.own_embedding
    assert torch.equal(own.embed_tokens.weight, changed)


def test_embedding_is_shared_when_it_is_the_targets_in_another_type(tmp_path: Path) -> None:
    target = tc.target(torch.bfloat16)
    weight = target.model.get_input_embeddings().weight.detach().float()
    tensors = tc.eagle3_tensors() | {"embed_tokens.weight": weight}
    folder = tc.write(tmp_path, tc.eagle3_config(), tensors)
    assert load_eagle3(folder, target).embed_tokens is None


def test_drafter_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    target = tc.target(hidden=64)
    tensors = tc.eagle3_tensors() | {
        "fc.weight": tc.random(tc.HIDDEN, 3 * 64),
        "embed_tokens.weight": tc.random(tc.VOCAB, tc.HIDDEN),
    }
    config = tc.eagle3_config(target_hidden_size=64)
    model = load_eagle3(tc.write(tmp_path, config, tensors), target)
    assert model.project(torch.ones(2, 3 * 64)).shape == (2, tc.HIDDEN)
    assert model.config.own_embedding


def test_full_vocabulary_needs_no_maps_and_takes_them_as_identity(tmp_path: Path) -> None:
    config = tc.eagle3_config(draft_vocab_size=tc.VOCAB)
    tensors = tc.eagle3_tensors() | {"lm_head.weight": tc.random(tc.VOCAB, tc.HIDDEN)}
    tensors |= {
        "d2t": torch.zeros(tc.VOCAB, dtype=torch.int64),
        "t2d": torch.ones(tc.VOCAB, dtype=torch.bool),
    }
    assert eagle3(tmp_path / "with", config, tensors).head.d2t is None
    del tensors["d2t"], tensors["t2d"]
    assert eagle3(tmp_path / "without", config, tensors).head.d2t is None


def test_saved_rotary_frequencies_are_not_needed(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": tc.random(4)}
    assert eagle3(tmp_path, tc.eagle3_config(), tensors).config == tc.EAGLE3


def test_absent_fields_take_the_meaning_of_their_config_class(tmp_path: Path) -> None:
    config = tc.eagle3_config()
    del config["rope_theta"], config["rms_norm_eps"], config["head_dim"]
    layer = eagle3(tmp_path, config, tc.eagle3_tensors()).config.layer
    assert layer.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert (layer.rms_norm_eps, layer.head_dim) == (1e-6, tc.HIDDEN // tc.HEADS)


# DFlash, z-lab ----------------------------------------------------------------------------------


def test_zlab_dflash_loads(tmp_path: Path) -> None:
    tensors = tc.dflash_tensors()
    model = dflash(tmp_path, tc.dflash_config(), tensors)
    assert model.config == tc.DFLASH
    assert_holds(model, tensors, ("", ""))
    assert model.head is None
    assert model.embed_tokens is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 7000.0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}},
        {"rope_theta": 7000.0, "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}},
        {"rope_theta": None, "rope_scaling": {"rope_theta": 7000.0, "rope_type": "default"}},
        {
            "rope_theta": None,
            "rope_parameters": {
                kind: {"rope_theta": 7000.0, "rope_type": "default"}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ],
)
def test_rotary_base_is_found_wherever_it_stands(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = dflash(tmp_path, tc.dflash_config(**rope), tc.dflash_tensors())
    assert model.config.layers.rope == {"rope_theta": 7000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rotary_embedding_survives_a_round_trip(
    tmp_path: Path, scaling: dict[str, Any]
) -> None:
    plain = dflash(tmp_path / "plain", tc.dflash_config(), tc.dflash_tensors())
    model = dflash(tmp_path / "scaled", tc.dflash_config(rope_scaling=scaling), tc.dflash_tensors())
    assert model.config.layers.rope["rope_type"] == scaling.get("rope_type", "yarn")
    save_dflash(model, tmp_path / "again")
    again = load_dflash(tmp_path / "again", tc.target())
    rotations = [m.rotary(torch.arange(300), torch.float32)[0] for m in (plain, model, again)]
    assert torch.equal(rotations[1], rotations[2])
    assert not torch.allclose(rotations[0], rotations[1])


def test_block_size_may_stand_inside_dflash_config(tmp_path: Path) -> None:
    config = tc.dflash_config(block_size=None, own={"block_size": 9})
    assert dflash(tmp_path, config, tc.dflash_tensors()).config.block_size == 9


@pytest.mark.parametrize(("is_causal", "causal"), [(None, True), (False, False)])
def test_sliding_layers_are_causal_in_the_block_unless_the_config_denies_it(
    tmp_path: Path, is_causal: bool | None, causal: bool
) -> None:
    config = tc.dflash_config(**SLIDING, is_causal=is_causal)
    found = dflash(tmp_path, config, tc.dflash_tensors()).config
    assert found.layers.sliding == (True, False)
    assert found.layers.sliding_window == 7
    assert found.sliding_causal is causal
    assert found.window_from == "slot"


def test_causal_is_no_contradiction_where_all_layers_slide(tmp_path: Path) -> None:
    config = tc.dflash_config(
        **SLIDING | {"layer_types": ["sliding_attention"] * 2}, is_causal=True
    )
    assert dflash(tmp_path, config, tc.dflash_tensors()).config.sliding_causal


@pytest.mark.parametrize("inside", [True, False])
def test_scales_and_soft_cap_are_read_from_either_place(tmp_path: Path, inside: bool) -> None:
    values = {
        "input_embedding_scale": 0.5,
        "output_multiplier": 2,
        "final_logit_softcapping": 30.0,
    }
    config = tc.dflash_config(**({"own": values} if inside else values))
    found = dflash(tmp_path, config, tc.dflash_tensors()).config
    assert (found.embedding_scale, found.output_multiplier, found.logit_softcap) == (0.5, 2.0, 30.0)


def test_soft_cap_of_zero_is_none(tmp_path: Path) -> None:
    config = tc.dflash_config(own={"final_logit_softcapping": 0.0})
    assert dflash(tmp_path, config, tc.dflash_tensors()).config.logit_softcap is None


def test_length_head_of_adaflash_is_recognised_by_name(tmp_path: Path) -> None:
    head = {f"thresh_head_two_model.{n}.weight": tc.random(4, 4) for n in (0, 2)}
    own = {
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": 256,
        "thresh_head_direct_len": False,
    }
    model = dflash(tmp_path, tc.dflash_config(own=own), tc.dflash_tensors() | head)
    assert model.config.unused_length_head == tuple(head)
    assert model.length_head is None


def test_copies_of_the_targets_embedding_and_head_are_dropped(tmp_path: Path) -> None:
    copies = {"embed_tokens.weight": tc.embedding(), "lm_head.weight": tc.head()}
    model = dflash(tmp_path, tc.dflash_config(), tc.dflash_tensors() | copies)
    assert model.config == tc.DFLASH
