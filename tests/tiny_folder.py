"""A complete model folder with a tiny random Llama and a chat tokenizer, for end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from whiflash_agents.models import embedded_template

CONTEXT = 1024


def save(folder: Path) -> Path:
    """Write the model to `folder` and return it. Its turns are gibberish that rarely ends."""
    tokenizer = tiny_gguf.fast_tokenizer()
    tokenizer.chat_template = embedded_template("chat_template.jinja")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
