"""`RunFigures`: the figures of a run, added up row by row; the summary and `--metrics` show them.

Ratios are recomputed from pooled counts, never averaged over rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .plan import InputCount

AGREEMENTS = ("tool_name", "arguments", "text")


@dataclass(slots=True)
class Speculation:
    """Pooled rounds of one group of rows (all, one drafter, one span kind)."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int | None = None

    def add(self, row_figures: dict[str, Any]) -> None:
        self.steps += row_figures["num_spec_steps"]
        self.drafted += row_figures["num_draft_tokens"]
        self.accepted += row_figures["num_accepted_draft_tokens"]
        if "tokens" in row_figures:
            self.tokens = (self.tokens or 0) + row_figures["tokens"]

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.accepted / self.steps if self.steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, Any]:
        tokens = {} if self.tokens is None else {"tokens": self.tokens}
        return {
            **tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
        }


@dataclass(slots=True)
class RunFigures:
    """What a run did. Times are wall-clock seconds; `running_seconds` excludes loading."""

    settings: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    input: InputCount = field(default_factory=InputCount)
    ok: int = 0
    failed: int = 0
    interrupted: bool = False
    errors: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    tool_calls: int = 0
    invalid_tool_calls: int = 0
    rows_with_notes: int = 0
    loading_seconds: float = 0.0
    running_seconds: float = 0.0
    speculation: Speculation = field(default_factory=Speculation)
    histogram: list[int] = field(default_factory=list)
    switches: int = 0
    by_drafter: dict[str, Speculation] = field(default_factory=dict)
    by_span: dict[str, Speculation] = field(default_factory=dict)
    equal: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    engines: list[dict[str, Any]] = field(default_factory=list)
    _switch_seconds: float = 0.0
    _round_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of finished rows over the time since decoding began."""
        return self.generated_tokens / self.running_seconds if self.running_seconds else 0.0

    @property
    def switch_overhead(self) -> float:
        """Catching up in rounds that switched drafters, over all round time."""
        return self._switch_seconds / self._round_seconds if self._round_seconds else 0.0

    def engine_total(self, name: str) -> int:
        """A counter of the engines, summed; it also counts rows that are not finished."""
        return sum(engine["engine"][name] for engine in self.engines if "engine" in engine)

    def add(self, output: dict[str, Any]) -> None:
        """Count one output row."""
        if output["response"] is None:
            self.failed += 1
            self.errors[output["error"]["type"]] += 1
            return
        self.ok += 1
        body, extra = output["response"]["body"], output["whiflash"]
        usage, choice = body["usage"], body["choices"][0]
        self.finish_reasons[choice["finish_reason"]] += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.generated_tokens += usage["completion_tokens"]
        self.reasoning_tokens += usage["completion_tokens_details"]["reasoning_tokens"]
        self.tool_calls += len(choice["message"].get("tool_calls", ()))
        self.invalid_tool_calls += len(extra["invalid_tool_calls"])
        self.rows_with_notes += bool(extra["notes"])
        self._add_speculation(extra)
        for name, equal in (extra["agreement"] or {}).items():
            if equal is not None:
                self.compared[name] += 1
                self.equal[name] += equal

    def _add_speculation(self, extra: dict[str, Any]) -> None:
        figures = extra["speculative_decoding"]
        self.speculation.add(figures)
        self.switches += figures["num_switches"]
        self._round_seconds += extra["round_seconds"]
        self._switch_seconds += figures["switch_overhead"] * extra["round_seconds"]
        histogram = figures["acceptance_histogram"]
        self.histogram += [0] * (len(histogram) - len(self.histogram))
        for accepted, rounds in enumerate(histogram):
            self.histogram[accepted] += rounds
        for mine, theirs in (
            (self.by_drafter, figures["by_drafter"]),
            (self.by_span, figures["by_span"]),
        ):
            for name, group in theirs.items():
                mine.setdefault(name, Speculation()).add(group)

    def as_dict(self) -> dict[str, Any]:
        """The content of the `--metrics` file."""
        from whiflash_agents import __version__

        return {
            "version": __version__,
            "settings": self.settings,
            "target": self.target,
            "traces": self.input.traces,
            "traces_without_turns": self.input.traces_without_turns,
            "rows": {
                "planned": self.input.rows,
                "ok": self.ok,
                "failed": self.failed,
                "with_notes": self.rows_with_notes,
                "errors": dict(self.errors),
                "finish_reasons": dict(self.finish_reasons),
            },
            "interrupted": self.interrupted,
            "seconds": {"loading": self.loading_seconds, "running": self.running_seconds},
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "generated": self.generated_tokens,
                "reasoning": self.reasoning_tokens,
            },
            "tokens_per_second": self.tokens_per_second,
            "tool_calls": {"valid": self.tool_calls, "invalid": self.invalid_tool_calls},
            "speculative_decoding": {
                **self.speculation.as_dict(),
                "acceptance_histogram": self.histogram,
                "num_switches": self.switches,
                "switch_overhead": self.switch_overhead,
                "by_drafter": {name: group.as_dict() for name, group in self.by_drafter.items()},
                "by_span": {name: group.as_dict() for name, group in self.by_span.items()},
            },
            "agreement": {
                name: {"equal": self.equal[name], "compared": self.compared[name]}
                for name in AGREEMENTS
            },
            "engines": self.engines,
        }
