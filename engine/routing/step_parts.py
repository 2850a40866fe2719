"""What the parts of a step that was run are predicted to take: what is left of the measured time is
overhead, or an error of the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..telemetry import RoundRecord
from .base import NONE, Surroundings


def predicted_seconds(
    surroundings: Surroundings, rounds: Sequence[tuple[RoundRecord, int]]
) -> float:
    """Verifying, drafting and catching up of one step.

    Args:
        rounds: of all sequences, each with the length of its context.
    """
    costs = surroundings.costs
    tokens = attended = 0.0
    calls: dict[str, tuple[int, int]] = {}
    for record, length in rounds:
        tokens += record.drafted + 1
        attended += (record.drafted + 1) * length
        if record.drafter != NONE:
            count, rows = calls.get(record.drafter, (0, 0))
            calls[record.drafter] = count + 1, rows + record.backlog
    seconds = costs.verify(tokens, attended)
    for arm, (count, rows) in calls.items():
        seconds += costs.draft(arm, count)
        network = surroundings.network(arm)
        if network is not None and rows:
            seconds += costs.catch_up(network, rows)
    return seconds
