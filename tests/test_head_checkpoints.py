"""Heads on disk: what is read, what is told and not used, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import randomise

from whiflash_agents.engine.checkpoints import load_dflash, save_dflash
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.length_head import LengthHead
from whiflash_agents.engine.drafters.local_head import LocalHead, LocalHeadConfig
from whiflash_agents.engine.errors import CheckpointError

PREFIX = "thresh_head_two_model."
OWN = {
    "use_thresh_head_two_model": True,
    "thresh_head_bottleneck_dim": 16,
    "thresh_head_direct_len": True,
}


def length_tensors(width: int = 16, hidden: int = tc.HIDDEN) -> dict[str, torch.Tensor]:
    """As AdaFlash names them."""
    return {
        PREFIX + "down.weight": tc.random(width, 2 * hidden),
        PREFIX + "down.bias": tc.random(width),
        PREFIX + "res.0.weight": tc.random(width, width),
        PREFIX + "res.0.bias": tc.random(width),
        PREFIX + "out.weight": tc.random(1, width),
        PREFIX + "out.bias": tc.random(1),
    }


def load(folder: Path, own: dict[str, Any], head: dict[str, torch.Tensor]) -> Any:
    path = tc.write(folder / "drafter", tc.dflash_config(own=own), tc.dflash_tensors() | head)
    return load_dflash(path, tc.target())


def with_heads() -> Any:
    model = DFlashModel(tc.DFLASH)
    model.local_head = LocalHead(LocalHeadConfig(tc.HIDDEN, tc.VOCAB, 5, state_size=8, rank=4))
    model.length_head = LengthHead(tc.HIDDEN, 16)
    randomise(model, 4)
    return model


def test_the_length_head_of_adaflash_is_used(tmp_path: Path) -> None:
    tensors = length_tensors()
    model = load(tmp_path, OWN, tensors)
    assert model.config.unused_length_head == ()
    for name, tensor in model.length_head.state_dict().items():
        assert torch.equal(tensor, tensors[PREFIX + name])
    assert not any(p.requires_grad for p in model.parameters())
    wide = {n: v for n, v in OWN.items() if n != "thresh_head_bottleneck_dim"}
    assert load(tmp_path, wide, length_tensors(256)).length_head.down.out_features == 256


@pytest.mark.parametrize("case", ["threshold", "not said", "another shape"])
def test_other_length_heads_are_told_and_not_used(tmp_path: Path, case: str) -> None:
    own, tensors = dict(OWN), length_tensors()
    if case == "threshold":
        own["thresh_head_direct_len"] = False
    elif case == "not said":
        del own["thresh_head_direct_len"]
    else:
        tensors[PREFIX + "mid.weight"] = tc.random(4, 4)
    model = load(tmp_path, own, tensors)
    assert model.length_head is None
    assert model.config.unused_length_head == tuple(sorted(tensors))


def test_a_length_head_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, OWN | {"thresh_head_bottleneck_dim": 12}, length_tensors())
    assert "'thresh_head_two_model.down.weight' has shape [16, 64], expected [12, 64]" in str(
        error.value
    )
    with pytest.raises(CheckpointError, match=r"down\.weight' has shape \[16, 32\]"):
        load(tmp_path, OWN, length_tensors(hidden=16))


def test_heads_survive_a_round_trip_and_the_drafter_is_the_same_without(tmp_path: Path) -> None:
    model = with_heads()
    save_dflash(model, tmp_path / "drafter")
    assert {path.name for path in (tmp_path / "drafter").iterdir()} == {
        *("config.json", "model.safetensors", "local_head.json", "local_head.safetensors")
    }
    again = load_dflash(tmp_path / "drafter", tc.target())
    assert again.local_head is not None
    assert model.local_head is not None
    assert again.local_head.config == model.local_head.config
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())["dflash_config"]
    assert {name: config[name] for name in OWN} == OWN
    names = set(load_file(tmp_path / "drafter" / "model.safetensors"))
    assert {n for n in names if n.startswith("thresh")} == set(length_tensors())
    assert not any("local" in name for name in names)
    # Without them nothing of either is written.
    model.local_head = model.length_head = None
    save_dflash(model, tmp_path / "plain")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        *("config.json", "model.safetensors")
    }
    plain = load_dflash(tmp_path / "plain", tc.target())
    assert (plain.local_head, plain.length_head) == (None, None)
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_local_head_lies_beside_weights_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    save_dflash(with_heads(), folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert load_dflash(folder, tc.target()).local_head is not None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 48}, "'hidden_size' is 48; expected 32, the target's hidden size"),
        ({"vocab_size": 50}, "'vocab_size' is 50; expected 96, the target's vocabulary"),
        ({"depth": 15}, "'depth' is 15; expected 5, the tokens that a block of this drafter"),
        ({"version": 2}, "'version' is 2; expected 1"),
        ({"rank": 6}, "tensor 'project.weight' has shape [4, 8], expected [6, 8]"),
        ({"state_size": 0}, "'state_size' is 0; expected a whole number of at least 1"),
        ({"weight": -1.0}, "'weight' is -1.0; expected a number from 0 to 10"),
        ({"weight": None}, "'weight' is missing"),
    ],
    ids=str,
)
def test_a_local_head_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    save_dflash(with_heads(), tmp_path / "drafter")
    file = tmp_path / "drafter" / "local_head.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError) as error:
        load_dflash(tmp_path / "drafter", tc.target())
    assert told in str(error.value)
    assert "local_head" in str(error.value)


def test_half_a_local_head_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    for missing in ("local_head.json", "local_head.safetensors"):
        folder = tmp_path / missing
        save_dflash(with_heads(), folder)
        (folder / missing).unlink()
        with pytest.raises(CheckpointError, match=f"{missing} is not"):
            load_dflash(folder, tc.target())
    folder = tmp_path / "damaged"
    save_dflash(with_heads(), folder)
    tensors = load_file(folder / "local_head.safetensors")
    save_file(tensors | {"unigram": tensors["unigram"] * torch.nan}, folder / "x.safetensors")
    (folder / "x.safetensors").replace(folder / "local_head.safetensors")
    with pytest.raises(CheckpointError, match="'unigram' holds NaN"):
        load_dflash(folder, tc.target())
    (folder / "local_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_dflash(folder, tc.target())


def test_a_head_of_a_drafter_with_other_blocks_is_refused(tmp_path: Path) -> None:
    save_dflash(with_heads(), tmp_path / "one")
    save_dflash(DFlashModel(replace(tc.DFLASH, block_size=4)), tmp_path / "other")
    for name in ("local_head.json", "local_head.safetensors"):
        (tmp_path / "one" / name).rename(tmp_path / "other" / name)
    with pytest.raises(CheckpointError, match="'depth' is 5; expected 3"):
        load_dflash(tmp_path / "other", tc.target())
