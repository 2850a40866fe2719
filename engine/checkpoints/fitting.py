"""Fitting a checkpoint's tensors to a network: every one needed is there, and no other.

A drafter that loads wrongly still works and only its acceptance rate collapses. So names and shapes
must be exactly those of the network that the config describes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..drafters.dflash_model import DFlashModel
from ..drafters.eagle3_model import Eagle3Config, Eagle3Model
from ..drafters.layers import Rotary
from ..errors import CheckpointError
from ..target import Target
from .weights import Weights

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REMEDY = (
    "the weights do not belong to this config.json, or the config leaves out a variant that "
    "changes the network; fetch the checkpoint again, or use another"
)

Network = TypeVar("Network", Eagle3Model, DFlashModel)
Module = TypeVar("Module", bound=nn.Module)


def fit(
    make: Callable[[], Network],
    weights: Weights,
    target: Target,
    *,
    name_of: Callable[[str], str],
    ignored: Collection[str] = (),
) -> Network:
    """Build a drafter's network with the checkpoint's weights: `fit_module`, and its rotary
    embedding.

    Raises:
        CheckpointError: a tensor does not fit.
    """
    network = fit_module(make, weights, target, name_of=name_of, ignored=ignored)
    # Its frequencies are computed, not loaded, and stay float32 in any dtype of the weights.
    config = network.config
    layers = config.layer if isinstance(config, Eagle3Config) else config.layers
    network.rotary = Rotary(layers).to(target.device)
    return network


def fit_module(
    make: Callable[[], Module],
    weights: Weights,
    target: Target,
    *,
    name_of: Callable[[str], str],
    ignored: Collection[str] = (),
) -> Module:
    """Build a network with the checkpoint's weights, on the target's device and in its dtype.

    Args:
        make: builds the network; called where its weights take no memory.
        name_of: from a name in the network's `state_dict` to the checkpoint's.
        ignored: tensors that may be there and are not needed.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape or type; the first
            problem, and how many more there are.
    """
    try:
        with torch.device("meta"):
            network = make()
    except CheckpointError as error:
        raise CheckpointError(f"{weights.folder / 'config.json'}: {error}") from error
    expected = {name_of(name): tensor for name, tensor in network.state_dict().items()}
    problems = _problems(expected, weights, ignored)
    if problems:
        (name, problem), *others = problems
        more = f" (and {len(others)} more problems of this kind)" if others else ""
        raise weights.error(name, problem + more, _REMEDY)

    for name, tensor in weights.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise weights.error(name, "holds NaN or infinite values", _REMEDY)

    def moved(name: str, like: Tensor) -> Tensor:
        dtype = target.dtype if like.is_floating_point() else like.dtype
        return weights.tensors[name].to(device=target.device, dtype=dtype)

    state = {name: moved(name_of(name), like) for name, like in network.state_dict().items()}
    network.load_state_dict(state, assign=True)
    return network.requires_grad_(False).eval()


def take_shared(weights: Weights, name: str, shared: Tensor, target: Target) -> bool:
    """Whether the checkpoint has a tensor `name` of its own; a copy of the target's `shared` is
    dropped from `weights`, so that the target's is used."""
    own = weights.tensors.get(name)
    if own is None:
        return False
    if own.shape == shared.shape and own.dtype in _FLOATS:
        converted = own.to(device=shared.device, dtype=target.dtype)
        if torch.equal(converted, shared.to(target.dtype)):
            del weights.tensors[name]
            return False
    return True


def embedding_of(target: Target) -> Tensor:
    """The target's token embedding, `[vocab, hidden]`."""
    return target.model.get_input_embeddings().weight


def head_of(target: Target) -> Tensor:
    """The target's output head, `[vocab, hidden]`."""
    return target.model.get_output_embeddings().weight


def _problems(
    expected: dict[str, Tensor], weights: Weights, ignored: Collection[str]
) -> list[tuple[str, str]]:
    problems = []
    for name, like in expected.items():
        shape = list(like.shape)
        found = weights.tensors.get(name)
        if found is None:
            problems.append((name, f"is missing, expected with shape {shape}"))
        elif list(found.shape) != shape:
            problems.append((name, f"has shape {list(found.shape)}, expected {shape}"))
        elif like.is_floating_point() and found.dtype not in _FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            problems.append(
                (name, f"is of type {kind}, expected bfloat16, float16 or float32 (not quantised)")
            )
    for name, found in sorted(weights.tensors.items()):
        if name not in expected and name not in ignored:
            shape = list(found.shape)
            problems.append((name, f"of shape {shape} is unexpected: the config has no use for it"))
    return problems
