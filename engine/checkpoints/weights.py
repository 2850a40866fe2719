"""Reading all tensors of a checkpoint folder, from safetensors or from pickles without code.

Safetensors are preferred where both are there. Pickles are read with `weights_only=True` or not at
all: nothing of a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"
_REFETCH = "fetch the checkpoint again"
_PICKLES = (".bin", ".pt", ".pth")
# A local head beside a drafter (`heads.py`), which is none of its weights.
LOCAL_HEAD = "local_head"


@dataclass(slots=True)
class Weights:
    """All tensors of a checkpoint, on the CPU, as they were saved.

    Attributes:
        folder: where they come from.
        tensors: by name.
        files: name of the file that each stands in.
    """

    folder: Path
    tensors: dict[str, Tensor]
    files: dict[str, str]

    def place(self, name: str) -> str:
        """Path of the file that holds tensor `name`; the folder where none does."""
        return str(self.folder / self.files[name] if name in self.files else self.folder)

    def error(self, name: str, problem: str, remedy: str) -> CheckpointError:
        """The error for a tensor: `problem` continues its name."""
        return CheckpointError(f"{self.place(name)}: tensor {name!r} {problem}; {remedy}")


def read_weights(folder: Path) -> Weights:
    """Read every tensor of `folder`.

    In this order: `model.safetensors`, an index of shards (`*.safetensors.index.json`), the only
    `*.safetensors`, and likewise `pytorch_model.bin`, its index, the only `.bin`, `.pt` or `.pth`.

    Raises:
        CheckpointError: there are no weights, or several files and no index; a file is damaged, a
            pickle holds more than tensors; an index names a tensor or a file that is not there, or
            a file outside the folder.
    """
    for standard, endings in (
        ("model.safetensors", (".safetensors",)),
        ("pytorch_model.bin", _PICKLES),
    ):
        if (folder / standard).is_file():
            return _of_files(folder, [folder / standard])
        ending = Path(standard).suffix
        if index := _only(
            folder, f"*{ending}.index.json", sorted(folder.glob(f"*{ending}.index.json"))
        ):
            return _of_index(folder, index)
        found = sorted(
            f
            for f in folder.iterdir()
            if f.suffix in endings and f.stem != LOCAL_HEAD and f.is_file()
        )
        if file := _only(folder, f"*{ending}", found):
            return _of_files(folder, [file])
    raise CheckpointError(
        f"checkpoint {str(folder)!r} has no weights; expected model.safetensors, shards with "
        f"model.safetensors.index.json, or pytorch_model.bin. {_REFETCH.capitalize()}"
    )


def _only(folder: Path, pattern: str, found: list[Path]) -> Path | None:
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has several files {pattern} ({names}) and nothing says "
            "which to load; keep one, or add the index that belongs to the shards"
        )
    return found[0] if found else None


def _of_files(folder: Path, files: list[Path]) -> Weights:
    weights = Weights(folder, {}, {})
    for file in files:
        for name, tensor in read_file(file).items():
            weights.tensors[name] = tensor
            weights.files[name] = file.name
    return weights


def _of_index(folder: Path, index: Path) -> Weights:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} cannot be read as JSON ({error}); {_REFETCH}") from error
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(
            f"{index}: field 'weight_map' must be an object that names a file per tensor; "
            f"{_REFETCH}"
        )
    for tensor, file in shards.items():
        # Symbolic links are followed, as a hub cache is made of them; names must not leave.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {file!r}, which is no name of a file "
                f"inside the folder; do not use this checkpoint, or {_REFETCH}"
            )
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {file!r}, which is not there; "
                f"{_REFETCH}"
            )
    weights = _of_files(folder, [folder / file for file in sorted(set(shards.values()))])
    for tensor, file in shards.items():
        if weights.files.get(tensor) != file:
            raise CheckpointError(
                f"{folder / file}: tensor {tensor!r} is not in it, although {index.name} says so; "
                f"{_REFETCH}"
            )
    if strange := sorted(set(weights.tensors) - set(shards)):
        raise weights.error(strange[0], f"is not named by {index.name}", _REFETCH)
    return weights


def read_file(file: Path) -> dict[str, Tensor]:
    """All tensors of one file.

    Raises:
        CheckpointError: it is damaged, or a pickle that holds more than tensors.
    """
    return _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the weights it stands for; fetch them with "
                "`git lfs pull` in its repository, or download the file from the hub"
            )
    try:
        return load_file(file)
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}): it is damaged or incomplete; "
            f"{_REFETCH}"
        ) from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is a pickle that holds more than tensors, or is damaged, and was not loaded: "
            "reading it could run code. Convert it to safetensors where you trust it, and load that"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{file} cannot be read as PyTorch weights ({error}): it is damaged or incomplete; "
            f"{_REFETCH}"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise CheckpointError(
            f"{file} is no mapping of names to tensors; save the model's state_dict, preferably as "
            "safetensors"
        )
    return content
