"""Engines over the tiny targets, in float64, that record every draft their drafters propose.

In float64 the order of sums does not matter: what two runs draft from the same text is equal, node
for node, or one of them is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tiny
import tiny_drafters

from whiflash_agents.engine import (
    EngineSettings,
    GenerationResult,
    Request,
    Target,
    WhiFlashEngine,
)
from whiflash_agents.engine.catch_up import CatchUp
from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import Drafter, DraftLimit
from whiflash_agents.engine.drafters.ddtree import DDTreeDrafter
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.sequence import SequenceState

Path = tuple[int, ...]


@cache
def net(architecture: str = "llama") -> Any:
    """The target as transformers runs it."""
    return tiny.model(architecture).double()


@cache
def target(architecture: str = "llama") -> Target:
    return Target(tiny.model(architecture).double(), name=f"tiny-{architecture}")


@cache
def eagle3_model() -> Any:
    return tiny_drafters.eagle3().double()


@cache
def dflash_model() -> Any:
    return tiny_drafters.dflash().double()


def paths(tree: DraftTree) -> list[Path]:
    """The path to every drafted node, in the order of the nodes."""
    found: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@dataclass(frozen=True)
class Draft:
    """What one sequence was offered in one round."""

    drafter: str
    id: str
    tokens: Path
    limit: DraftLimit
    paths: tuple[Path, ...]


class Watched:
    """A drafter whose drafts are recorded, those of each call in `calls`."""

    def __init__(self, drafter: Any, record: list[Draft]) -> None:
        self.inner, self.name, self.record = drafter, drafter.name, record
        self.calls: list[int] = []
        if hasattr(drafter, "context"):
            self.context = drafter.context

    def open(self, sequence: SequenceState) -> None:
        self.inner.open(sequence)

    def close(self, sequence: SequenceState) -> None:
        self.inner.close(sequence)

    def backlog(self, sequence: SequenceState) -> int:
        return self.inner.backlog(sequence)

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        self.inner.catch_up(sequences)

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        trees = self.inner.draft(sequences, limits)
        self.calls.append(len(sequences))
        for sequence, limit, tree in zip(sequences, limits, trees, strict=True):
            assert tree.tokens[0] == sequence.tokens[-1]
            self.record.append(
                Draft(self.name, sequence.id, tuple(sequence.tokens), limit, tuple(paths(tree)))
            )
        return trees


class ScheduleRouter(Router):
    """The arm of every sequence and round, drawn from a seed: the same whatever the batch is."""

    name = "schedule"

    def __init__(self, arms: Sequence[str], seed: int = 0, stay: int = 1) -> None:
        self.arms = tuple(arm for arm in arms if arm != "none")
        self._choices, self._seed, self._stay = tuple(arms), seed, stay

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [self._arm(s.id, len(s.stats.rounds) // self._stay) for s in sequences]

    def _arm(self, key: str, turn: int) -> str:
        return random.Random(f"{self._seed} {key} {turn}").choice(self._choices)


def neural_drafters(
    *,
    eagle: Any = None,
    block: Any = None,
    depth: int = 3,
    top_k: int = 3,
    total_tokens: int = 8,
    nodes: int = 8,
) -> dict[str, Drafter]:
    """`eagle3`, `dflash` and `ddtree`, the latter two over one context."""
    dflash = DFlashDrafter(block or dflash_model())
    eagle3 = Eagle3Drafter(
        eagle or eagle3_model(), depth=depth, top_k=top_k, total_tokens=total_tokens
    )
    return {
        "eagle3": eagle3,
        "dflash": dflash,
        "ddtree": DDTreeDrafter(dflash.context, nodes=nodes),
    }


class Run:
    """An engine whose drafts are recorded.

    Attributes:
        drafts: all of them, in order.
        results: by id.
    """

    def __init__(
        self,
        router: Any = "eagle3",
        drafters: Mapping[str, Drafter] | None = None,
        architecture: str = "llama",
        **options: Any,
    ) -> None:
        self.drafts: list[Draft] = []
        self.results: dict[str, GenerationResult] = {}
        given = neural_drafters() if drafters is None else drafters
        self.watched = {name: Watched(d, self.drafts) for name, d in given.items()}
        self.engine = WhiFlashEngine(
            target(architecture),
            router=router,
            drafters=self.watched,
            settings=EngineSettings(**({"kv_tokens": 2048, "prefill_chunk": 16} | options)),
        )

    @property
    def catch_up(self) -> CatchUp:
        return self.engine._catch_up

    @property
    def running(self) -> list[SequenceState]:
        return self.engine._scheduler.running

    def step(self) -> None:
        for event in self.engine.step():
            if event.result is not None:
                self.results[event.id] = event.result

    def finish(self, *requests: Request, after_step: Any = None) -> list[GenerationResult]:
        """Add `requests` and step until nothing is left; their results."""
        for request in requests:
            self.engine.add(request)
        for _ in range(5000):
            if not self.engine.has_work:
                return [self.results[r.id] for r in requests]
            self.step()
            if after_step is not None:
                after_step()
        raise AssertionError("the engine does not come to an end")

    def by_text(self) -> dict[tuple[str, str, Path], tuple[DraftLimit, tuple[Path, ...]]]:
        """Drafts by drafter, sequence and text."""
        return {(d.drafter, d.id, d.tokens): (d.limit, d.paths) for d in self.drafts}
