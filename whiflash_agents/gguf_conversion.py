"""Turn a llama-architecture GGUF file into a folder that transformers loads: bfloat16 safetensors,
`config.json`, `generation_config.json` and a byte-level BPE tokenizer.

Used once, for the embedded default model (`embedded/default_target.py`). Only what that file needs
is understood; anything else is refused by name rather than converted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whiflash_agents.engine.errors import CheckpointError

# GGUF tensor names of the llama architecture, and transformers' names for them.
_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: a special token


def convert_gguf(
    source: Path, folder: Path, *, on_progress: Callable[[float], None] | None = None
) -> None:
    """Write the model and tokenizer in `source` to `folder` (created if needed).

    `on_progress` is called with the share done, 0 to 1. Weights are dequantised to float32 and
    rounded to bfloat16 once; tied embeddings are stored once.

    Raises:
        CheckpointError: the file is not GGUF, or holds an architecture, tensor or tokenizer this
            conversion does not know.
        OSError: the folder cannot be written (disk full, no permission).
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source} is not a readable GGUF file: {error}") from error
    metadata = _Metadata(source, reader)
    architecture = metadata.read("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{source}: architecture {architecture!r} is not supported here, expected 'llama'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _model_config(metadata, tied=tied)
    _write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", token_ids)
    _write_tokenizer(metadata, folder)
    _write_weights(reader, config, source, folder / "model.safetensors", on_progress)


class _Metadata:
    """The key/value part of a GGUF file, with errors that name the missing key."""

    def __init__(self, source: Path, reader: Any) -> None:
        self.source = source
        self._fields = reader.fields

    def read(self, key: str, default: Any = None) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is not None:
            return default
        raise CheckpointError(f"{self.source}: GGUF key {key!r} is missing; the file is incomplete")


def _model_config(metadata: _Metadata, *, tied: bool) -> dict[str, Any]:
    heads = metadata.read("llama.attention.head_count")
    hidden = metadata.read("llama.embedding_length")
    # The file stores single precision (9.999999747e-06); six digits give back the trained value.
    norm_eps = float(f"{metadata.read('llama.attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata.read("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": metadata.read("llama.feed_forward_length"),
        "num_hidden_layers": metadata.read("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.read("llama.attention.head_count_kv", heads),
        "head_dim": metadata.read("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.read("llama.context_length"),
        "rms_norm_eps": norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(metadata.read("llama.rope.freq_base", 10000.0)),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.read("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.read("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(
    reader: Any,
    config: dict[str, Any],
    source: Path,
    target: Path,
    on_progress: Callable[[float], None] | None,
) -> None:
    import numpy
    import torch
    from gguf.quants import dequantize
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        # A copy, because unquantised tensors are views of the read-only file.
        values = torch.from_numpy(numpy.array(dequantize(tensor.data, tensor.tensor_type)))
        name, part = _transformers_name(tensor.name, source)
        if part in heads:
            values = _undo_rope_permutation(values, heads[part])
        weights[name] = values.to(torch.bfloat16).contiguous()
        if on_progress is not None:
            on_progress(0.9 * done / len(reader.tensors))
    expected = _expected_tensors(config)
    if missing := sorted(expected - weights.keys()):
        raise CheckpointError(
            f"{source}: {len(missing)} tensors are missing ({missing[0]}, ...): incomplete file"
        )
    try:
        save_file(weights, target, metadata={"format": "pt"})
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(f"{target} could not be written: {error}") from error
    if on_progress is not None:
        on_progress(1.0)


def _transformers_name(name: str, source: Path) -> tuple[str, str | None]:
    """transformers' name of a GGUF tensor, and which part of a layer it is."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name], None
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER_TENSORS:
        return f"model.layers.{pieces[1]}.{_LAYER_TENSORS[pieces[2]]}.{pieces[3]}", pieces[2]
    raise CheckpointError(f"{source}: tensor {name!r} is not part of a plain llama model")


def _expected_tensors(config: dict[str, Any]) -> set[str]:
    names = {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(config["num_hidden_layers"])
        for part in _LAYER_TENSORS.values()
    }
    names |= {"model.embed_tokens.weight", "model.norm.weight"}
    return names if config["tie_word_embeddings"] else names | {"lm_head.weight"}


def _undo_rope_permutation(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection from GGUF's order to transformers'.

    weight: [heads * head_dim, hidden]. GGUF pairs the two halves of each rotary dimension next to
    each other (0, d/2, 1, d/2+1, ...); transformers keeps the halves apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(metadata: _Metadata, folder: Path) -> None:
    """Rebuild the tokenizer; GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) but does not
    carry it, so only the one we know is accepted."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.read("tokenizer.ggml.model"), metadata.read("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(
            f"{metadata.source}: tokenizer {kind} is not supported here, expected "
            "('gpt2', 'smollm')"
        )
    tokens: list[str] = metadata.read("tokenizer.ggml.tokens")
    kinds: list[int] = metadata.read("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in metadata.read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    # Digits one by one first, then GPT-2's splitting of what is between them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    def token(name: str) -> str:
        return tokens[metadata.read(f"tokenizer.ggml.{name}_token_id")]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.read("llama.context_length"),
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
