"""Checkpoints of a training run: weights and moments as safetensors, and what they are of as JSON.

A checkpoint is a folder that appears whole or not at all. The newest two are kept: should the disk
have lost the end of one, the other is there. No pickles: a checkpoint cannot run code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from ..errors import ChangedError, OutputError
from .identity import changes, plain

VERSION = 1
_STATE, _TENSORS = "state.json", "state.safetensors"
_KEPT = 2


@dataclass(slots=True)
class TrainingState:
    """How far a run has come.

    Attributes:
        step: steps done.
        seconds: that they took, over all sittings.
        history: what held-out texts said on the way, oldest first.
    """

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run, in a folder of their own.

    Args:
        folder: created with the first checkpoint.
        identity: all that decides what is learnt, as JSON takes it; a run goes on from checkpoints
            of the same identity only.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._identity = plain({"version": VERSION, **identity})

    def save(
        self, state: TrainingState, network: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Path:
        """Write a checkpoint, then remove all but the newest two.

        Raises:
            OutputError: it cannot be written; the earlier ones are still there.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        place = self.folder / f"step-{state.step:08d}"
        values = {
            "step": state.step,
            "seconds": state.seconds,
            "history": state.history,
            "identity": self._identity,
        }
        tensors = {f"weights.{n}": _own(t) for n, t in network.state_dict().items()}
        for name, parameter in network.named_parameters():
            for kind, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{kind}.{name}"] = _own(value)
        temporary = self.folder / f".{place.name}-{uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            save_file(tensors, temporary / _TENSORS)
            (temporary / _STATE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            for name in (_TENSORS, _STATE):
                _sync(temporary / name)
            if place.exists():  # a damaged one of that step, or the same again
                shutil.rmtree(place)
            temporary.rename(place)
            _sync(self.folder)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"checkpoint {place} cannot be written: {error}. Make room, and go on from the "
                "last one"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self._found()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return place

    def restore(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState | None:
        """Load the newest checkpoint that is whole; None if there is none at all.

        Raises:
            ChangedError: it is of other settings, texts or networks.
            OutputError: there are checkpoints, and none of them can be read.
        """
        found = self._found()
        reasons = []
        for place in reversed(found):
            try:
                values, tensors = _read(place)
            except (OSError, ValueError) as error:
                reasons.append(f"{place.name}: {error}")
                continue
            _refuse_changes(place, self._identity, values["identity"])
            self._load(place, tensors, network, optimizer)
            return TrainingState(values["step"], values["seconds"], values["history"])
        if not found:
            return None
        raise OutputError(
            f"no checkpoint in {self.folder} can be read ({'; '.join(reasons)}); begin anew "
            "(--restart)"
        )

    def clear(self) -> None:
        """Remove all checkpoints, and what a crash may have left of one."""
        for place in (*self._found(), *self.folder.glob(".step-*")):
            shutil.rmtree(place, ignore_errors=True)

    def check(self) -> None:
        """Refuse to go on from what is there if it is of something else, as `restore` does.

        Raises:
            ChangedError: it is.
        """
        begun = begun_with(self.folder)
        if begun is not None:
            place, theirs = begun
            _refuse_changes(place, self._identity, theirs)

    def _found(self) -> list[Path]:
        return _checkpoints(self.folder)

    def _load(
        self,
        place: Path,
        tensors: Mapping[str, Tensor],
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            parts.setdefault(kind, {})[rest] = tensor
        try:
            network.load_state_dict(parts.pop("weights"))
        except (KeyError, RuntimeError) as error:
            raise OutputError(
                f"checkpoint {place} does not fit the network it is of: {error}. Begin anew "
                "(--restart)"
            ) from error
        parameters = dict(network.named_parameters())
        optimizer.state.clear()
        for kind, values in parts.items():
            for name, tensor in values.items():
                parameter = parameters[name]
                # The count of steps stays where the optimizer keeps it.
                device = parameter.device if tensor.dim() or _is_fused(optimizer) else None
                optimizer.state[parameter][kind] = tensor.to(device)


def begun_with(folder: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in `folder` that says what it is of, and that; None if none does."""
    for place in reversed(_checkpoints(Path(folder))):
        try:
            return place, _read_values(place)["identity"]
        except (OSError, ValueError):
            continue
    return None


def check_known(folder: str | Path, known: Mapping[str, Any]) -> bool:
    """Refuse the checkpoints in `folder` if they are of something else, as far as that is known.

    Args:
        known: a part of the identity, nested like the whole of it; the rest is not compared.

    Returns:
        whether there is a checkpoint that was compared.

    Raises:
        ChangedError: they are of something else.
    """
    begun = begun_with(folder)
    if begun is None:
        return False
    place, theirs = begun
    ours = plain(known)
    _refuse_changes(place, ours, _part_of(theirs, ours))
    return True


def _part_of(whole: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What `whole` has under the names that `known` has."""
    part = {}
    for name in known.keys() & whole.keys():
        inner, mine = whole[name], known[name]
        nested = isinstance(inner, Mapping) and isinstance(mine, Mapping)
        part[name] = _part_of(inner, mine) if nested else inner
    return part


def _refuse_changes(place: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    if found := changes(ours, theirs):
        raise ChangedError(
            f"the training in {place.parent} was begun with something else",
            found,
            "go on with what it was begun with, or begin anew (--restart)",
        )


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


def _read(place: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's files. Raises ValueError or OSError where they are damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    values = _read_values(place)
    try:
        return values, load_file(place / _TENSORS)
    except SafetensorError as error:
        raise ValueError(f"{_TENSORS}: {error}") from error


def _read_values(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises ValueError or OSError where it is damaged."""
    values = json.loads((place / _STATE).read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not {"step", "seconds", "history", "identity"} <= set(
        values
    ):
        raise ValueError(f"{_STATE} lacks fields")
    return values


def _own(tensor: Tensor) -> Tensor:
    """A copy on the CPU: safetensors refuses tensors that share memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
