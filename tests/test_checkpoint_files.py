"""Weights and config files of checkpoints: which are read, and which are refused unexecuted."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tc
import torch
from safetensors.torch import save_file

from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
from whiflash_agents.engine.checkpoints.weights import read_weights
from whiflash_agents.engine.errors import CheckpointError

TENSORS = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64), "c": torch.ones(1)}


def shards(folder: Path, ending: str, weight_map: dict[str, Any]) -> None:
    standard = "model" if ending == "safetensors" else "pytorch_model"
    for file, names in (("one", ("a",)), ("two", ("b", "c"))):
        part = {name: TENSORS[name] for name in names}
        if ending == "safetensors":
            save_file(part, folder / f"{file}.safetensors")
        else:
            torch.save(part, folder / f"{file}.bin")
    index = folder / f"{standard}.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def read(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights(folder).tensors


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_weights(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "drafter.safetensors", "pytorch_model.bin", "weights.pt"]
)
def test_one_file_is_read_under_any_usual_name(tmp_path: Path, name: str) -> None:
    if name.endswith("safetensors"):
        save_file(TENSORS, tmp_path / name)
    else:
        torch.save(TENSORS, tmp_path / name)
    found = read(tmp_path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[key], TENSORS[key]) for key in TENSORS)
    assert read_weights(tmp_path).place("a") == str(tmp_path / name)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_are_read_by_their_index(tmp_path: Path, ending: str) -> None:
    shards(tmp_path, ending, {"a": f"one.{ending}", "b": f"two.{ending}", "c": f"two.{ending}"})
    weights = read_weights(tmp_path)
    assert weights.tensors.keys() == TENSORS.keys()
    assert weights.files == {"a": f"one.{ending}", "b": f"two.{ending}", "c": f"two.{ending}"}


def test_shards_may_be_symbolic_links_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "1234")
    (folder / "x.safetensors").symlink_to(blobs / "1234")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert read(folder).keys() == {"a"}


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert torch.equal(read(tmp_path)["a"], torch.ones(2))


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        return os.open, (str(self.mark), os.O_CREAT | os.O_WRONLY)


@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, save: str) -> None:
    mark = tmp_path / "executed"
    content = {"a": torch.ones(2), "b": Payload(mark)}
    file = tmp_path / "pytorch_model.bin"
    if save == "torch":
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    message = refusal(tmp_path)
    assert str(file) in message
    assert "could run code" in message
    assert "safetensors" in message
    assert not mark.exists()
    torch.load(file, weights_only=False) if save == "torch" else pickle.loads(file.read_bytes())
    assert mark.exists()  # the payload is a real one


@pytest.mark.parametrize(
    "content", [torch.ones(2), {"a": 1.0}, {1: torch.ones(2)}, [torch.ones(1)]]
)
def test_pickle_of_anything_but_named_tensors_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    assert "no mapping of names to tensors" in refusal(tmp_path)


@pytest.mark.parametrize("outside", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", 7])
def test_index_that_names_a_file_outside_the_folder_is_refused(
    tmp_path: Path, outside: Any
) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file({"a": torch.ones(2)}, place / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": outside}}))
    message = refusal(folder)
    assert str(index) in message
    assert repr(outside) in message
    assert "inside the folder" in message


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (
            {"a": "one.safetensors", "b": "gone.safetensors"},
            "'gone.safetensors', which is not there",
        ),
        (
            {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"},
            "one.safetensors: tensor 'b' is not in it",
        ),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "tensor 'c' is not named by"),
        ({}, "'weight_map' must be an object"),
        ([], "'weight_map' must be an object"),
    ],
)
def test_index_that_does_not_fit_its_shards_is_refused(
    tmp_path: Path, weight_map: Any, said: str
) -> None:
    shards(tmp_path, "safetensors", weight_map)
    assert said in refusal(tmp_path)


def test_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json cannot be read as JSON" in refusal(tmp_path)


def test_several_weight_files_without_an_index_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file(TENSORS, tmp_path / name)
    assert "(x.safetensors, y.safetensors)" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_damaged_weights_are_refused_by_file(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    file = tmp_path / name
    if content is None:  # truncated
        save_file(TENSORS, file) if name.endswith("safetensors") else torch.save(TENSORS, file)
        content = file.read_bytes()[:-40]
    file.write_bytes(content)
    message = refusal(tmp_path)
    assert str(file) in message
    assert "damaged" in message


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("none here")
    assert "has no weights" in refusal(tmp_path)


@pytest.mark.parametrize("load", [load_eagle3, load_dflash])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read as JSON"),
        ("\xff", "config.json cannot be read as JSON"),
        ("[1]", "config.json holds [1]; expected a JSON object"),
    ],
)
def test_config_that_cannot_be_read_is_refused(
    tmp_path: Path, load: Any, text: str | None, said: str
) -> None:
    tc.write(tmp_path, None, tc.eagle3_tensors())
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tc.target())
    assert said in str(caught.value)


@pytest.mark.parametrize("load", [load_eagle3, load_dflash])
def test_path_that_is_no_folder_is_refused(tmp_path: Path, load: Any) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "gone", tc.target())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load(tmp_path / "file", tc.target())


def test_drafter_loads_the_same_from_safetensors_shards_and_bin(tmp_path: Path) -> None:
    tensors = tc.eagle3_tensors()
    whole = tc.write(tmp_path / "whole", tc.eagle3_config(), tensors)
    pickled = tc.write(tmp_path / "bin", tc.eagle3_config(), {})
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    sharded = tc.write(tmp_path / "shards", tc.eagle3_config(), {})
    (sharded / "model.safetensors").unlink()
    weight_map = {}
    for number, name in enumerate(tensors):
        file = f"model-{number % 3}.safetensors"
        weight_map[name] = file
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    states = [load_eagle3(f, tc.target()).state_dict() for f in (whole, pickled, sharded)]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], states[0][name]) for name in state)
