"""Record what `speculators` drafts, for its own checkpoints: `fixtures/speculators/*`.

    python3 -m venv ../speculators-env
    ../speculators-env/bin/pip install -r tests/equivalence/requirements-speculators.txt
    ../speculators-env/bin/python tests/equivalence/record_speculators.py [variant ...]

Pinned: speculators 0.9.0, torch 2.14.1, transformers 5.19.0. The package has forwards for training
only, so drafts are read out of those. EAGLE-3: row `n - 2` of its training-time-test steps is the
draft after `n` tokens, when the tokens it is forced to read there are the ones it drafted itself.
DFlash: one anchor at the bonus token. Drafters are trained for a few dozen steps, through the same
forwards, until they are right about some of the target's text.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from recording import FIXTURES, HIDDEN, MASK, VOCAB, Drafts, Text, randomise
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

REDUCED = 60
BLOCK = 6
STEPS = 6
WINDOW = 9


@dataclass(frozen=True)
class Variant:
    """One checkpoint: which drafter, for which target, with which of its flags.

    Attributes:
        layer: what its transformer layers have beyond the common shape.
        flags: fields of the speculator's own config.
        own_embedding: whether its token embedding is not the target's.
        scale: of its random matrices; smaller where norms between steps amplify rounding.
    """

    drafter: str
    target: str = "qwen3"
    layers: str = "qwen3"
    vocab: int = VOCAB
    layer: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False
    scale: float = 0.25


_SLIDING_ONE = {"layer_types": ["sliding_attention"], "sliding_window": WINDOW}
_MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
}
_ids = "eagle_aux_hidden_state_layer_ids"

VARIANTS: dict[str, Variant] = {
    "eagle3-llama": Variant("eagle3", target="llama", layers="llama", vocab=REDUCED),
    "eagle3-llama-full-vocabulary": Variant(
        "eagle3", target="llama", layers="llama", own_embedding=True
    ),
    "eagle3-qwen3": Variant("eagle3", vocab=REDUCED),
    "eagle3-norm-before-residual": Variant(
        "eagle3", layers="llama", vocab=REDUCED, flags={"norm_before_residual": True}, scale=0.15
    ),
    "eagle3-norm-before-fc": Variant(
        "eagle3", layers="llama", vocab=REDUCED, flags={"norm_before_fc": True}
    ),
    "eagle3-fc-norm": Variant("eagle3", layers="llama", vocab=REDUCED, flags={"fc_norm": True}),
    "eagle3-norm-output": Variant(
        "eagle3",
        layers="llama",
        vocab=REDUCED,
        flags={"norm_output": True, "norm_before_residual": True},
        scale=0.15,
    ),
    "eagle3-sliding": Variant("eagle3", layers="llama", vocab=REDUCED, layer=_SLIDING_ONE),
    "eagle3-five-features": Variant("eagle3", vocab=REDUCED, flags={_ids: [0, 1, 2, 4, 5]}),
    "dflash-reduced-vocabulary": Variant("dflash", vocab=REDUCED),
    "dflash-full-vocabulary": Variant("dflash"),
    "dflash-sliding": Variant("dflash", vocab=REDUCED, layer=_MIXED),
    "dflash-sliding-non-causal": Variant(
        "dflash", vocab=REDUCED, layer=_MIXED, flags={"sliding_window_non_causal": True}
    ),
    "dflash-sample-from-anchor": Variant(
        "dflash", vocab=REDUCED, flags={"sample_from_anchor": True}
    ),
}


@cache
def text_of(target: str) -> Text:
    return Text.of(target)


def layer_config(variant: Variant) -> PretrainedConfig:
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[variant.layers]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1 if variant.drafter == "eagle3" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": False,
    }
    config = kind(**{**common, **variant.layer})
    # Takes boolean masks as they are; those of the eager implementation are built in bfloat16.
    config._attn_implementation = "sdpa"
    return config


def config_of(variant: Variant) -> Eagle3SpeculatorConfig | DFlashSpeculatorConfig:
    drafted = STEPS if variant.drafter == "eagle3" else BLOCK - 1
    if variant.flags.get("sample_from_anchor"):
        drafted += 1
    common = {
        "transformer_layer_config": layer_config(variant),
        "draft_vocab_size": variant.vocab,
        "speculators_config": SpeculatorsConfig(
            algorithm=variant.drafter,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafted)],
            default_proposal_method="greedy",
            # Relative, and `main` works from there: no path of a machine enters a fixture.
            verifier=VerifierConfig.from_pretrained(f"targets/{variant.target}"),
        ),
    }
    if variant.drafter == "eagle3":
        return Eagle3SpeculatorConfig(**{**common, _ids: [1, 3, 4], **variant.flags})
    return DFlashSpeculatorConfig(
        **common,
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[1, 3, 5],
        **variant.flags,
    )


def vocabulary_of(text: Text) -> tuple[Tensor, Tensor]:
    """A reduced vocabulary with most of the text's tokens: `t2d` mask and `d2t` offsets."""
    generator = torch.Generator().manual_seed(1)
    in_text = sorted(set(text.tokens + text.beyond))
    kept = set(in_text[: len(in_text) * 9 // 10])
    for token in torch.randperm(VOCAB, generator=generator).tolist():
        if len(kept) == REDUCED:
            break
        if token not in in_text:
            kept.add(token)
    chosen = torch.tensor(sorted(kept))
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return t2d, chosen - torch.arange(REDUCED)


def build(variant: Variant, text: Text, seed: int) -> Eagle3DraftModel | DFlashDraftModel:
    """A drafter with weights of our own."""
    torch.manual_seed(seed)
    kind = Eagle3DraftModel if variant.drafter == "eagle3" else DFlashDraftModel
    model = kind(config_of(variant)).float().eval()
    randomise(model, seed, scale=variant.scale)
    if variant.vocab != VOCAB:
        model.load_vocab_mappings(*vocabulary_of(text))
        with torch.no_grad():
            model.lm_head.weight.add_(text.model.lm_head.weight[model.t2d])
    elif variant.drafter == "eagle3":
        with torch.no_grad():
            model.lm_head.weight.add_(text.model.lm_head.weight)
    with torch.no_grad():
        if not variant.own_embedding:
            model.embed_tokens.weight.copy_(text.model.get_input_embeddings().weight)
        if variant.drafter == "dflash" and variant.vocab == VOCAB:
            model.lm_head.weight.copy_(text.model.lm_head.weight)
        head = text.model.lm_head.weight
        model.verifier_lm_head.weight.copy_(head if variant.vocab == VOCAB else head[model.t2d])
        model.verifier_norm.weight.copy_(text.model.model.norm.weight)
    return model


@contextmanager
def watched(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of `module`, one per call."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def to_target(model: Eagle3DraftModel | DFlashDraftModel, ids: Tensor) -> Tensor:
    return ids if model.d2t is None else ids + model.d2t[ids]


def eagle3_drafts(model: Eagle3DraftModel, text: Text, n: int) -> tuple[Tensor, Tensor]:
    """The greedy chain after `n` tokens: target ids `[STEPS]`, logits `[STEPS, draft_vocab]`."""
    rows, row = n - 1 + STEPS, n - 2
    features = torch.zeros(rows, len(model.target_layer_ids) * HIDDEN)
    features[: n - 1] = text.features(model.target_layer_ids, n - 1)
    shifted = torch.zeros(rows, dtype=torch.int64)
    shifted[: n - 1] = torch.tensor(text.tokens[1:n])
    for step in range(STEPS):
        with watched(model.lm_head) as seen:
            model(
                hidden_states=features[None],
                input_ids=shifted[None],
                document_ids=torch.zeros(1, rows, dtype=torch.int64),
                ttt_steps=step + 1,
            )
        logits = torch.stack([output[0, row] for output in seen])
        drafted = to_target(model, logits.argmax(-1))
        shifted[n - 1 + step] = drafted[-1]
    return drafted, logits


def no_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss term of zeros: the package's own are written for CUDA, and its loss is not used."""
    return torch.zeros(targets.shape[:2])


def dflash_forward(model: DFlashDraftModel, text: Text, anchors: list[int], rows: int) -> Tensor:
    """Logits `[anchors * BLOCK, draft_vocab]` of blocks at these positions of the text."""
    tokens = (text.tokens + text.beyond)[:rows]
    loss_mask = torch.zeros(1, rows, dtype=torch.bool)
    loss_mask[0, anchors] = True
    with watched(model.lm_head) as seen:
        model(
            hidden_states=text.features(model.target_layer_ids, rows)[None],
            input_ids=torch.tensor([tokens]),
            loss_mask=loss_mask,
            verifier_last_hidden_states=text.hidden_states[-1][:rows][None],
            document_ids=torch.zeros(1, rows, dtype=torch.int64),
            loss_config={"none": (no_loss, 1.0)},
            max_anchors=len(anchors),
        )
    return seen[0][0]


def dflash_drafts(model: DFlashDraftModel, text: Text, n: int) -> tuple[Tensor, Tensor]:
    """The block after `n` tokens, as `eagle3_drafts` gives it."""
    logits = dflash_forward(model, text, [n - 1], n + BLOCK)
    logits = logits if model.config.sample_from_anchor else logits[1:]
    return to_target(model, logits.argmax(-1)), logits


@torch.no_grad()
def drafts_of(model: Eagle3DraftModel | DFlashDraftModel, text: Text) -> Drafts:
    draft = eagle3_drafts if isinstance(model, Eagle3DraftModel) else dflash_drafts
    rows = [draft(model, text, n) for n in text.prefixes]
    return Drafts(torch.stack([ids for ids, _ in rows]), torch.stack([z for _, z in rows]))


def step_loss(
    model: Eagle3DraftModel | DFlashDraftModel, text: Text, generator: torch.Generator
) -> Tensor:
    """A cross-entropy on the text, through the forward that drafts are read from."""
    tokens = text.tokens + text.beyond
    draft_ids = torch.full((VOCAB,), -100)
    draft_ids[to_target(model, torch.arange(model.draft_vocab_size))] = torch.arange(
        model.draft_vocab_size
    )
    if isinstance(model, Eagle3DraftModel):
        rows = len(tokens) - 1 - STEPS
        with watched(model.lm_head) as seen:
            model(
                hidden_states=text.features(model.target_layer_ids, rows)[None],
                input_ids=torch.tensor([tokens[1 : rows + 1]]),
                document_ids=torch.zeros(1, rows, dtype=torch.int64),
                ttt_steps=STEPS,
            )
        known = [n for n in text.prefixes if n % 4 and n - 2 < rows - STEPS]
        total = torch.zeros(())
        for step, logits in enumerate(seen):
            labels = torch.tensor([tokens[n + step] for n in known])
            at = torch.tensor([n - 2 for n in known])
            total = total + torch.nn.functional.cross_entropy(logits[0, at], draft_ids[labels])
        return total
    known = [n for n in text.prefixes if n % 4]
    picks = sorted(torch.randperm(len(known), generator=generator)[:8].tolist())
    anchors = [known[pick] - 1 for pick in picks]
    logits = dflash_forward(model, text, anchors, len(tokens))
    shift = 1 if model.config.sample_from_anchor else 0
    labels = torch.tensor([tokens[a + i + shift] for a in anchors for i in range(BLOCK)])
    used = torch.arange(len(labels)) % BLOCK >= 1 - shift
    return torch.nn.functional.cross_entropy(logits[used], draft_ids[labels[used]])


def record(name: str, variant: Variant) -> None:
    folder = FIXTURES / "speculators" / name
    text = text_of(variant.target)
    for seed in range(20):
        model = build(variant, text, seed)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for fixed in (model.embed_tokens, model.lm_head):
            fixed.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=2e-3)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            for _ in range(10):
                loss = step_loss(model, text, generator)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            drafts = drafts_of(model, text)
            if drafts.mixed(text) and drafts.steady(drafts_of(model, text.jittered())):
                save(model, folder)
                drafts_of(load(folder), text).write(folder, text)
                print(f"  seed {seed}", flush=True)
                return
    raise SystemExit(f"no seed gives usable drafts for {name}")


def save(model: Eagle3DraftModel | DFlashDraftModel, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # the package leaves a copy of its source there


def load(folder: Path) -> Eagle3DraftModel | DFlashDraftModel:
    """The checkpoint as the package reads it: what it left out comes from the target."""
    kind = Eagle3DraftModel if folder.name.startswith("eagle3") else DFlashDraftModel
    config = kind.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return kind.from_pretrained(folder, config=config).float().eval()


def main() -> None:
    torch.set_num_threads(1)
    os.chdir(FIXTURES)
    for name in sys.argv[1:] or VARIANTS:
        record(name, VARIANTS[name])


if __name__ == "__main__":
    main()
