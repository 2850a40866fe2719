"""DFlash checkpoints in z-lab's layout: no embedding and no head, the target's are used.

Its meaning is that of z-lab's own package (`dflash` on PyPI). The reader's second half, from a
config to a network with weights, serves `speculators.py` as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from ..drafters.dflash_model import DFlashConfig, DFlashModel
from ..drafters.layers import LayerConfig
from ..errors import CheckpointError
from ..target import Target
from .config_file import Fields
from .fitting import embedding_of, fit, head_of, take_shared
from .heads import (
    fits_length_head,
    length_head_config,
    length_head_names,
    length_head_tensors,
    local_head_config,
    read_length_head,
)
from .layer_fields import read_layers
from .weights import LOCAL_HEAD, Weights, read_weights
from .writing import layer_config, refuse_to_write, write_checkpoint

_DFLASH_2 = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
# What `dflash_config` may say, and for some fields the only value that is supported.
_KNOWN = {"mask_token_id", "target_layer_ids", "block_size", "use_thresh_head_two_model"} | {
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "thresh_head_bottleneck_dim",
    "thresh_head_direct_len",
}
_ONLY: dict[str, Any] = {"projector_type": "dflash", "attention_mode": "gqa", "causal": False}


def read_dflash(fields: Fields, target: Target) -> DFlashModel:
    """Read a checkpoint in z-lab's layout.

    Sliding layers are causal inside the block unless `is_causal` is false, and their window counts
    back from each slot.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or made for another target.
    """
    own = fields.section("dflash_config")
    if own is None:
        raise fields.error("dflash_config", "an object with mask_token_id and target_layer_ids")
    _refuse_variants(fields, own)
    layers = read_layers(fields, qk_norm=True, mlp_bias=False, nested_rope="equal")
    fields.must_equal("vocab_size", target.vocab_size, "the target's vocabulary")
    fields.must_equal("num_target_layers", target.num_layers, "the target's number of layers")
    ids = own.layer_ids("target_layer_ids", first=0, last=target.num_layers - 1)
    softcap = _draft_number(fields, own, "final_logit_softcapping")
    weights = read_weights(fields.file.parent)
    length_head = length_head_names(own, weights)
    used = fits_length_head(own, length_head)
    config = DFlashConfig(
        layers=layers,
        feature_layers=tuple(index + 1 for index in ids),
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        block_size=_block_size(fields, own),
        mask_token_id=own.integer("mask_token_id", minimum=0),
        sliding_causal=_sliding_causal(fields, own, layers),
        window_from="slot",
        embedding_scale=_scale(fields, own, "input_embedding_scale"),
        output_multiplier=_scale(fields, own, "output_multiplier"),
        logit_softcap=softcap if softcap is not None and softcap > 0 else None,
        unused_length_head=() if used else length_head,
    )
    check_sizes(config, fields, own, target)
    # Copies of the target's own are dropped here; others are refused as unexpected.
    take_shared(weights, "embed_tokens.weight", embedding_of(target), target)
    take_shared(weights, "lm_head.weight", head_of(target), target)
    network = build_dflash(config, weights, target, ignored=length_head)
    if used:
        width = layers.hidden_size
        network.length_head = read_length_head(own, weights, length_head, width, target)
    return network


def check_sizes(config: DFlashConfig, layers: Fields, mask: Fields, target: Target) -> None:
    """Check what must be the target's own.

    Args:
        layers: the fields among which `hidden_size` stands.
        mask: the fields among which `mask_token_id` stands.

    Raises:
        CheckpointError: the drafter is of another width, or its mask token has no embedding.
    """
    hidden = Fields(layers.file, {"hidden_size": config.layers.hidden_size}, layers.prefix)
    hidden.must_equal("hidden_size", target.config.hidden_size, "the target's hidden size")
    if config.block_size > config.layers.max_positions:
        raise CheckpointError(
            f"{layers.file}: a block of {config.block_size} (block_size) is longer than "
            f"max_position_embeddings ({config.layers.max_positions}), so it could never draft; "
            "correct the field, or use another drafter"
        )
    rows = len(embedding_of(target))
    if config.mask_token_id >= rows:
        raise mask.error(
            "mask_token_id", f"a token below {rows}, the rows of the target's embedding"
        )


def build_dflash(
    config: DFlashConfig, weights: Weights, target: Target, *, ignored: Collection[str]
) -> DFlashModel:
    """Build the network that `config` describes, with `weights`.

    Args:
        ignored: tensors that may be there and are not needed.

    Raises:
        CheckpointError: a tensor does not fit.
    """
    return fit(
        lambda: DFlashModel(config),
        weights,
        target,
        name_of=lambda name: name.removeprefix("head."),
        ignored=ignored,
    )


def _refuse_variants(fields: Fields, own: Fields) -> None:
    for name in _DFLASH_2:
        if name in own or name in fields:
            raise (own if name in own else fields).error(
                name,
                "no such field",
                "it belongs to DFlash 2 (candidate selector and convolutions), which is not "
                "supported; use a DFlash drafter of this target",
            )
    for name, value in own.values.items():
        if name in _KNOWN or value is None or (name in _ONLY and value == _ONLY[name]):
            continue
        raise own.error(
            name,
            json.dumps(_ONLY[name]) if name in _ONLY else f"one of {', '.join(sorted(_KNOWN))}",
            "this variant of DFlash is not supported; remove the field only if it is about "
            "training alone",
        )


def _block_size(fields: Fields, own: Fields) -> int:
    """From `dflash_config`, where newer checkpoints have it, or from the top level."""
    if "block_size" not in own:
        return fields.integer("block_size", minimum=2)
    size = own.integer("block_size", minimum=2)
    if "block_size" in fields and fields.integer("block_size", minimum=2) != size:
        raise fields.error("block_size", f"{size}, as in dflash_config")
    return size


def _sliding_causal(fields: Fields, own: Fields, layers: LayerConfig) -> bool:
    causal = fields.flag("is_causal")
    sliding = layers.sliding or (False,) * layers.num_layers
    if causal and not all(sliding):
        raise fields.error(
            "is_causal",
            "false or no such field, as there are full attention layers",
            "full attention layers that are causal inside the block are not supported; use "
            "another drafter",
        )
    if "causal" in own and any(sliding):
        raise own.error(
            "causal",
            "the field is_causal at the top level, as there are sliding layers",
            "z-lab's own code does not read it; write is_causal instead",
        )
    return causal is not False


def _draft_number(fields: Fields, own: Fields, name: str) -> float | None:
    """A number of `dflash_config`, else of the top level."""
    return own.number(name) if name in own else fields.number(name)


def _scale(fields: Fields, own: Fields, name: str) -> float:
    """Such a number that multiplies: 1 where it is absent."""
    number = _draft_number(fields, own, name)
    return 1.0 if number is None else number


def save_dflash(model: DFlashModel, folder: str | Path) -> None:
    """Write a drafter in z-lab's layout, with the heads that it has: a length head as AdaFlash
    writes it, a local head beside the weights. One that was not used when it was loaded is left
    out.

    Args:
        folder: must not exist yet, or be empty; appears with all its files or not at all.

    Raises:
        CheckpointError: the layout cannot express this drafter.
        OutputError: `folder` cannot be written, or holds something already.
    """
    values, tensors = dflash_layout(model)
    local = model.local_head
    beside = {}
    if local is not None:
        beside[LOCAL_HEAD] = (local_head_config(local), dict(local.state_dict()))
    write_checkpoint(Path(folder), values, tensors, beside=beside)


def dflash_layout(model: DFlashModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter as `config.json` and tensors of z-lab's layout, without its local head.

    Raises:
        CheckpointError: the layout cannot express it.
    """
    config, layers = model.config, model.config.layers
    sliding = any(layers.sliding)
    for wrong, found, expected in (
        (model.head is not None, "an output head of its own", "the target's"),
        (config.own_embedding, "a token embedding of its own", "the target's"),
        (config.sample_from_anchor, "sample_from_anchor=True", "False"),
        (sliding and config.window_from != "slot", "window_from='bonus'", "'slot'"),
        (not layers.qk_norm, "layers without query and key norms", "layers with them"),
        (layers.mlp_bias, "mlp_bias=True", "False"),
        (config.num_target_layers is None, "num_target_layers=None", "the target's number"),
        (0 in config.feature_layers, "the embedding's output as a feature", "layers' outputs"),
    ):
        if wrong:
            raise refuse_to_write("z-lab DFlash", found, expected)
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.feature_layers],
    }
    if config.embedding_scale != 1.0:
        own["input_embedding_scale"] = config.embedding_scale
    if config.output_multiplier != 1.0:
        own["output_multiplier"] = config.output_multiplier
    if config.logit_softcap is not None:
        own["final_logit_softcapping"] = config.logit_softcap
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(("local_head.", "length_head."))
    }
    if model.length_head is not None:
        own |= length_head_config(model.length_head)
        tensors |= length_head_tensors(model.length_head)
    kinds = layers.sliding or (False,) * layers.num_layers
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **layer_config(layers),
        "layer_types": ["sliding_attention" if kind else "full_attention" for kind in kinds],
        "use_sliding_window": sliding,
        "sliding_window": layers.sliding_window if sliding else None,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": own,
        "tie_word_embeddings": False,
    }
    if sliding and not config.sliding_causal:
        values["is_causal"] = False
    return values, tensors
