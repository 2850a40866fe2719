"""Low-rank adapters (Hu et al., 2106.09685): reading them and merging them into a model.

An adapter is a folder in the format of the PEFT library: `adapter_config.json` and
`adapter_model.safetensors`, with a pair A `[rank, in]`, B `[out, rank]` for each linear layer that
it changes. Merged, the layer's weight is `W + alpha / rank * B A`, and nothing is left to compute
at run time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"

# What would change the arithmetic, with the values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "exclude_modules": (None,),
    "lora_bias": (None, False),
}


def read_adapter(folder: str | Path) -> tuple[float, dict[str, tuple[Tensor, Tensor]]]:
    """The scale `alpha / rank`, and per layer's name its pair (A, B).

    Raises:
        CheckpointError: no adapter there, one of another kind, or damaged or incomplete weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter in {folder} cannot be read: {error}. Expected {CONFIG} and {WEIGHTS}, as "
            "the PEFT library writes them"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(
            f"{folder / CONFIG}: peft_type is {kind!r}; only 'LORA' can be merged here. Merge it "
            "with the PEFT library and give the merged model"
        )
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            raise CheckpointError(
                f"{folder / CONFIG}: {name} is {config[name]!r}, which is not supported (only "
                f"{plain[-1]!r}). Merge it with the PEFT library and give the merged model"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"{folder / CONFIG}: r={rank!r}, lora_alpha={alpha!r}; expected numbers, r at least 1"
        )
    return alpha / rank, _pairs(folder / WEIGHTS, tensors, rank)


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: str | Path) -> None:
    """Add the adapter in `folder` to the weights of `model`, computed in float32.

    Raises:
        CheckpointError: it cannot be read, or does not fit the model.
    """
    scale, pairs = read_adapter(folder)
    weights: dict[str, Tensor] = {}
    for name, (a, b) in pairs.items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise CheckpointError(
                f"the adapter in {folder} changes layer {name!r}, which the model "
                f"({type(model).__name__}) has not; it belongs to another model"
            ) from error
        shape = [b.shape[0], a.shape[1]]
        weight = layer.weight if isinstance(layer, nn.Linear) else None
        if weight is None or list(weight.shape) != shape:
            there = type(layer).__name__ if weight is None else list(weight.shape)
            raise CheckpointError(
                f"the adapter in {folder} has shape {shape} for layer {name!r}, the model has "
                f"{there}; it belongs to another model"
            )
        weights[name] = weight
    for name, (a, b) in pairs.items():  # only once all of it is known to fit
        weight = weights[name]
        change = scale * (b.to(weight.device).float() @ a.to(weight.device).float())
        weight.copy_((weight.float() + change).to(weight.dtype))


def save_adapter(
    pairs: dict[str, tuple[Tensor, Tensor]], alpha: float, folder: str | Path, *, base: str
) -> None:
    """Write an adapter so that `read_adapter` and the PEFT library read it.

    Args:
        pairs: per layer's name (A, B), all of one rank.
        base: name of the model that it belongs to.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[_PREFIX + name + _A] = a.detach().cpu().contiguous()
        tensors[_PREFIX + name + _B] = b.detach().cpu().contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": next(iter(pairs.values()))[0].shape[0],
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in pairs}),
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"the adapter cannot be written to {folder}: {error}") from error


def _pairs(file: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((e for e in (_A, _B) if name.endswith(e)), None)
        if ending is None or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{file}: tensor {name!r} is not expected (only {_PREFIX}LAYER{_A} and {_B}); "
                "merge the adapter with the PEFT library and give the merged model"
            )
        if tensor.dim() != 2 or tensor.shape[0 if ending == _A else 1] != rank:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {list(tensor.shape)}, which does not go with "
                f"r={rank} of {CONFIG}; fetch or train the adapter again"
            )
        halves.setdefault(name[len(_PREFIX) : -len(ending)], {})[ending] = tensor
    for name, half in halves.items():
        if len(half) < 2:
            lacking = _B if _A in half else _A
            raise CheckpointError(
                f"{file}: tensor {_PREFIX + name + lacking!r} is missing; fetch or train the "
                "adapter again"
            )
    if not halves:
        raise CheckpointError(f"{file} holds no tensors; fetch or train the adapter again")
    return {name: (half[_A], half[_B]) for name, half in halves.items()}
