"""A small llama model with SmolLM2's kind of tokenizer, as transformers has it and as GGUF."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = [
    "The weather in Paris is fine, and the tool was called with a city.\n",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
    "<think>\nI should look.\n</think>\nuser assistant system <tool_response> </tool_response>\n",
    "Größe 日本語 😀 naïve <b> a <tool_call>, x.<think>\n\n  two spaces\n",
    "assistant\n\n\n  x</think><tool_call>\n\n\n  y</think><tool_call>\n",
]


@cache
def trained_tokenizer() -> Any:
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) of some 500 tokens. It has a merge of two
    digits, which splitting digits one by one must keep from being used."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["20"] = len(state["model"]["vocab"])
    state["model"]["merges"].append(["2", "0"])
    return Tokenizer.from_str(json.dumps(state))


def fast_tokenizer() -> Any:
    """The same, as transformers wraps it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )


def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=trained_tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    leave_out: str | None = None,
) -> None:
    """Write `model` and the tokenizer as llama.cpp's converter would."""
    import numpy
    from gguf import GGUFWriter, TokenType

    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    model_part = json.loads(trained_tokenizer().to_str())["model"]
    tokens = sorted(model_part["vocab"], key=model_part["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model_part["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    for name, values in _gguf_tensors(model).items():
        if name != leave_out:
            writer.add_tensor(name, numpy.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(model: Any) -> dict[str, Any]:
    parts = {
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
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    for layer in range(model.config.num_hidden_layers):
        for part, name in parts.items():
            values = state[f"model.layers.{layer}.{name}.weight"]
            if part in heads:
                rows, columns = values.shape
                halves = values.reshape(heads[part], 2, rows // heads[part] // 2, columns)
                values = halves.swapaxes(1, 2).reshape(rows, columns)
            out[f"blk.{layer}.{part}.weight"] = values
    return out
