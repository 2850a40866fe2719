"""Round records and their aggregation, with the field's names (vLLM, AIPerf).

`mean_acceptance_length` counts the bonus token: 1 + accepted / rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RoundRecord:
    """One round of one sequence. `position` is the index, in the output, of its first new token;
    `accepted` counts draft tokens only. Times are seconds; those of a batch are shared equally."""

    position: int
    drafter: str
    drafted: int
    accepted: int
    emitted: int  # tokens that reached the output: accepted + bonus, less what a stop cut off
    backlog: int = 0
    catch_up_seconds: float = 0.0
    draft_seconds: float = 0.0
    round_seconds: float = 0.0
    switched: bool = False
    predicted: float | None = None  # acceptance length that the router expected


@dataclass(slots=True)
class SpeculationStats:
    """All rounds of one or many sequences.

    Attributes:
        rounds: the records, in order. Prefill's own token is not a round.
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_spec_steps(self) -> int:
        return len(self.rounds)

    @property
    def num_draft_tokens(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def num_switches(self) -> int:
        return sum(r.switched for r in self.rounds)

    def as_dict(self) -> dict[str, object]:
        """The `speculative_decoding` object of an output row, without `by_span`."""
        return summarise(self.rounds) | {"by_drafter": self.by_drafter()}

    def by_drafter(self) -> dict[str, dict[str, object]]:
        groups: dict[str, list[RoundRecord]] = {}
        for record in self.rounds:
            groups.setdefault(record.drafter, []).append(record)
        keep = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        out: dict[str, dict[str, object]] = {}
        for name, records in sorted(groups.items()):
            figures = summarise(records)
            out[name] = {"mean_acceptance_length": figures["mean_acceptance_length"]}
            out[name] |= {key: figures[key] for key in keep}
        return out


def summarise(rounds: Iterable[RoundRecord]) -> dict[str, object]:
    """Figures over `rounds`; `acceptance_histogram[k]` counts the rounds that accepted k drafts."""
    records = list(rounds)
    steps = len(records)
    accepted = sum(r.accepted for r in records)
    drafted = sum(r.drafted for r in records)
    histogram = [0] * (max((r.accepted for r in records), default=-1) + 1)
    for r in records:
        histogram[r.accepted] += 1
    total = sum(r.round_seconds for r in records)
    switching = sum(r.catch_up_seconds for r in records if r.switched)
    return {
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_switches": sum(r.switched for r in records),
        "switch_overhead": switching / total if total else 0.0,
    }


@dataclass(slots=True)
class Totals:
    """What an engine has done so far, and the memory it did it in. Times in seconds.

    Attributes:
        positions_recomputed: reused positions that the target computed once more because a
            drafter's row there depended on a token that differs.
        draft_seconds: drafting, with the catching up of drafters that were chosen.
        catch_up_seconds: all catching up, chosen or not.
        draft_rows: context rows made, per drafting network.
        nodes_drafted, nodes_verified: before and after a verify budget cut them (0 without one).
        route_seconds: choosing drafters, with the signals that the router asked for.
        costs: per kind of cost, its correction, prediction error and number of measurements.
        router: what the router says of itself (`Router.figures`).
        kv_bytes: of the arena, per model.
        feature_bytes, feature_bytes_peak: held by the feature buffers now, and at most.
    """

    steps: int = 0
    rounds: int = 0
    output_tokens: int = 0
    positions_prefilled: int = 0
    positions_recomputed: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    draft_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    route_seconds: float = 0.0
    nodes_drafted: int = 0
    nodes_verified: int = 0
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    draft_rows: dict[str, int] = field(default_factory=dict)
    kv_bytes: dict[str, int] = field(default_factory=dict)
    feature_bytes: int = 0
    feature_bytes_peak: int = 0
