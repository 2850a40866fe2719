"""Tiny random float32 targets and scripted drafters that the engine's tests share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.target import Target

VOCAB = 96
EOS = 2
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=7),
}


def model(architecture: str) -> Any:
    """A fresh random model whose next-token distributions are neither flat nor one-hot."""
    torch.manual_seed(7)
    net = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).float().eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.6 if "embed" in name or "lm_head" in name else 0.25)
    return net


@cache
def target(architecture: str = "llama") -> Target:
    return Target(model(architecture), name=f"tiny-{architecture}")


def text_of(token_ids: Sequence[int]) -> str:
    """A decode function: one printable character per token."""
    return "".join(chr(ord("0") + t % 75) for t in token_ids)


class ScriptedDrafter:
    """Drafts from a known answer: `mode` perfect proposes it, wrong never does, random proposes
    trees in which right and wrong tokens mix at random places."""

    def __init__(self, mode: str, answers: Mapping[str, Sequence[int]], seed: int = 0) -> None:
        self.name = mode
        self._answers = answers
        self._random = random.Random(seed)
        self._consumed: dict[str, int] = {}

    def open(self, sequence: SequenceState) -> None:
        assert sequence.id not in self._consumed
        self._consumed[sequence.id] = 0

    def close(self, sequence: SequenceState) -> None:
        del self._consumed[sequence.id]

    def backlog(self, sequence: SequenceState) -> int:
        return len(sequence.tokens) - self._consumed[sequence.id]

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            self._consumed[sequence.id] = len(sequence.tokens)

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        return [self._draft(s, limit) for s, limit in zip(sequences, limits, strict=True)]

    def _draft(self, sequence: SequenceState, limit: DraftLimit) -> DraftTree:
        root = sequence.tokens[-1]
        coming = list(self._answers[sequence.id][sequence.num_output :])
        depth = min(limit.depth, limit.nodes, 6)
        if self.name == "perfect":
            return DraftTree.chain(root, coming[:depth])
        if self.name == "wrong":
            return DraftTree.chain(root, [(t + 1) % VOCAB for t in coming[:depth]])
        tree = DraftTree(root)
        nodes = [0]
        for _ in range(min(limit.nodes, self._random.randrange(12))):
            parent = self._random.choice(nodes[-4:])
            at = tree.depths[parent]
            if at >= limit.depth:
                continue
            right = at < len(coming) and self._random.random() < 0.6
            token = coming[at] if right else self._random.randrange(VOCAB)
            node = tree.add(parent, token)
            if node not in nodes:
                nodes.append(node)
        return tree
