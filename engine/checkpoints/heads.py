"""Heads on top of a DFlash drafter: AdaFlash's length head, and this project's local head.

The length head stands among the drafter's own tensors, as AdaFlash publishes it. The local head has
no public format: `local_head.json` and `local_head.safetensors` beside the weights, where other
engines do not look.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafters.dflash_model import DFlashModel
from ..drafters.length_head import LengthHead
from ..drafters.local_head import LocalHead, LocalHeadConfig
from ..errors import CheckpointError
from ..target import Target
from .config_file import Fields, read_fields
from .fitting import embedding_of, fit_module
from .weights import LOCAL_HEAD, Weights, read_file

_LENGTH_HEAD = "thresh_head_two_model."
_VERSION = 1


def length_head_names(own: Fields, weights: Weights) -> tuple[str, ...]:
    """Names of AdaFlash's length-head tensors, if the config says that there are any.

    Args:
        own: the fields of `dflash_config`.

    Raises:
        CheckpointError: it says so, and there are none.
    """
    if not own.flag("use_thresh_head_two_model"):
        return ()
    names = tuple(sorted(name for name in weights.tensors if name.startswith(_LENGTH_HEAD)))
    if not names:
        raise weights.error(
            _LENGTH_HEAD + "*",
            "is missing, although dflash_config.use_thresh_head_two_model is true",
            "fetch the checkpoint again",
        )
    return names


def fits_length_head(own: Fields, names: tuple[str, ...]) -> bool:
    """Whether the tensors `names` are those of `LengthHead`, and say a length: AdaFlash knows heads
    of another inner shape, and such as predict a threshold (`thresh_head_direct_len` is false)."""
    with torch.device("meta"):
        known = {_LENGTH_HEAD + name for name in LengthHead(1, 1).state_dict()}
    return bool(own.flag("thresh_head_direct_len")) and known == set(names)


def read_length_head(
    own: Fields, weights: Weights, names: tuple[str, ...], hidden_size: int, target: Target
) -> LengthHead:
    """The length head whose tensors `names` are, on the target's device and in its dtype.

    Raises:
        CheckpointError: a tensor is of another shape than the config says.
    """
    name = "thresh_head_bottleneck_dim"
    width = own.integer(name) if name in own else 256
    mine = Weights(weights.folder, {n: weights.tensors[n] for n in names}, weights.files)
    return fit_module(
        lambda: LengthHead(hidden_size, width),
        mine,
        target,
        name_of=lambda name: _LENGTH_HEAD + name,
    )


def length_head_config(head: LengthHead) -> dict[str, Any]:
    """What `dflash_config` says of a length head."""
    return {
        "use_thresh_head_two_model": True,
        "thresh_head_bottleneck_dim": head.down.out_features,
        "thresh_head_direct_len": True,
    }


def length_head_tensors(head: LengthHead) -> dict[str, Tensor]:
    """Its tensors, as they stand among the drafter's."""
    return {_LENGTH_HEAD + name: tensor for name, tensor in head.state_dict().items()}


def read_local_head(folder: Path, drafter: DFlashModel, target: Target) -> LocalHead | None:
    """The local head that lies beside a drafter's weights, or None.

    Raises:
        CheckpointError: it is damaged, incomplete, or made for another target or another block.
    """
    config_file, file = folder / f"{LOCAL_HEAD}.json", folder / f"{LOCAL_HEAD}.safetensors"
    if not config_file.is_file() and not file.is_file():
        return None
    for there, missing in ((config_file, file), (file, config_file)):
        if not missing.is_file():
            raise CheckpointError(
                f"{there} is there and {missing.name} is not; put back the file that belongs to "
                "it, or remove it to draft without the local head"
            )
    fields = read_fields(config_file)
    fields.must_equal("version", _VERSION, "the only one that is known")
    fields.must_equal("hidden_size", embedding_of(target).shape[1], "the target's hidden size")
    fields.must_equal("vocab_size", target.vocab_size, "the target's vocabulary")
    depth = drafter.config.num_drafted
    fields.must_equal("depth", depth, "the tokens that a block of this drafter proposes")
    numbers = {}
    for name in ("weight", "unigram_weight"):
        number = fields.number(name)
        if number is None or not 0.0 <= number <= 10.0:
            raise fields.error(name, "a number from 0 to 10")
        numbers[name] = number
    config = LocalHeadConfig(
        embedding_of(target).shape[1],
        target.vocab_size,
        depth,
        state_size=fields.integer("state_size"),
        rank=fields.integer("rank"),
        **numbers,
    )
    tensors = read_file(file)
    weights = Weights(folder, tensors, dict.fromkeys(tensors, file.name))
    return fit_module(lambda: LocalHead(config), weights, target, name_of=lambda name: name)


def local_head_config(head: LocalHead) -> dict[str, Any]:
    """What `local_head.json` says."""
    return {"version": _VERSION, **asdict(head.config)}
