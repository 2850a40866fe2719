"""What a benchmark counts: of each contender, of each row, and of the rows that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whiflash_agents.batch.figures import Speculation
from whiflash_agents.batch.plan import Row


@dataclass(slots=True)
class Decoding:
    """Tokens that rounds brought, and the seconds that these took: prefill is in neither."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float:
        """Tokens per second; 0 without rounds."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Contender:
    """What one arm or router did with the rows that all of them generated."""

    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)  # tokens per second, row by row
    decoding: Decoding = field(default_factory=Decoding)
    decode_rates: list[float] = field(default_factory=list)  # row by row; 0 without rounds
    decoding_by_category: dict[str, Decoding] = field(default_factory=dict)
    round_seconds: list[float] = field(default_factory=list)
    switch_seconds: float = 0.0
    switches: int = 0
    pooled: Speculation = field(default_factory=Speculation)
    by_span: dict[str, Speculation] = field(default_factory=dict)
    by_category: dict[str, Speculation] = field(default_factory=dict)
    by_drafter: dict[str, Speculation] = field(default_factory=dict)

    def add(self, output: dict[str, Any], category: str) -> None:
        """Count an output row that carries its rounds."""
        extra = output["whiflash"]
        figures = extra["speculative_decoding"]
        tokens = output["response"]["body"]["usage"]["completion_tokens"]
        self.tokens += tokens
        self.seconds += extra["seconds"]
        self.rates.append(tokens / extra["seconds"])
        mine = Decoding()
        for record in extra["rounds"]:
            mine.add(record["emitted"], record["round_seconds"])
        self.decode_rates.append(mine.rate)
        for group in (self.decoding, self.decoding_by_category.setdefault(category, Decoding())):
            group.add(mine.tokens, mine.seconds)
        self.round_seconds += [r["round_seconds"] for r in extra["rounds"]]
        self.switch_seconds += sum(r["catch_up_seconds"] for r in extra["rounds"] if r["switched"])
        self.switches += figures["num_switches"]
        self.pooled.add(figures)
        self.by_category.setdefault(category, Speculation()).add(figures)
        for ours, theirs in (
            (self.by_span, figures["by_span"]),
            (self.by_drafter, figures["by_drafter"]),
        ):
            for name, counts in theirs.items():
                ours.setdefault(name, Speculation()).add(counts)

    def as_dict(self, engine: dict[str, Any]) -> dict[str, Any]:
        """Its part of `bench.json`; `engine` are its engine's totals."""
        rounds = sorted(self.round_seconds)
        total = sum(rounds)
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "decode_tokens_per_second": self.decoding.rate,
            "rounds": self.pooled.steps,
            "mean_acceptance_length": self.pooled.mean_acceptance_length,
            "round_ms": {
                "p50": 1e3 * rounds[len(rounds) // 2] if rounds else 0.0,
                "p95": 1e3 * rounds[int(len(rounds) * 0.95)] if rounds else 0.0,
            },
            "num_switches": self.switches,
            "switch_overhead": self.switch_seconds / total if total else 0.0,
            "router_overhead": engine["route_seconds"] / engine["step_seconds"]
            if engine["step_seconds"]
            else 0.0,
            "by_span": {name: group.as_dict() for name, group in self.by_span.items()},
            "by_category": {
                name: group.as_dict()
                | {"decode_tokens_per_second": self.decoding_by_category[name].rate}
                for name, group in self.by_category.items()
            },
            "by_drafter": {name: group.as_dict() for name, group in self.by_drafter.items()},
            "engine": engine,
        }


@dataclass(slots=True)
class BenchRow:
    """One row that all contenders generated."""

    row: Row
    category: str
    outputs: dict[str, dict[str, Any]]

    @property
    def identical(self) -> bool:
        """Whether all contenders generated the same tokens."""
        ids = [output["whiflash"]["token_ids"] for output in self.outputs.values()]
        return all(other == ids[0] for other in ids)


@dataclass(slots=True)
class Failures:
    """Rows that some contender could not generate, by the type of their first error."""

    rows: int = 0
    by_type: Counter[str] = field(default_factory=Counter)
    first: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, outputs: Mapping[str, dict[str, Any]]) -> bool:
        """Count a row by its outputs; whether it failed."""
        failed = [(by, output) for by, output in outputs.items() if output["response"] is None]
        if not failed:
            return False
        by, output = failed[0]
        error = output["error"]
        self.rows += 1
        self.by_type[error["type"]] += 1
        first = {"row": output["custom_id"], "by": by, "message": error["message"]}
        self.first.setdefault(error["type"], first)
        return True

    def as_dict(self) -> dict[str, Any]:
        return {
            kind: {"rows": count, "first": self.first[kind]}
            for kind, count in self.by_type.most_common()
        }

    def __str__(self) -> str:
        """`ContextLengthError (2 rows; the first, a#0: the prompt ...)`, one for each type."""
        return "; ".join(
            f"{kind} ({count} row{'s' * (count > 1)}; the first, {self.first[kind]['row']}: "
            f"{self.first[kind]['message']})"
            for kind, count in self.by_type.most_common()
        )
