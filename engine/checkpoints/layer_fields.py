"""From the layer fields of a config to `LayerConfig`.

What a config leaves out takes the default of the transformers config class of its `model_type`:
that is what the field means to whoever saved it (EAGLE's own checkpoint for Llama 3.1 has no
`rope_theta`, for one).
"""

from __future__ import annotations

from typing import Any, Literal

from ..drafters.layers import LayerConfig
from ..errors import CheckpointError
from .config_file import Fields

MODEL_TYPES = ("llama", "qwen3")

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "vocab_size",
)
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LAYER_KINDS = ("full_attention", "sliding_attention")


def model_type(fields: Fields) -> str:
    """The kind of decoder layer, `llama` or `qwen3`.

    Raises:
        CheckpointError: another one; its layers would be computed wrongly.
    """
    kind = fields.text("model_type") or "qwen3"
    if kind not in MODEL_TYPES:
        raise fields.error(
            "model_type",
            f"one of {', '.join(MODEL_TYPES)}",
            "layers of other kinds are not supported; use another drafter",
        )
    return kind


def read_layers(
    fields: Fields,
    *,
    qk_norm: bool,
    mlp_bias: bool,
    nested_rope: Literal["equal", "sliding"],
    complete: bool = True,
) -> LayerConfig:
    """Read a drafter's decoder layers.

    Args:
        qk_norm: whether the format's layers norm queries and keys.
        mlp_bias: whether the format's MLP can have biases.
        nested_rope: of rotary parameters by kind of layer, take them if they are all equal, or take
            those of sliding layers for all (`speculators`).
        complete: sizes must stand in the config; otherwise the class's defaults count.

    Raises:
        CheckpointError: a field is missing, of a wrong type, or not supported.
    """
    kind = model_type(fields)
    for name in _SIZES:
        if complete or name in fields:
            fields.integer(name)
    filled = _filled(fields, kind)
    heads, kv_heads = filled.num_attention_heads, filled.num_key_value_heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    positions = filled.max_position_embeddings
    if not isinstance(positions, int) or positions < 1:
        raise fields.error("max_position_embeddings", "a whole number of at least 1")
    if "max_position_embeddings" in fields:
        fields.integer("max_position_embeddings")  # null would have become a default
    window, sliding = _sliding(fields, filled)
    return LayerConfig(
        hidden_size=filled.hidden_size,
        intermediate_size=filled.intermediate_size,
        num_layers=filled.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=filled.head_dim,
        max_positions=positions,
        rms_norm_eps=filled.rms_norm_eps,
        rope=_rope(fields, filled.rope_parameters, nested_rope),
        qk_norm=qk_norm,
        attention_bias=filled.attention_bias,
        mlp_bias=mlp_bias and bool(getattr(filled, "mlp_bias", False)),
        hidden_act=filled.hidden_act,
        sliding=sliding,
        sliding_window=window,
    )


def vocab_size(fields: Fields) -> int:
    """`vocab_size` as `read_layers` would fill it."""
    return int(_filled(fields, model_type(fields)).vocab_size)


def _filled(fields: Fields, kind: str) -> Any:
    from transformers import AutoConfig

    given = {name: fields.values[name] for name in _FIELDS if name in fields}
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:  # transformers and its validators raise many kinds
        where = fields.prefix.rstrip(".")
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{fields.file}: {where or 'its fields'} cannot be read as a {kind} config: {reason}. "
            "Correct the field, or fetch the checkpoint again"
        ) from error


def _sliding(fields: Fields, filled: Any) -> tuple[int | None, tuple[bool, ...]]:
    """Window, and per layer whether it has one."""
    kinds = getattr(filled, "layer_types", None) or []
    if strange := sorted(set(kinds) - set(_LAYER_KINDS)):
        raise fields.error(
            "layer_types",
            f"layers of kind {' or '.join(_LAYER_KINDS)}",
            f"layers of kind {', '.join(strange)} are not supported; use another drafter",
        )
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if not any(sliding):
        return None, ()
    if getattr(filled, "sliding_window", None) is None:
        # Qwen3Config drops the window without that flag, while other readers keep it.
        if fields.values.get("model_type", "qwen3") == "qwen3" and "sliding_window" in fields:
            raise fields.error(
                "use_sliding_window",
                "true, as layer_types names sliding layers",
                f"set it to true if the drafter was trained with its sliding_window of "
                f"{fields.values['sliding_window']}",
            )
        raise fields.error("sliding_window", "a whole number, as layer_types names sliding layers")
    if filled.sliding_window < 1:
        raise fields.error("sliding_window", "a whole number of at least 1")
    return int(filled.sliding_window), sliding


def _rope(
    fields: Fields, parameters: dict[str, Any], nested: Literal["equal", "sliding"]
) -> dict[str, Any]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(parameters)
    kinds = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    if kinds:
        chosen = kinds.get("sliding_attention") if nested == "sliding" else None
        if chosen is None:
            first, *others = kinds.values()
            if any(other != first for other in others):
                raise fields.error(
                    "rope_parameters",
                    "the same parameters for all kinds of layers",
                    "drafters whose kinds of layers rotate differently are not supported",
                )
            chosen = first
        rope = dict(chosen)
    theta = fields.number("rope_theta")
    if theta is not None and theta != rope.get("rope_theta", theta):
        raise fields.error("rope_theta", f"{rope['rope_theta']}, as in rope_parameters")
    scaling, given = fields.section("rope_scaling"), fields.section("rope_parameters")
    if scaling is not None and given is not None:
        for name in scaling.values.keys() & given.values.keys():
            if scaling.values[name] != given.values[name]:
                raise scaling.error(name, f"{given.values[name]}, as in rope_parameters")
    if not rope.get("rope_theta", 1.0) > 0:
        raise fields.error("rope_theta", "a number above 0")
    kind = rope.get("rope_type", "default")
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        raise CheckpointError(
            f"{fields.file}: its rotary embedding is of type {kind!r}, which transformers does not "
            f"know (known: default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}); use another drafter"
        )
    rotated = fields.number("partial_rotary_factor")
    if rotated is not None and rotated != 1.0:
        rope["partial_rotary_factor"] = rotated  # refused by name where the network is built
    return rope
