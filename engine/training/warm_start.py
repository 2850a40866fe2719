"""Warm starts: drafters that begin as the last layers of their target.

From random weights a drafter spends most of its training on what the target knows already: how to
turn hidden states into tokens. Copied layers are given the mean of the features at first, in which
the later ones, whose scale is larger, weigh most.

Measured with SmolLM2-135M-Instruct after 100 texts, held-out loss and share of right first tokens:
EAGLE-3 5.05 and 19 % with the mean of the features, 5.20 and 10 % with the last one alone; DFlash
5.12 and 14 % against 5.16 and 9 %, and 6.78 and 8 % from random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..drafters.dflash_model import DFlashModel
from ..drafters.eagle3_model import Eagle3Model
from ..drafters.layers import MLP, Attention
from ..errors import SettingsError, UnsupportedTargetError
from ..target import Target

# Architectures whose layers compute what a drafter's do; others with the same names do not (Gemma's
# norms add 1, Granite scales residuals, SmolLM3 has layers without rotation).
_ALIKE = ("llama", "mistral", "qwen2", "qwen3")
_COLD = "train from random weights (--no-warm-start)"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@torch.no_grad()
def warm_start_eagle3(network: Eagle3Model, target: Target) -> None:
    """Begin as the target's last layer, fed with the mean of the features, and its head.

    In the projections of queries, keys and values the half that reads the feature is the target's,
    and the half that reads the next token's embedding is 0: the first thing to learn.

    Raises:
        SettingsError: a part of another size than the target's.
        UnsupportedTargetError: the target's layers compute something else.
    """
    layers = _layers_of(target)
    last, layer = layers[-1], network.midlayer
    hidden = network.config.layer.hidden_size
    _copy(layer.hidden_norm.weight, last.input_layernorm.weight, "hidden_norm")
    layer.input_layernorm.weight.fill_(1.0)
    for name in _PROJECTIONS[:3]:
        into, source = getattr(layer.self_attn, name), getattr(last.self_attn, name)
        into.weight[:, :hidden].zero_()
        _copy(into.weight[:, hidden:], source.weight, name)
        _copy_bias(into, source, name)
    _copy_linear(layer.self_attn.o_proj, last.self_attn.o_proj, "o_proj")
    _copy_head_norms(layer.self_attn, last)
    _copy(
        layer.post_attention_layernorm.weight,
        last.post_attention_layernorm.weight,
        "post_attention_layernorm",
    )
    _copy_mlp(layer.mlp, last.mlp)
    _copy(network.norm.weight, target.model.base_model.norm.weight, "norm")
    _average(network.fc)
    draft = torch.arange(network.config.draft_vocab_size, device=target.device)
    head = target.model.get_output_embeddings().weight
    _copy(network.head.lm_head.weight, head[network.head.target_ids(draft)], "lm_head")


@torch.no_grad()
def warm_start_dflash(network: DFlashModel, target: Target) -> None:
    """Begin as the target's last layers: layer i of n as layer L - n + i of L.

    One context feature serves all layers, while each of the target's layers weighs its input by a
    norm of its own; so these weights are multiplied into the projections, and both norms begin as
    1: keys and values of the context are then exactly those that the target's layer would make of
    that feature. (Held-out loss after 100 texts, as above: 5.16; with the mean of these norms in
    the context's, 5.31.)

    Raises:
        SettingsError: a part of another size than the target's, or more layers than it has.
        UnsupportedTargetError: the target's layers compute something else.
    """
    layers, own = _layers_of(target), network.decoder_layers()
    if len(own) > len(layers):
        raise SettingsError(
            f"num_layers={len(own)}: the target has {len(layers)} layers to begin with; take "
            f"fewer, or {_COLD}"
        )
    for layer, source in zip(own, layers[-len(own) :], strict=True):
        weights = source.input_layernorm.weight
        layer.input_layernorm.weight.fill_(1.0)
        for name in _PROJECTIONS[:3]:
            into, projection = getattr(layer.self_attn, name), getattr(source.self_attn, name)
            _copy(into.weight, projection.weight * weights, name)
            _copy_bias(into, projection, name)
        _copy_linear(layer.self_attn.o_proj, source.self_attn.o_proj, "o_proj")
        _copy_head_norms(layer.self_attn, source)
        _copy(
            layer.post_attention_layernorm.weight,
            source.post_attention_layernorm.weight,
            "post_attention_layernorm",
        )
        _copy_mlp(layer.mlp, source.mlp)
    _copy(network.norm.weight, target.model.base_model.norm.weight, "norm")
    network.hidden_norm.weight.fill_(1.0)
    _average(network.fc)


def _layers_of(target: Target) -> list[Any]:
    """The target's decoder layers, if a drafter's layers can begin as they are."""
    kind = target.config.model_type
    remedy = f"{_COLD}, which takes longer"
    if kind not in _ALIKE:
        raise UnsupportedTargetError(
            f"target {target.name} is of type {kind!r}, whose layers are not those of a drafter "
            f"(Llama, Mistral, Qwen2, Qwen3 are); {remedy}"
        )
    layers = list(target.model.base_model.layers)
    allowed = {f"self_attn.{name}" for name in (*_PROJECTIONS, "q_norm", "k_norm")}
    allowed |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    allowed |= {"input_layernorm", "post_attention_layernorm"}
    found = {name.rpartition(".")[0] for name, _ in layers[-1].named_parameters()}
    if strange := sorted(found - allowed):
        raise UnsupportedTargetError(
            f"target {target.name} has {strange[0]!r} in its layers, which a drafter has not; "
            f"{remedy}"
        )
    return layers


def _copy_mlp(into: MLP, source: Any) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy_linear(getattr(into, name), getattr(source, name), name)


def _copy_linear(into: nn.Linear, source: nn.Linear, name: str) -> None:
    _copy(into.weight, source.weight, name)
    _copy_bias(into, source, name)


def _copy_bias(into: nn.Linear, source: nn.Linear, name: str) -> None:
    if into.bias is None and source.bias is not None:
        raise SettingsError(
            f"the target's {name} has a bias, the drafter's has none; make the drafter with "
            f"attention_bias, or {_COLD}"
        )
    if into.bias is not None:
        if source.bias is None:
            into.bias.zero_()
        else:
            _copy(into.bias, source.bias, f"{name}.bias")


def _copy_head_norms(into: Attention, source: Any) -> None:
    """Norms of queries and keys: the target's, or what keeps the scale of those it does not norm.

    A norm makes all heads and positions equally loud, which no weight undoes. What can be kept is
    the mean: the root mean square of queries and keys, computed for inputs without a preference.
    (SmolLM2's last layers: 1.3 to 1.5, for 1.8 to 2.3 on text. Against norms of 1 it made no clear
    difference: held-out loss after 100 texts 5.16 for 5.22, right first tokens 9 % for 11 %.)
    """
    for name in ("q", "k"):
        norm = into.q_norm if name == "q" else into.k_norm
        if norm is None:
            continue
        of_target = getattr(source.self_attn, f"{name}_norm", None)
        if of_target is not None:
            _copy(norm.weight, of_target.weight, f"{name}_norm")
            continue
        projection = getattr(source.self_attn, f"{name}_proj")
        squares = (projection.weight.float() * source.input_layernorm.weight.float()).square()
        mean = squares.sum(1).mean()
        if projection.bias is not None:
            mean = mean + projection.bias.float().square().mean()
        norm.weight.fill_(float(mean.sqrt()))


def _average(fc: nn.Linear) -> None:
    hidden = fc.out_features
    count = fc.in_features // hidden
    fc.weight.copy_(torch.eye(hidden, device=fc.weight.device).repeat(1, count) / count)


def _copy(into: Tensor, source: Tensor, name: str) -> None:
    if into.shape != source.shape:
        raise SettingsError(
            f"{name} has shape {list(into.shape)} in the drafter, {list(source.shape)} in the "
            "target, so it cannot begin as the target's; give the drafter the target's sizes, or "
            f"{_COLD}"
        )
    into.copy_(source)
