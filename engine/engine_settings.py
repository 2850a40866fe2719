"""The limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError

CATCH_UP = ("lazy", "eager")
DRAFT_PREFILL = ("kv-only", "full")
VERIFY_BUDGET = ("all", "gain")
# Positions that every engine keeps free behind a sequence for a round's drafts: enough for the 7
# levels of 10 rows that EAGLE-3 writes while it drafts its default tree.
LEAST_ROOM = 80
_COUNTS = ("max_running", "prefill_chunk", "max_draft_nodes", "max_backlog")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one engine.

    Attributes:
        max_running: sequences decoded at once.
        kv_tokens: KV positions of the arena (running and retained sequences share them); None
            takes what `max_running` full contexts need, within a quarter of the free memory on a
            CPU and four fifths of it on a GPU.
        prefill_chunk: prompt tokens computed per step beside the others' rounds.
        max_draft_nodes: most drafted tokens verified per sequence and round.
        prefix_reuse: reuse keys and values of prompts that begin alike.
        catch_up: `lazy` lets a neural drafter lag behind until it is chosen; `eager` updates all of
            them every round.
        draft_prefill: `kv-only` computes keys and values of a drafter's backlog and no more; `full`
            runs its whole layer over it (EAGLE-3; DFlash's context has nothing more to run).
        verify_budget: `all` verifies whole drafts; `gain` as much of all drafts of a step as raises
            its expected tokens per second.
        max_backlog: under `lazy`, positions that a drafter may lag behind in one sequence before it
            catches up unasked, which bounds the memory for target features.
    """

    max_running: int = 8
    kv_tokens: int | None = None
    prefill_chunk: int = 256
    max_draft_nodes: int = 64
    prefix_reuse: bool = True
    catch_up: str = "lazy"
    draft_prefill: str = "kv-only"
    max_backlog: int = 512
    verify_budget: str = "all"

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "kv_tokens"):
            value = getattr(self, name)
            unset = (name, value) == ("kv_tokens", None)
            if not unset and (not isinstance(value, int) or isinstance(value, bool)):
                raise SettingsError(f"{name}={value!r}: expected an integer")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.kv_tokens is not None and self.kv_tokens < 64:
            raise SettingsError(f"kv_tokens={self.kv_tokens}: expected at least 64")
        for name, choices in (
            ("catch_up", CATCH_UP),
            ("draft_prefill", DRAFT_PREFILL),
            ("verify_budget", VERIFY_BUDGET),
        ):
            if getattr(self, name) not in choices:
                raise SettingsError(
                    f"{name}={getattr(self, name)!r}: expected {' or '.join(choices)}"
                )
