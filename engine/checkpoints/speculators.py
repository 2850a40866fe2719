"""Checkpoints of vLLM's `speculators` package: EAGLE-3 and DFlash, layers under
`transformer_layer_config`.

Layer ids name hidden states as they stand. Copies of the target's own final norm and head
(`verifier_norm`, `verifier_lm_head`) may be there for training and are not used.
"""

from __future__ import annotations

from dataclasses import replace

from ..drafters.dflash_model import DFlashConfig, DFlashModel
from ..drafters.eagle3_model import Eagle3Config, Eagle3Model
from ..target import Target
from .config_file import Fields
from .dflash import build_dflash, check_sizes
from .eagle3 import build_eagle3, default_layers, read_flags, refuse_layers, target_hidden_size
from .fitting import embedding_of, head_of, take_shared
from .layer_fields import model_type, read_layers, vocab_size
from .vocabulary import check_maps
from .weights import read_weights

_UNUSED = frozenset({"t2d", "verifier_norm.weight", "verifier_lm_head.weight"})


def read_speculators_eagle3(fields: Fields, target: Target) -> Eagle3Model:
    """Read an EAGLE-3 checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or made for another target.
    """
    inner = _layer_section(fields)
    refuse_layers(fields, inner)
    layer = read_layers(
        inner,
        qk_norm=model_type(inner) == "qwen3",
        mlp_bias=True,
        nested_rope="sliding",
        complete=False,
    )
    _check_vocabulary(inner, target)
    name = "eagle_aux_hidden_state_layer_ids"
    last = target.num_layers - 1  # the last hidden state: normed in transformers, not in vLLM
    config = Eagle3Config(
        layer=layer,
        feature_layers=(
            fields.layer_ids(name, first=0, last=last)
            if name in fields
            else default_layers(fields, target)
        ),
        target_hidden_size=target_hidden_size(fields, layer.hidden_size, target),
        vocab_size=target.vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size"),
        **read_flags(fields),
    )

    def name_of(name: str) -> str:
        return name.replace("midlayer.", "layers.0.", 1)

    weights = read_weights(fields.file.parent)
    return build_eagle3(config, weights, target, name_of=name_of, ignored=_UNUSED)


def read_speculators_dflash(fields: Fields, target: Target) -> DFlashModel:
    """Read a DFlash checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, not supported, or made for another target.
    """
    inner = _layer_section(fields)
    layers = read_layers(inner, qk_norm=True, mlp_bias=False, nested_rope="sliding", complete=False)
    _check_vocabulary(inner, target)
    if "target_hidden_size" in fields:
        fields.must_equal(
            "target_hidden_size", target.config.hidden_size, "the target's hidden size"
        )
    anchor = bool(fields.flag("sample_from_anchor"))
    draft_vocab = fields.integer("draft_vocab_size")
    config = DFlashConfig(
        layers=layers,
        feature_layers=fields.layer_ids(
            "aux_hidden_state_layer_ids", first=0, last=target.num_layers - 1
        ),
        vocab_size=target.vocab_size,
        num_target_layers=None,
        block_size=fields.integer("block_size", minimum=1 if anchor else 2),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        sample_from_anchor=anchor,
        sliding_causal=not fields.flag("sliding_window_non_causal"),
        window_from="bonus",
    )
    check_sizes(config, inner, fields, target)
    weights = read_weights(fields.file.parent)
    check_maps(weights, draft_vocab, target.vocab_size)
    own_head = take_shared(weights, "lm_head.weight", head_of(target), target)
    config = replace(
        config,
        # A reduced head must be there; a full one is the target's where it is left out.
        draft_vocab_size=draft_vocab if own_head or draft_vocab != target.vocab_size else None,
        own_embedding=take_shared(weights, "embed_tokens.weight", embedding_of(target), target),
    )
    return build_dflash(config, weights, target, ignored=_UNUSED)


def _layer_section(fields: Fields) -> Fields:
    inner = fields.section("transformer_layer_config")
    if inner is None:
        raise fields.error("transformer_layer_config", "an object that describes the layers")
    return inner


def _check_vocabulary(inner: Fields, target: Target) -> None:
    """The target's vocabulary, which the layers' config carries."""
    filled = Fields(inner.file, {"vocab_size": vocab_size(inner)}, inner.prefix)
    filled.must_equal("vocab_size", target.vocab_size, "the target's vocabulary")
