"""Fingerprints: what tells one target, and one set of texts, from another.

Features, responses and checkpoints hold for what they were made from. What goes on from files of an
earlier run compares these first, and names what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Change
from ..target import Target
from .texts import TrainingText

_SAMPLED = 4096  # values of each tensor; all of them would take minutes with a large target


def target_fingerprint(target: Target) -> str:
    """A hash over the target's config, dtype and weights. Of each tensor it reads up to 4,096
    values, evenly spaced: training, merging an adapter or quantising moves nearly all of them."""
    config = {
        name: value
        for name, value in target.config.to_dict().items()
        # Where it was found and who wrote the file say nothing of the model.
        if not name.startswith("_") and name != "transformers_version"
    }
    return _digest([_canonical(config), str(target.dtype)], target.model)


def network_fingerprint(network: nn.Module) -> str:
    """A hash over a network's weights, read like those of a target."""
    return _digest([], network)


def network_identity(network: nn.Module) -> str:
    """The same, but equal for the same weights in float32 and in bfloat16: for what holds for a
    network in either (thresholds, routers)."""
    return _digest([], network, torch.bfloat16)


def texts_fingerprint(texts: Iterable[TrainingText]) -> str:
    """A hash over ids, tokens and responses of the texts, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(json.dumps([text.id, text.token_ids, text.responses]).encode())
    return digest.hexdigest()


def changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    """Where two flat or nested mappings differ; `theirs` are the earlier ones."""
    found = []
    for name in dict.fromkeys((*theirs, *ours)):
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            inner = changes(mine, other)
            found += [Change(f"{name}.{change.name}", change.then, change.now) for change in inner]
        elif mine != other:
            found.append(Change(name, other, mine))
    return found


def plain(values: Any) -> Any:
    """`values` as JSON gives them back, to be compared with what a file holds."""
    return json.loads(_canonical(values))


def _canonical(values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=str)


def _digest(parts: Iterable[str], model: nn.Module, dtype: torch.dtype | None = None) -> str:
    """`dtype` is what floating-point values are rounded to first; None leaves them as they are."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode())
    for name, tensor in sorted(model.state_dict().items()):
        values = _sample(tensor)
        if dtype is not None and values.is_floating_point():
            values = values.to(dtype)
        digest.update(f"{name} {tuple(tensor.shape)} {values.dtype}".encode())
        digest.update(values.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)]
