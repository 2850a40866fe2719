"""Small engines over the tiny targets, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import tiny
import torch

from whiflash_agents.engine import kv_cache
from whiflash_agents.engine.attention import PackedRow
from whiflash_agents.engine.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.request import GenerationResult, Request, SamplingParams
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.target import TargetBatch


def build(router: Any = "none", drafters: Any = None, **options: Any) -> WhiFlashEngine:
    costs = options.pop("costs", None)
    options = {"kv_tokens": 2048, "prefill_chunk": 16} | options
    return WhiFlashEngine(
        tiny.target(),
        router=router,
        drafters=drafters,
        settings=EngineSettings(**options),
        costs=costs,
        decode=tiny.text_of,
    )


def text(salt: int, length: int) -> list[int]:
    """Random tokens, always the same for the same salt."""
    return random.Random(salt).choices(range(3, tiny.VOCAB), k=length)


def ask(key: str, prompt: Sequence[int] = (5, 6, 7), max_tokens: int = 8, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})
    return Request(key, list(prompt), sampling)


def plain(request: Request) -> list[int]:
    """The output of the request alone: nothing reused, nothing drafted."""
    engine = build(max_running=1, prefix_reuse=False, prefill_chunk=512)
    return engine.generate([request])[0].token_ids


def run(engine: WhiFlashEngine, at_most: int = 3000) -> dict[str, GenerationResult]:
    """Step until nothing is left to do."""
    results = {}
    for _ in range(at_most):
        if not engine.has_work:
            return results
        for event in engine.step():
            if event.result is not None:
                results[event.id] = event.result
    raise AssertionError(f"not done after {at_most} steps")


def assert_idle(engine: WhiFlashEngine) -> None:
    assert not engine.has_work
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine._subscribers == {}
    assert engine.step() == []


def assert_arena_is_sound(engine: WhiFlashEngine) -> None:
    """Nobody shares positions, and what is said to be cached is what the tokens really give."""
    plan = engine._scheduler
    holders = [(s.extent, s.tokens[: s.num_cached]) for s in plan.running]
    holders += [(r.extent, r.tokens[: r.num_cached]) for r in plan._retained]
    assert sorted(id(e) for e, _ in holders) == sorted(id(e) for e in engine._cache._extents)
    spans = sorted((e.start, e.end) for e, _ in holders if e is not None)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for extent, tokens in holders:
        assert extent is not None
        assert len(tokens) <= extent.capacity
        if not tokens:
            continue
        fresh = engine.target.new_cache(len(tokens) + kv_cache.GRANULE)
        batch = TargetBatch()
        batch.add(PackedRow(0, 0, len(tokens)), tokens, range(len(tokens)), logits_from=None)
        engine.target.forward(batch, fresh)
        arenas = zip(
            (*engine._cache.keys, *engine._cache.values), (*fresh.keys, *fresh.values), strict=True
        )
        for got, wanted in arenas:
            torch.testing.assert_close(
                got.narrow(1, extent.start, len(tokens)),
                wanted.narrow(1, 0, len(tokens)),
                atol=1e-3,
                rtol=1e-3,
            )


class AlternatingRouter(Router):
    """Changes the arm every round."""

    name = "alternating"

    def __init__(self, *arms: str) -> None:
        self.arms = tuple(arm for arm in arms if arm != "none")
        self._cycle = arms

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [self._cycle[len(s.stats.rounds) % len(self._cycle)] for s in sequences]
