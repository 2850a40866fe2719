"""Record what the `dflash` package drafts, for z-lab checkpoints: `fixtures/dflash/*`.

    python3 -m venv ../dflash-env
    ../dflash-env/bin/pip install -r tests/equivalence/requirements-dflash.txt
    ../dflash-env/bin/python tests/equivalence/record_dflash.py

Pinned: dflash 0.1.0, torch 2.13.0, transformers 5.15.0. Each drafter is trained for a few dozen
steps, through the package's own forward, on the target's text, and training stops when it is right
about some of it: so a run of the package's own generation has rejections as well as acceptances.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import dflash.model as package
import torch
from recording import (
    FIXTURES,
    HIDDEN,
    MASK,
    NEW_TOKENS,
    PROMPT,
    VOCAB,
    Drafts,
    Text,
    randomise,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config

BLOCK = 6
GENERATED = NEW_TOKENS + BLOCK
WINDOW = 9
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"num_hidden_layers": 2, "block_size": BLOCK},
    "sliding": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "block_size": BLOCK,
        **_SLIDING,
    },
    "sliding-noncausal": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "is_causal": False,
        "block_size": BLOCK,
        **_SLIDING,
    },
    "scaled": {
        "num_hidden_layers": 2,
        "dflash_config": {
            "block_size": BLOCK,
            "input_embedding_scale": 1.6,
            "output_multiplier": 0.8,
            "final_logit_softcapping": 12.0,
        },
    },
}


def config_of(variant: dict[str, Any]) -> Qwen3Config:
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "num_target_layers": 6,
        "tie_word_embeddings": False,
    }
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]} | variant.get("dflash_config", {})
    return Qwen3Config(**{**common, **variant, "dflash_config": own})


def draft_logits(model: package.DFlashDraftModel, text: Text, n: int) -> Tensor:
    """`[block - 1, vocab]`: what the model drafts after `n` tokens, from nothing cached."""
    tokens, target = text.tokens + text.beyond, text.model
    size = model.block_size
    block = torch.tensor([[tokens[n - 1]] + [MASK] * (size - 1)])
    scale = float(package._draft_value(model.config, "input_embedding_scale", 1.0))
    layers = [layer + 1 for layer in model.target_layer_ids]
    hidden = model(
        target_hidden=text.features(layers, n - 1)[None],
        noise_embedding=package._raw_input_embeddings(target, block, scale),
        position_ids=torch.arange(n - 1 + size)[None],
    )
    return model.compute_logits(hidden[:, 1:], target.lm_head)[0]


def train(model: package.DFlashDraftModel, text: Text, steps: int, seed: int) -> None:
    """Take `steps` steps on blocks of the text, some prefix lengths left out."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    tokens = text.tokens + text.beyond
    known = [n for n in text.prefixes if n % 4]
    for _ in range(steps):
        loss = torch.zeros(())
        for pick in torch.randint(len(known), (8,), generator=generator).tolist():
            n = known[pick]
            labels = torch.tensor(tokens[n : n + model.block_size - 1])
            loss = loss + cross_entropy(draft_logits(model, text, n), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def drafts_of(model: package.DFlashDraftModel, text: Text) -> Drafts:
    logits = torch.stack([draft_logits(model, text, n) for n in text.prefixes])
    return Drafts(logits.argmax(-1), logits)


def generate(model: package.DFlashDraftModel, text: Text, drafts: Drafts) -> dict[str, Tensor]:
    """Run the package's own generation and check that its cached drafts are the recorded ones.

    Its last rounds shrink the block to what is left to generate, which asks the drafter something
    else; only rounds with a full block are recorded.
    """
    seen: list[Tensor] = []
    compute = model.compute_logits

    def watched(hidden: Tensor, head: torch.nn.Module) -> Tensor:
        logits = compute(hidden, head)
        seen.append(logits[0].clone())
        return logits

    model.compute_logits = watched  # type: ignore[method-assign]
    # The package times with CUDA events; there is no CUDA device here, and the times are not used.
    package._cuda_time = time.perf_counter
    prompt = torch.tensor([PROMPT])
    result = package.dflash_generate(model, text.model, prompt, GENERATED, None, return_stats=True)
    del model.compute_logits
    n, rounds = len(PROMPT) + 1, []
    for logits, produced in zip(seen, result.acceptance_lengths, strict=False):
        if len(logits) < model.block_size - 1 or n not in text.prefixes:
            break
        difference = (logits - drafts.logits[n - text.prefixes.start]).abs().max()
        assert difference < 2e-5, (n, difference)
        rounds.append(produced)
        n += produced
    output = result.output_ids[0]
    assert output.tolist() == (text.tokens + text.beyond)[: len(output)]
    return {"generated": output, "acceptance_lengths": torch.tensor(rounds)}


def record(name: str, variant: dict[str, Any], text: Text) -> None:
    folder = FIXTURES / "dflash" / name
    for seed in range(40):
        torch.manual_seed(seed)
        model = package.DFlashDraftModel(config_of(variant)).float().eval()
        randomise(model, seed)
        for _ in range(30):
            train(model, text, 10, seed)
            drafts = drafts_of(model, text)
            if not (drafts.mixed(text) and rounds_are_mixed(drafts, text)):
                continue
            if drafts.steady(drafts_of(model, text.jittered())):
                save(model, folder)
                loaded = package.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
                drafts = drafts_of(loaded.eval(), text)
                with torch.no_grad():
                    extra = generate(loaded, text, drafts)
                drafts.write(folder, text, extra)
                print(f"  seed {seed}, rounds {extra['acceptance_lengths'].tolist()}")
                return
    raise SystemExit(f"no seed gives usable drafts for {name}")


def rounds_are_mixed(drafts: Drafts, text: Text) -> bool:
    """Whether generation would take six rounds or more, with rejections and acceptances."""
    counts, n, rounds = drafts.accepted(text), text.prefixes.start, []
    while n in text.prefixes:
        rounds.append(counts[n - text.prefixes.start])
        n += rounds[-1] + 1
    return len(rounds) >= 8 and rounds.count(0) >= 2 and sum(r >= 2 for r in rounds) >= 3


def save(model: package.DFlashDraftModel, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]


def main() -> None:
    torch.set_num_threads(1)
    text = Text.of("qwen3")
    for name, variant in VARIANTS.items():
        record(name, variant, text)


if __name__ == "__main__":
    main()
