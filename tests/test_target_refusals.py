"""Targets that cannot be driven, and models that cannot be loaded, are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor

from whiflash_agents.engine.errors import (
    CheckpointError,
    ModelNotFoundError,
    SettingsError,
    UnsupportedTargetError,
)
from whiflash_agents.engine.target import Target

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def causal(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config).float()


# Refusals ----------------------------------------------------------------------------------------


def bart() -> Any:
    sizes = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, **sizes, **heads
    )
    return transformers.BartForConditionalGeneration(config).float()


def chunked() -> Any:
    net = tiny.model("llama")
    net.config.layer_types = ["full_attention", "chunked_attention"]
    return net


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent": (
        lambda: causal(
            transformers.MambaConfig(
                vocab_size=96, hidden_size=32, state_size=8, num_hidden_layers=1
            )
        ),
        "MambaForCausalLM keeps recurrent state",
    ),
    "partly recurrent": (
        lambda: causal(
            transformers.Qwen3NextConfig(
                **SIZES,
                head_dim=8,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                layer_types=["linear_attention", "full_attention"],
            )
        ),
        "Qwen3NextForCausalLM keeps recurrent state",
    ),
    "softcap": (
        lambda: causal(transformers.Gemma2Config(**SIZES, head_dim=8)),
        "Gemma2Attention asks for attention with 'softcap'",
    ),
    "attention sinks": (
        lambda: causal(
            transformers.GptOssConfig(
                **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1
            )
        ),
        "GptOssAttention asks for attention with 's_aux'",
    ),
    "encoder-decoder": (bart, "BartForConditionalGeneration is an encoder-decoder"),
    "unknown layer kind": (chunked, "LlamaForCausalLM has layers of kind chunked_attention"),
    "own attention": (
        lambda: causal(
            transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
        ),
        "BloomForCausalLM does not let its attention be replaced",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_target_that_cannot_be_driven_is_refused_by_name(kind: str) -> None:
    build, message = UNSUPPORTED[kind]
    with pytest.raises(UnsupportedTargetError, match=message):
        Target(build())


def rewired(change: Callable[[Any], Callable[..., Any]]) -> Any:
    """A llama whose attention modules are called through `change(attention)`."""
    net = tiny.model("llama")
    for layer in net.model.layers:
        layer.self_attn.forward = change(layer.self_attn)
    return net


def test_an_attention_that_drops_the_plan_is_refused() -> None:
    def change(attention: Any) -> Callable[..., Any]:
        forward = attention.forward

        def without_plan(hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
            return forward(hidden_states, position_embeddings, None)

        return without_plan

    with pytest.raises(UnsupportedTargetError, match="LlamaAttention does not pass keyword"):
        Target(rewired(change))


def test_an_attention_that_never_asks_the_registry_is_refused() -> None:
    def change(attention: Any) -> Callable[..., Any]:
        return lambda hidden_states, **_: (attention.o_proj(attention.q_proj(hidden_states)), None)

    with pytest.raises(UnsupportedTargetError, match=r"attention ran in layers \[\], expected all"):
        Target(rewired(change))


def test_an_attention_that_mixes_tokens_by_itself_is_refused() -> None:
    """As an undeclared convolution would: it sees the neighbour in the pack, whoever that is."""

    def change(attention: Any) -> Callable[..., Any]:
        forward = attention.forward

        def mixing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(hidden_states.roll(1, dims=1), *args, **kwargs)

        return mixing

    with pytest.raises(UnsupportedTargetError, match="does not give the same logits"):
        Target(rewired(change))


def test_a_padding_token_without_embedding_does_not_spoil_the_check_at_load() -> None:
    """Tokens with a zero embedding have no logits to compare, where no layer has a bias."""
    config = transformers.Olmo2Config(**{**SIZES, "pad_token_id": 1})
    target = Target(causal(config))
    assert target.model.get_input_embeddings().weight[1].abs().sum() == 0


# Loading -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model, to be spoiled."""
    return shutil.copytree(saved, tmp_path / "model")


def test_a_saved_model_loads_with_its_name_limits_and_stop_tokens(saved: Path) -> None:
    target = Target.load(saved, dtype="float32")
    assert target.name == "tiny-llama"
    assert (target.vocab_size, target.max_context) == (tiny.VOCAB, 512)
    assert target.eos_token_ids == (tiny.EOS,)
    assert target.dtype == torch.float32
    assert Target.load(saved, dtype="bfloat16", name="other").name == "other"


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "wanted"),
    [(5, 2, (5,)), ([5, 7], 2, (5, 7)), (None, 2, (2,)), (None, [2, 3], (2, 3)), (None, None, ())],
)
def test_eos_comes_from_the_generation_config_else_from_the_config(
    in_generation_config: Any, in_config: Any, wanted: tuple[int, ...]
) -> None:
    net = tiny.model("llama")
    net.generation_config.eos_token_id = in_generation_config
    net.config.eos_token_id = in_config
    assert Target(net).eos_token_ids == wanted


def test_eos_can_be_given() -> None:
    assert Target(tiny.model("llama"), eos_token_ids=[9, 8]).eos_token_ids == (9, 8)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Target.load(tmp_path / "nowhere")


def test_a_hub_name_is_refused_at_once_and_says_how_to_fetch_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'owner/nope'.*resolve_model") as caught:
        Target.load("owner/nope")
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_loading_says_nothing_and_leaves_transformers_settings_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        Target.load(folder)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFoundError):
            Target.load(folder)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        Target.load(folder)


def test_a_config_of_an_unknown_architecture_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with pytest.raises(ModelNotFoundError, match="unheard-of"):
        Target.load(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Target.load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"belong to another config\.json"):
        Target.load(folder)


def test_missing_weights_are_not_replaced_by_random_ones(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        Target.load(folder)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_dtype_is_refused(saved: Path) -> None:
    with pytest.raises(SettingsError, match="dtype='int8'"):
        Target.load(saved, dtype="int8")
