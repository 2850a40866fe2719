"""Writing a drafter's checkpoint: a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..drafters.layers import LayerConfig
from ..errors import CheckpointError, OutputError


def layer_config(layers: LayerConfig) -> dict[str, Any]:
    """The layer fields of `config.json` that both layouts share.

    Rotary parameters are written in both spellings: transformers before version 5 reads
    `rope_theta` and `rope_scaling`, later ones `rope_parameters`.
    """
    rope = {"rope_type": "default", **layers.rope}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": layers.hidden_act,
        "max_position_embeddings": layers.max_positions,
        "rms_norm_eps": layers.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": layers.attention_bias,
    }


def refuse_to_write(layout: str, found: str, expected: str) -> CheckpointError:
    """The error for a drafter that a layout has no words for."""
    return CheckpointError(
        f"this drafter has {found}, which the {layout} layout cannot express (expected "
        f"{expected}): other engines would load it and compute something else. Train a drafter "
        "without it, or keep the checkpoint that it came from"
    )


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    beside: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Tensor]]] | None = None,
) -> None:
    """Write `config.json` and `model.safetensors` into a folder that is new or empty.

    The files are written and synced under a temporary name beside `folder`, which is then renamed:
    a crash leaves no folder that looks like a checkpoint.

    Args:
        config: without the weights' type, which is added.
        beside: further pairs of fields and tensors, written as `NAME.json` and `NAME.safetensors`.

    Raises:
        OutputError: `folder` holds something, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(
            f"checkpoint folder {str(folder)!r} holds something already; expected a new or an "
            "empty one. Give another folder, or remove it first"
        )
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    values = {**config, "dtype": dtype, "torch_dtype": dtype}
    pairs: list[tuple[str, Mapping[str, Any], str, Mapping[str, Tensor]]] = [
        ("config.json", values, "model.safetensors", tensors)
    ]
    pairs += [
        (f"{name}.json", fields, f"{name}.safetensors", own)
        for name, (fields, own) in (beside or {}).items()
    ]
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        for config_name, fields, weights_name, own in pairs:
            weights = {name: tensor.detach().contiguous().cpu() for name, tensor in own.items()}
            save_file(weights, temporary / weights_name, metadata={"format": "pt"})
            text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
            (temporary / config_name).write_text(text, encoding="utf-8")
            for name in (weights_name, config_name):
                # safetensors writes for the owner alone
                (temporary / name).chmod(0o666 & ~_umask())
                _sync(temporary / name)
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"checkpoint folder {str(folder)!r} cannot be written: {error}. Give a folder on a "
            "file system with room, where you may write"
        ) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
