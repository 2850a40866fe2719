"""EAGLE-3 checkpoints in the original layout (SafeAILab/EAGLE, SpecForge, AngelSlim): `midlayer.*`.

The reader's second half, from a config to a network with weights, serves `speculators.py` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafters.eagle3_model import Eagle3Config, Eagle3Model
from ..target import Target
from .config_file import Fields
from .fitting import embedding_of, fit, take_shared
from .layer_fields import read_layers
from .vocabulary import check_maps, target_ids
from .weights import Weights, read_weights
from .writing import layer_config, refuse_to_write, write_checkpoint

_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields of drafters that share the name and compute something else.
_VARIANTS = ("use_moe", "parallel_drafting")


def read_eagle3(fields: Fields, target: Target) -> Eagle3Model:
    """Read a checkpoint in the original layout.

    Target features: top-level `eagle_aux_hidden_state_layer_ids` name hidden states as they stand
    (vLLM reads the input of those layers); inside `eagle_config` they name layers whose output is
    read (SGLang and SpecForge), thus the next hidden state. Without either they are those of the
    paper, `[2, L // 2, L - 3]`.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or made for another target.
    """
    folder = fields.file.parent
    refuse_layers(fields, fields)
    for name in _VARIANTS:
        if fields.values.get(name):
            raise fields.error(
                name, "false", "this variant of EAGLE-3 is not supported; use another drafter"
            )
    weights = read_weights(folder)
    layer = read_layers(
        fields,
        qk_norm="midlayer.self_attn.q_norm.weight" in weights.tensors,
        mlp_bias=True,
        nested_rope="equal",
    )
    fields.must_equal("vocab_size", target.vocab_size, "the target's vocabulary")
    config = Eagle3Config(
        layer=layer,
        feature_layers=_feature_layers(fields, target),
        target_hidden_size=target_hidden_size(fields, layer.hidden_size, target),
        vocab_size=target.vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size"),
        **read_flags(fields),
    )
    return build_eagle3(config, weights, target, name_of=lambda name: name, ignored={"t2d"})


def refuse_layers(fields: Fields, layers: Fields) -> None:
    """EAGLE-3 has one decoder layer; refuse others by name."""
    if layers.values.get("num_hidden_layers") != 1:
        raise layers.error(
            "num_hidden_layers", "1", "EAGLE-3 drafters of several layers are not supported"
        )
    if fields.values.get("target_layer_ids") is not None:
        raise fields.error(
            "target_layer_ids",
            f"the layers under {_IDS}",
            "it is not told whether these ids name inputs or outputs of layers; rename the field "
            f"to {_IDS}, as indices of hidden states (0 is the embedding's output)",
        )


def read_flags(fields: Fields) -> dict[str, bool]:
    """The flags that change the arithmetic, false where they are absent."""
    flags = {name: bool(fields.flag(name)) for name in _FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise fields.error("fc_norm", "false, as norm_before_fc is true: one excludes the other")
    return flags


def target_hidden_size(fields: Fields, hidden_size: int, target: Target) -> int:
    """Width of the target's features, which must be the target's hidden size."""
    width = target.config.hidden_size
    if "target_hidden_size" in fields:
        fields.must_equal("target_hidden_size", width, "the target's hidden size")
    elif hidden_size != width:
        raise fields.error(
            "target_hidden_size",
            f"{width}, the target's hidden size, as the drafter's own is {hidden_size}",
            "give the target that this drafter was trained for",
        )
    return width


def default_layers(fields: Fields, target: Target) -> tuple[int, ...]:
    """The paper's feature layers, for checkpoints that name none."""
    last = target.num_layers
    layers = (2, last // 2, last - 3)
    if not 2 < last // 2 < last - 3:
        raise fields.error(
            _IDS,
            f"the target's layers to read: the usual {list(layers)} do not suit its {last} layers",
            "give the target that this drafter was trained for",
        )
    return layers


def _feature_layers(fields: Fields, target: Target) -> tuple[int, ...]:
    # The last hidden state is excluded: transformers gives it normed, other engines do not.
    last = target.num_layers - 1
    named = fields.layer_ids(_IDS, first=0, last=last) if _IDS in fields else None
    nested = fields.section("eagle_config")
    if nested is not None and nested.flag("use_aux_hidden_state") is False:
        raise nested.error(
            "use_aux_hidden_state",
            "true",
            "without it this is a drafter of the EAGLE-1 kind, which is not supported",
        )
    if nested is not None and _IDS in nested:
        ids = nested.layer_ids(_IDS, first=-1, last=last - 1)
        shifted = tuple(layer + 1 for layer in ids)
        if named is not None and named != shifted:
            raise nested.error(
                _IDS,
                f"{[layer - 1 for layer in named]}, one less than the top-level field's",
                "they contradict each other; remove the wrong one",
            )
        return shifted
    return default_layers(fields, target) if named is None else named


def build_eagle3(
    config: Eagle3Config,
    weights: Weights,
    target: Target,
    *,
    name_of: Callable[[str], str],
    ignored: Collection[str],
) -> Eagle3Model:
    """Build the network that `config` describes, with `weights`.

    Args:
        config: `own_embedding` is found out here.
        name_of: from names of the original layout to the checkpoint's.
        ignored: tensors that may be there and are not needed.

    Raises:
        CheckpointError: a tensor does not fit.
    """
    own = take_shared(weights, "embed_tokens.weight", embedding_of(target), target)
    if not own and config.layer.hidden_size != target.config.hidden_size:
        raise weights.error(
            "embed_tokens.weight",
            f"is missing, expected with shape {[config.vocab_size, config.layer.hidden_size]}",
            f"the target's embedding has another width ({target.config.hidden_size}), so the "
            "drafter needs its own; fetch the checkpoint again",
        )
    _check_features(config, weights)
    check_maps(weights, config.draft_vocab_size, config.vocab_size)
    config = replace(config, own_embedding=own)
    frequencies = name_of("midlayer.self_attn.rotary_emb.inv_freq")  # old ones saved them
    return fit(
        lambda: Eagle3Model(config),
        weights,
        target,
        name_of=lambda name: name_of(name.removeprefix("head.")),
        ignored={*ignored, frequencies},
    )


def _check_features(config: Eagle3Config, weights: Weights) -> None:
    """Say it in layers where `fc` takes another number of features than are named."""
    fc = weights.tensors.get("fc.weight")
    if fc is None or fc.dim() != 2:
        return
    taken, rest = divmod(fc.shape[1], config.target_hidden_size)
    named = len(config.feature_layers)
    if rest == 0 and taken != named:
        wanted = [config.layer.hidden_size, named * config.target_hidden_size]
        raise weights.error(
            "fc.weight",
            f"has shape {list(fc.shape)}, expected {wanted}: it takes {taken} target features, and "
            f"{named} layers are read ({list(config.feature_layers)})",
            f"name all layers in config.json under {_IDS}",
        )


def save_eagle3(model: Eagle3Model, folder: str | Path) -> None:
    """Write a drafter in the original layout, with every flag in its config.

    The feature layers are written twice, top-level as hidden states and in `eagle_config` one less,
    so that engines of either convention read the same ones.

    Args:
        folder: must not exist yet, or be empty; appears with all its files or not at all.

    Raises:
        CheckpointError: the layout cannot express this drafter.
        OutputError: `folder` cannot be written, or holds something already.
    """
    config, layer = model.config, model.config.layer
    if layer.num_layers != 1:
        raise refuse_to_write("EAGLE-3", f"num_layers={layer.num_layers}", "one layer")
    if any(layer.sliding):
        raise refuse_to_write("EAGLE-3", f"sliding={layer.sliding}", "full attention")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors[name.removeprefix("head.")] = tensor
    if model.head.d2t is not None:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[target_ids(model.head.d2t.cpu())] = True
        tensors["t2d"] = t2d
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if layer.qk_norm else "llama",
        **layer_config(layer),
        "mlp_bias": layer.mlp_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _IDS: list(config.feature_layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            _IDS: [index - 1 for index in config.feature_layers],
        },
        **{name: getattr(config, name) for name in _FLAGS},
        "tie_word_embeddings": False,
    }
    write_checkpoint(Path(folder), values, tensors)
