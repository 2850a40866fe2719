"""A tiny model folder, drafters of it and of another target, and traces, for end-to-end tests."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_drafters
import tiny_folder
from scripted import write_traces

from whiflash_agents.engine.checkpoints import save_dflash, save_eagle3
from whiflash_agents.engine.drafters.dflash_model import DFlashConfig, DFlashModel
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Config, Eagle3Model

TRACES = {"a": ["What is up?", "Much.", "And now?", "Little."], "b": ["Hello!", "Hi."]}


def save(root: Path) -> Path:
    """Write `target`, `eagle3`, `dflash`, `other` (an EAGLE-3 drafter of another target) and
    `traces.jsonl` to `root` and return it. Three turns; random drafters."""
    tiny_folder.save(root / "target")
    vocab = json.loads((root / "target" / "config.json").read_text())["vocab_size"]
    eagle3 = Eagle3Model(Eagle3Config(tiny_drafters.layers(), (0, 1), 32, vocab, vocab))
    dflash = DFlashModel(
        DFlashConfig(tiny_drafters.layers(num_layers=2), (1, 2), vocab, 2, 5, mask_token_id=3)
    )
    other = Eagle3Model(
        Eagle3Config(tiny_drafters.layers(), (0, 1), 48, vocab, vocab, own_embedding=True)
    )
    for seed, model in enumerate((eagle3, dflash, other)):
        tiny_drafters.randomise(model, seed)
    save_eagle3(eagle3, root / "eagle3")
    save_dflash(dflash, root / "dflash")
    save_eagle3(other, root / "other")
    write_traces(root / "traces.jsonl", TRACES)
    return root
