"""Writing drafter checkpoints: what a round trip keeps, and what is not written."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch
from safetensors.torch import load_file

from whiflash_agents.engine.checkpoints import (
    load_dflash,
    load_eagle3,
    save_dflash,
    save_eagle3,
)
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Model
from whiflash_agents.engine.drafters.layers import LayerConfig
from whiflash_agents.engine.errors import CheckpointError, OutputError


def build(make: type, config: Any) -> Any:
    torch.manual_seed(3)
    model = make(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    head = model.head
    if head is not None and head.d2t is not None:
        head.d2t.copy_(tc.vocabulary()["d2t"])
    return model


def assert_same(one: Any, other: Any) -> None:
    assert one.config == other.config
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feature_layers": (0, 2, 4, 6, 7)},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"own_embedding": True},
        {"draft_vocab_size": tc.VOCAB},
        {"layer": replace(tc.LAYER, qk_norm=True)},
        {"layer": replace(tc.LAYER, attention_bias=True, mlp_bias=True, hidden_act="gelu")},
    ],
    ids=str,
)
def test_eagle3_survives_a_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = build(Eagle3Model, replace(tc.EAGLE3, **changes))
    save_eagle3(model, tmp_path / "drafter")
    assert_same(load_eagle3(tmp_path / "drafter", tc.target()), model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_scale": 0.5, "output_multiplier": 2.0, "logit_softcap": 30.0},
        {"layers": replace(tc.DFLASH.layers, sliding=(True, False), sliding_window=7)},
        {
            "layers": replace(tc.DFLASH.layers, sliding=(True, True), sliding_window=7),
            "sliding_causal": False,
        },
        {"layers": replace(tc.DFLASH.layers, attention_bias=True)},
        {"feature_layers": (1, 8), "block_size": 2, "mask_token_id": 0},
    ],
    ids=str,
)
def test_dflash_survives_a_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = build(DFlashModel, replace(tc.DFLASH, **changes))
    save_dflash(model, tmp_path / "drafter")
    assert_same(load_dflash(tmp_path / "drafter", tc.target()), model)


def test_saved_configs_say_what_other_engines_read(tmp_path: Path) -> None:
    save_eagle3(build(Eagle3Model, tc.EAGLE3).bfloat16(), tmp_path / "eagle3")
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        },
        "draft_vocab_size": tc.DRAFT_VOCAB,
        "target_hidden_size": tc.HIDDEN,
        "rope_theta": 5000.0,
        "norm_output": False,
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in wanted} == wanted
    save_dflash(build(DFlashModel, tc.DFLASH), tmp_path / "dflash")
    config = json.loads((tmp_path / "dflash" / "config.json").read_text())
    wanted = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": {"mask_token_id": tc.MASK, "target_layer_ids": [1, 3, 5]},
        "block_size": 6,
        "num_target_layers": tc.LAYERS,
        "rope_theta": 5000.0,
        "rope_scaling": None,
    }
    assert {name: config[name] for name in wanted} == wanted


def test_saved_eagle3_has_the_original_names_and_both_maps(tmp_path: Path) -> None:
    save_eagle3(build(Eagle3Model, tc.EAGLE3), tmp_path / "drafter")
    written = load_file(tmp_path / "drafter" / "model.safetensors")
    expected = tc.eagle3_tensors()
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in expected.items()}
    assert torch.equal(written["t2d"], expected["t2d"])
    assert torch.equal(written["d2t"], expected["d2t"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft_vocab_size": tc.DRAFT_VOCAB}, "an output head of its own"),
        ({"own_embedding": True}, "a token embedding of its own"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        (
            {
                "layers": replace(tc.DFLASH.layers, sliding=(True, False), sliding_window=7),
                "window_from": "bonus",
            },
            "window_from",
        ),
        ({"layers": replace(tc.DFLASH.layers, qk_norm=False)}, "query and key norms"),
        ({"layers": replace(tc.DFLASH.layers, mlp_bias=True)}, "mlp_bias"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"feature_layers": (0, 2)}, "embedding's output"),
    ],
)
def test_dflash_that_zlabs_layout_cannot_express_is_not_written(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        save_dflash(build(DFlashModel, replace(tc.DFLASH, **changes)), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (replace(tc.LAYER, sliding=(True,), sliding_window=7), "sliding"),
        (replace(tc.LAYER, num_layers=2), "num_layers"),
    ],
)
def test_eagle3_that_its_layout_cannot_express_is_not_written(
    tmp_path: Path, layer: LayerConfig, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        save_eagle3(build(Eagle3Model, replace(tc.EAGLE3, layer=layer)), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


def test_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    model = build(DFlashModel, tc.DFLASH)
    (tmp_path / "drafter").mkdir()
    save_dflash(model, tmp_path / "drafter")  # an empty folder will do
    before = {f.name: f.read_bytes() for f in (tmp_path / "drafter").iterdir()}
    with pytest.raises(OutputError, match="holds something already"):
        save_dflash(model, tmp_path / "drafter")
    assert {f.name: f.read_bytes() for f in (tmp_path / "drafter").iterdir()} == before


def test_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match="no space left"):
        save_dflash(build(DFlashModel, tc.DFLASH), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


def test_written_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_eagle3(build(Eagle3Model, tc.EAGLE3), tmp_path / "drafter")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "drafter").iterdir()}
    assert modes == {0o640}
