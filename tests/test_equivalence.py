"""Drafters against independent implementations: same weights, same logits, same draft tokens.

First the networks alone, on features of a plain forward; then transformers' own DFlash generation,
run live; then the engine. The recordings of `dflash` and `speculators` are made by
`equivalence/record_*.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from recorded import DFLASH, EAGLE3, FIXTURES, NAMES, Z_LAB, Recorded, plain_target, recorded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from whiflash_agents.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.dflash_model import DFlashModel
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.drafters.eagle3_model import Eagle3Model
from whiflash_agents.engine.request import Request, SamplingParams
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.sequence import SequenceState

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def assert_same(got: Tensor, wanted: Tensor, where: str) -> None:
    difference = float((got - wanted).abs().max())
    assert difference < TOLERANCE, f"{where}: logits differ by {difference:.2e}"


# The networks


def dflash_draft(model: DFlashModel, record: Recorded, n: int) -> tuple[list[int], Tensor]:
    """One block after `n` tokens: target token ids, and logits `[drafted, draft_vocab]`."""
    config = model.config
    block = model.block_tokens(torch.tensor([record.tokens[n - 1]]))[0]
    embedded = record.embed(block) if model.embed_tokens is None else model.embed_tokens(block)
    hidden = model(record.features(config.feature_layers, n), embedded)
    hidden = hidden if config.sample_from_anchor else hidden[1:]
    head = record.plain.lm_head if model.head is None else model.head
    logits = model.scale_logits(head(hidden))
    ids = logits.argmax(-1)
    return (ids if model.head is None else model.head.target_ids(ids)).tolist(), logits


def eagle3_draft(
    model: Eagle3Model, record: Recorded, n: int, steps: int
) -> tuple[list[int], Tensor]:
    """The greedy chain after `n` tokens, as `dflash_draft` gives a block.

    In a sliding layer, all of a chain sees what its first row sees: that is what `speculators`
    trains.
    """
    embed = record.embed if model.embed_tokens is None else model.embed_tokens
    features = record.features(model.config.feature_layers, n)
    embedded, positions = embed(torch.tensor(record.tokens[1:n])), torch.arange(n - 1)
    hidden = model(features, embedded, positions)[-1:]
    attention, window = model.midlayer.self_attn, model.config.layer.window(0)
    x, _ = model.attention_input(embedded, model.project(features))
    keys, values = attention.keys_values(x, model.rotary(positions, x.dtype))
    if window is not None:
        keys, values = keys[:, -window:], values[:, -window:]
    tokens, rows = [], []
    for step in range(steps):
        rows.append(model.logits(hidden)[0])
        tokens.append(int(model.head.target_ids(rows[-1].argmax(-1))))
        x, residual = model.attention_input(embed(torch.tensor(tokens[-1:])), hidden)
        rotation = model.rotary(torch.tensor([n - 1 + step]), x.dtype)
        key, value = attention.keys_values(x, rotation)
        keys, values = torch.cat((keys, key), dim=1), torch.cat((values, value), dim=1)
        query = attention.queries(x, rotation).transpose(0, 1)
        attended = scaled_dot_product_attention(
            query[None], keys[None], values[None], enable_gqa=True
        )
        hidden = model.finish(attended[0].transpose(0, 1).flatten(1), residual)
    return tokens, torch.stack(rows)


def test_every_variant_has_a_recording() -> None:
    assert (len(EAGLE3), len(Z_LAB), len(DFLASH) - len(Z_LAB)) == (9, 4, 5)


@pytest.mark.parametrize("name", NAMES)
def test_recordings_hold_rejections_and_acceptances(name: str) -> None:
    record = recorded(name)
    accepted = []
    for n in record.prefixes[:-6]:
        draft = record.drafts(n)[0]
        right = [a == b for a, b in zip(draft, record.tokens[n:], strict=False)]
        accepted.append([*right, False].index(False))
    assert accepted.count(0) >= 4
    assert sum(count >= 2 for count in accepted) >= 4


@pytest.mark.parametrize("name", DFLASH)
def test_dflash_blocks_equal_the_reference_after_every_prefix(name: str) -> None:
    record = recorded(name)
    model = load_dflash(record.checkpoint, record.target)
    for n in record.prefixes:
        tokens, logits = dflash_draft(model, record, n)
        wanted, wanted_logits = record.drafts(n)
        assert_same(logits, wanted_logits, f"after {n} tokens")
        assert tokens == wanted


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_chains_equal_the_reference_after_every_prefix(name: str) -> None:
    record = recorded(name)
    model = load_eagle3(record.checkpoint, record.target)
    for n in record.prefixes:
        wanted, wanted_logits = record.drafts(n)
        tokens, logits = eagle3_draft(model, record, n, len(wanted))
        assert_same(logits, wanted_logits, f"after {n} tokens")
        assert tokens == wanted


# transformers' DFlash generation


def assistant_of(checkpoint: Path, **changes: Any) -> MuseGlimmerAssistantModel:
    """A z-lab checkpoint as transformers' DFlash assistant: same arithmetic, other names."""
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim rms_norm_eps rope_parameters max_position_embeddings layer_types block_size"
    )
    fields = {name: config[name] for name in same.split()} | config["dflash_config"] | changes
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**fields)).float().eval()
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    weights = load_file(checkpoint / "model.safetensors")
    model.load_state_dict({names.get(name, name): tensor for name, tensor in weights.items()})
    return model


def test_transformers_dflash_generation_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded("dflash/full")
    model = load_dflash(record.checkpoint, record.target)
    seen: dict[int, tuple[list[int], Tensor]] = {}
    propose = DFlashTokenCandidateGenerator.get_candidates

    def watched(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = propose(self, input_ids, *args, **kwargs)
        if logits is not None:
            n = input_ids.shape[1]
            seen[n] = (ids[0, n:].tolist(), logits[0].clone())
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    output = plain_target("qwen3").generate(
        torch.tensor([record.prompt]),
        assistant_model=assistant_of(record.checkpoint),
        speculation_type="dflash",
        max_length=len(record.tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output[0].tolist() == record.tokens
    assert len(seen) >= 12
    assert len(seen) < len(record.prefixes)
    for n, (wanted, wanted_logits) in seen.items():
        tokens, logits = dflash_draft(model, record, n)
        assert_same(logits, wanted_logits, f"after {n} tokens")
        assert tokens == wanted == record.drafts(n)[0]


def test_transformers_bidirectional_window_is_the_same_but_counts_one_less() -> None:
    # z-lab's window of w sees distances below w, transformers' bidirectional one up to w.
    record = recorded("dflash/sliding-noncausal")
    model = load_dflash(record.checkpoint, record.target)
    window = model.config.layers.sliding_window
    assistant = assistant_of(record.checkpoint, sliding_window=window - 1)
    for n in record.prefixes:
        block = model.block_tokens(torch.tensor(record.tokens[n - 1 : n]))[0]
        features = record.features(model.config.feature_layers, n)
        hidden = transformers_block(assistant, features, record.embed(block))
        assert_same(record.plain.lm_head(hidden[1:]), record.drafts(n)[1], f"after {n} tokens")


def transformers_block(
    assistant: MuseGlimmerAssistantModel, features: Tensor, embedded: Tensor
) -> Tensor:
    """One uncached forward of the assistant, with the cache only to say where the block begins."""
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=assistant.config)
    cache.set_previous_accepted_tokens(len(features))
    output = assistant(
        noise_embeds=embedded[None], context_hidden_states=features[None], cache=cache
    )
    return output.last_hidden_state[0]


# The engine

SCHEDULES = {
    "always": ("own",),
    "after plain rounds": ("own", "none", "none", "own", "none"),
    "after jumps": ("own", "jump", "none", "own", "jump", "jump"),
}
CATCHING_UP = {
    "lazy": {},
    "eager": {"catch_up": "eager"},
    "full prefill": {"draft_prefill": "full"},
    "small backlog": {"max_backlog": 3},
}


class Schedule(Router):
    """A router that goes through its arms, round by round."""

    name = "schedule"

    def __init__(self, arms: Sequence[str]) -> None:
        self.arms = tuple({arm for arm in arms if arm != "none"})
        self._cycle = arms

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [self._cycle[len(s.stats.rounds) % len(self._cycle)] for s in sequences]


def own_drafter(name: str, record: Recorded) -> Eagle3Drafter | DFlashDrafter:
    """The recorded drafter as the engine runs it, EAGLE-3 as a chain."""
    if name in DFLASH:
        return DFlashDrafter(load_dflash(record.checkpoint, record.target))
    steps = record.draft_tokens.shape[1]
    model = load_eagle3(record.checkpoint, record.target)
    return Eagle3Drafter(model, depth=steps, top_k=1, total_tokens=steps)


def watch(drafter: Eagle3Drafter | DFlashDrafter, key: str) -> dict[int, list[int]]:
    """Drafts of the request `key` by the length of the text that they were made for."""
    seen: dict[int, list[int]] = {}
    draft = drafter.draft

    def watched(
        sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        trees = draft(sequences, limits)
        for sequence, tree in zip(sequences, trees, strict=True):
            if sequence.id == key:
                assert tree.is_chain
                seen[len(sequence.tokens)] = tree.tokens[1:]
        return trees

    drafter.draft = watched  # type: ignore[method-assign]
    return seen


def watch_logits(drafter: Eagle3Drafter | DFlashDrafter) -> list[Tensor]:
    """Logits of the only running sequence: `[rows, draft_vocab]` per call, all drafts in a row."""
    seen: list[Tensor] = []
    model: Any = drafter.context.model
    kind = "logits" if isinstance(drafter, Eagle3Drafter) else "scale_logits"
    compute = getattr(model, kind)

    def watched(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    setattr(model, kind, watched)
    return seen


def engine_over(
    record: Recorded, drafter: Any, schedule: str, **settings: Any
) -> tuple[WhiFlashEngine, Request]:
    """An engine whose `jump` arm drafts the recorded text itself, and the request for that text."""
    continuation = record.tokens[record.prompt_tokens :]
    # Longer than the recording, so that no limit cuts a draft within it.
    sampling = SamplingParams(max_tokens=len(continuation) + 8, temperature=0.0, ignore_eos=True)
    request = Request("text", record.prompt, sampling)
    arms = SCHEDULES[schedule]
    given = {
        "own": drafter,
        "jump": tiny.ScriptedDrafter("perfect", {"text": continuation, "other": ()}),
    }
    engine = WhiFlashEngine(
        record.target,
        router=Schedule(arms),
        drafters={arm: given[arm] for arm in set(arms) - {"none"}},
        settings=EngineSettings(**{"kv_tokens": 1024, "prefill_chunk": 5, **settings}),
        decode=lambda ids: " ".join(map(str, ids)),
    )
    return engine, request


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_engine_drafts_equal_the_reference_after_rejections_and_switches(
    name: str, schedule: str
) -> None:
    record = recorded(name)
    drafter = own_drafter(name, record)
    seen, logits = watch(drafter, "text"), watch_logits(drafter)
    engine, request = engine_over(record, drafter, schedule)
    tokens = engine.generate([request])[0].token_ids
    assert (
        tokens[: len(record.tokens) - record.prompt_tokens]
        == (record.tokens[record.prompt_tokens :])
    )
    compared = {n: draft for n, draft in seen.items() if n in record.prefixes}
    assert compared == {n: record.drafts(n)[0] for n in compared}
    assert len(compared) >= (12 if schedule == "always" else 3)
    at = 0
    rows = torch.cat(logits)
    for n, draft in seen.items():
        if n in record.prefixes:
            assert_same(rows[at : at + len(draft)], record.drafts(n)[1], f"after {n} tokens")
        at += len(draft)


@pytest.mark.parametrize("catching_up", CATCHING_UP)
@pytest.mark.parametrize("name", ["dflash/sliding", "speculators/eagle3-qwen3"])
def test_engine_drafts_equal_the_reference_however_and_beside_whomever_it_catches_up(
    name: str, catching_up: str
) -> None:
    record = recorded(name)
    drafter = own_drafter(name, record)
    seen = watch(drafter, "text")
    engine, request = engine_over(record, drafter, "after jumps", **CATCHING_UP[catching_up])
    other = Request("other", record.prompt[::-1], request.sampling)
    engine.generate([other, request])
    compared = {n: draft for n, draft in seen.items() if n in record.prefixes}
    assert compared == {n: record.drafts(n)[0] for n in compared}
    assert len(compared) >= 3


@pytest.mark.parametrize("name", Z_LAB)
def test_engine_rounds_accept_what_the_reference_accepts(name: str) -> None:
    record = recorded(name)
    assert record.acceptance_lengths is not None
    engine, request = engine_over(record, own_drafter(name, record), "always")
    rounds = engine.generate([request])[0].stats.rounds
    count = len(record.acceptance_lengths)
    assert [r.accepted + 1 for r in rounds[:count]] == record.acceptance_lengths


@pytest.mark.parametrize("target", ["qwen3", "llama"])
def test_recordings_of_one_target_share_its_text(target: str) -> None:
    texts = [recorded(name).tokens for name in NAMES if recorded(name).target.name == target]
    assert len(texts) >= 2
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("name", Z_LAB)
def test_the_reference_generated_the_targets_own_text(name: str) -> None:
    record = recorded(name)
    assert record.generated is not None
    assert record.acceptance_lengths is not None
    assert record.generated[: len(record.tokens)] == record.tokens
    n = record.prefixes.start
    for produced in record.acceptance_lengths:
        draft = record.drafts(n)[0]
        assert draft[: produced - 1] == record.generated[n : n + produced - 1]
        if produced <= len(draft):
            assert draft[produced - 1] != record.generated[n + produced - 1]
        n += produced
    assert min(record.acceptance_lengths) == 1
    assert max(record.acceptance_lengths) >= 3


def test_fixtures_stay_small() -> None:
    assert sum(file.stat().st_size for file in FIXTURES.rglob("*")) < 4_000_000
