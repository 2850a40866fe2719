"""Make the targets of the equivalence fixtures: `fixtures/targets/{qwen3,llama}`.

    python tests/equivalence/record_targets.py

Runs in any of the environments (written with torch 2.13.0, transformers 5.24.0). Every other
fixture depends on these weights: after running it, run both recording scripts again.
"""

from __future__ import annotations

import shutil

import torch
from recording import (
    EOS,
    FIXTURES,
    HIDDEN,
    MASK,
    NEW_TOKENS,
    VOCAB,
    greedy,
    randomise,
    smallest_gap,
)
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}


def record(name: str, config: PretrainedConfig) -> None:
    """Try seeds until the greedy text is varied and without near-ties, and save that model."""
    for seed in range(200):
        model = AutoModelForCausalLM.from_config(config).float().eval()
        randomise(model, seed)
        tokens, logits = greedy(model, NEW_TOKENS + 16)
        text = tokens[-NEW_TOKENS - 16 :]
        probabilities = logits.softmax(-1)
        if (
            smallest_gap(logits) > 0.02
            and len(set(text)) >= 24
            and not {MASK, EOS} & set(tokens)
            and 0.1 < float(probabilities.max(-1).values.mean()) < 0.9
        ):
            folder = FIXTURES / "targets" / name
            shutil.rmtree(folder, ignore_errors=True)
            model.save_pretrained(folder)
            print(f"{name}: seed {seed}, smallest gap {smallest_gap(logits):.4f}, {tokens}")
            return
    raise SystemExit(f"no seed gives a usable target for {name}")


def main() -> None:
    torch.set_num_threads(1)
    record("qwen3", Qwen3Config(**_SHAPE))
    record("llama", LlamaConfig(**_SHAPE))


if __name__ == "__main__":
    main()
