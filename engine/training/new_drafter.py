"""New drafters for a target: networks whose config follows from the target's, with random weights.

Sizes, rotary embedding and norms are the target's, so that its last layers can be copied into them
(`warm_start.py`) and public loaders need no field that only this project knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from ..drafters.dflash_model import DFlashConfig, DFlashModel
from ..drafters.eagle3_model import Eagle3Config, Eagle3Model
from ..drafters.layers import LayerConfig
from ..errors import SettingsError
from ..target import Target
from .vocabulary import DraftVocabulary

Network = TypeVar("Network", bound=nn.Module)

_STD = 0.02  # of random weights, as in the Llama and Qwen families
_ROPE_KINDS = ("default", "linear", "yarn", "llama3")
_RESERVED = ("reserved", "unused", "placeholder", "extra_id")


def new_eagle3(
    target: Target,
    vocabulary: DraftVocabulary,
    *,
    feature_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> Eagle3Model:
    """An EAGLE-3 network with random weights, in float32 on the target's device.

    Args:
        vocabulary: what it drafts from.
        feature_layers: hidden states that it reads, in Hugging Face indexing; the paper's
            `(2, L // 2, L - 3)` of L layers where None.
        intermediate_size: of its MLP; the target's where None.
        seed: of the weights.

    Raises:
        SettingsError: a vocabulary of another target, layers that the target does not have.
    """
    count = target.num_layers
    if vocabulary.vocab_size != target.vocab_size:
        raise SettingsError(
            f"the draft vocabulary was chosen from {vocabulary.vocab_size} tokens, target "
            f"{target.name} has {target.vocab_size}; choose it for this target"
        )
    chosen = (2, count // 2, count - 3) if feature_layers is None else tuple(feature_layers)
    # The last hidden state is excluded: transformers gives it normed, other engines do not.
    _check_layers(target, chosen, first=0, last=count - 1, given=feature_layers is not None)
    layer = _layer_config(target, 1, intermediate_size, qk_norm=_has_qk_norm(target))
    config = Eagle3Config(
        layer=layer,
        feature_layers=chosen,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary),
    )
    network = _randomise(Eagle3Model(config), seed)
    if network.head.d2t is not None:
        network.head.d2t = vocabulary.d2t
    return network.to(target.device)


def new_dflash(
    target: Target,
    *,
    block_size: int,
    num_layers: int,
    mask_token_id: int,
    feature_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> DFlashModel:
    """A DFlash network with random weights, in float32 on the target's device. It norms queries and
    keys, whether or not the target does, as public DFlash layouts have no other layers.

    Args:
        block_size: slots of a block, the bonus token's included.
        num_layers: its decoder layers.
        mask_token_id: what fills the other slots; see `choose_mask_token`.
        feature_layers: hidden states that it reads, in Hugging Face indexing; where None five of
            them, evenly spaced from the output of the second layer to that of the third-last, as in
            z-lab's checkpoints.
        intermediate_size: of its MLPs; the target's where None.
        seed: of the weights.

    Raises:
        SettingsError: sizes below their least, layers that the target does not have, a mask token
            without an embedding.
    """
    for name, value, least in (("block_size", block_size, 2), ("num_layers", num_layers, 1)):
        if not isinstance(value, int) or value < least:
            raise SettingsError(f"{name}={value!r}: expected an integer of at least {least}")
    rows = len(target.embedding)
    if not 0 <= mask_token_id < rows:
        raise SettingsError(
            f"mask_token_id={mask_token_id!r}: expected a token from 0 to {rows - 1}, the rows of "
            "the target's embedding"
        )
    count = target.num_layers
    spaced = tuple(2 + (count - 4) * i // 4 for i in range(5))
    chosen = spaced if feature_layers is None else tuple(feature_layers)
    _check_layers(target, chosen, first=1, last=count, given=feature_layers is not None)
    config = DFlashConfig(
        layers=_layer_config(target, num_layers, intermediate_size, qk_norm=True),
        feature_layers=chosen,
        vocab_size=target.vocab_size,
        num_target_layers=count,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )
    return _randomise(DFlashModel(config), seed).to(target.device)


def choose_mask_token(
    target: Target,
    special_tokens: Mapping[str, int],
    *,
    num_tokens: int,
    used: Collection[int] = (),
) -> int:
    """A token of the target's vocabulary that no text has, to stand for what is not known yet.

    In this order: a special token named as a mask; one whose name says that it is reserved (z-lab
    took such a one for Llama 3.1); the first row of the embedding behind the tokenizer's tokens
    (z-lab's choice for Qwen3); the last special token that is not in use. Rows of zeros are passed
    over: a norm would blow up their gradients, and such rows are often there for padding only.

    Args:
        special_tokens: name to id, of the tokenizer's added tokens.
        num_tokens: tokens that the tokenizer knows, the added ones included.
        used: tokens that prompts or responses may have, such as the chat template's.

    Raises:
        SettingsError: there is no such token.
    """
    config = target.config
    known = {config.bos_token_id, config.pad_token_id, *target.eos_token_ids, *used}
    rows = min(len(target.embedding), target.vocab_size)
    free = {
        name: token
        for name, token in sorted(special_tokens.items(), key=lambda item: item[1])
        if token not in known and 0 <= token < rows
    }
    masks = [token for name, token in free.items() if "mask" in name.lower()]
    reserved = [
        token for name, token in free.items() if any(word in name.lower() for word in _RESERVED)
    ]
    behind = [token for token in range(num_tokens, rows) if token not in known]
    for token in (*masks, *reserved, *behind, *reversed(free.values())):
        if bool(target.embedding[token].any()):
            return token
    raise SettingsError(
        f"target {target.name} has no token that is free to be a mask: all {len(special_tokens)} "
        f"special tokens are in use, and its embedding has no row behind the tokenizer's "
        f"{num_tokens}. Give a mask_token_id: a token that your texts never have"
    )


def _layer_config(
    target: Target, num_layers: int, intermediate_size: int | None, *, qk_norm: bool
) -> LayerConfig:
    config = target.config
    inner = config.intermediate_size if intermediate_size is None else intermediate_size
    if not isinstance(inner, int) or inner < 1:
        raise SettingsError(f"intermediate_size={inner!r}: expected an integer of at least 1")
    return LayerConfig(
        hidden_size=target.hidden_size,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=target.plane.kv_heads,
        head_dim=target.plane.head_dim,
        max_positions=target.max_context,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        qk_norm=qk_norm,
        attention_bias=getattr(_in_attention(target, "q_proj"), "bias", None) is not None,
        hidden_act=getattr(config, "hidden_act", "silu"),
    )


def _rope(config: Any) -> dict[str, Any]:
    """The target's rotary embedding, or a plain one of its base where drafters cannot have it: with
    weights of its own a drafter may rotate as it likes."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in found.values() if isinstance(value, dict)]
    if nested:
        found = dict(found.get("full_attention") or nested[0])
    whole = found.get("partial_rotary_factor", 1.0) == 1.0
    if found.get("rope_type", "default") in _ROPE_KINDS and whole:
        return {"rope_theta": 10000.0, **found}
    return {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}


def _in_attention(target: Target, name: str) -> Any:
    """A part of the last layer's attention, where that is named as in Llama; None elsewhere."""
    layers = getattr(target.model.base_model, "layers", None)
    return getattr(getattr(layers[-1], "self_attn", None), name, None) if layers else None


def _has_qk_norm(target: Target) -> bool:
    weight = getattr(_in_attention(target, "q_norm"), "weight", None)
    return weight is not None and weight.shape == (target.plane.head_dim,)


def _check_layers(
    target: Target, layers: tuple[int, ...], *, first: int, last: int, given: bool
) -> None:
    """Refuse layers that the target does not have, and any order but an ascending one."""
    ascending = all(a < b for a, b in pairwise(layers))
    if layers and ascending and first <= layers[0] and layers[-1] <= last:
        return
    usual = "" if given else "; the usual ones do not suit it, so give feature_layers"
    raise SettingsError(
        f"feature_layers={list(layers)}: expected ascending hidden states from {first} to {last} "
        f"of target {target.name}, which has {target.num_layers} layers{usual}"
    )


def _randomise(network: Network, seed: int) -> Network:
    """Weights from a seed of their own; norms stay as they are made, and biases begin at 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.normal_(0.0, _STD, generator=generator)
    return network
