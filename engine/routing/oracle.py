"""Oracles: what routing could gain at most, from round labels (`labels.py`).

The oracle per task has one arm for all rows of a category, the one per prompt one arm per row, the
one per round any arm at any round. The number of tokens is given by the text, so each of them
minimises what the text costs: rounds, or seconds where costs are known.

Two of them choose per round. `per_round` is the optimum: a shorter step may lead to a position from
which the next ones are longer, so it is found by dynamic programming over positions. `greedy` takes
the arm that is best at each round, as the WhiFlash paper's oracle does (2606.07710); it looks no
further, and may lose to `per_round`, and now and then to a single arm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..costs import CostModel
from ..errors import SettingsError
from ..telemetry import RoundRecord
from .labels import RoundLabels

Route = Mapping[int, str]  # the arm of the round at an output position; others may be left out


@dataclass(slots=True)
class Outcome:
    """What routes make of their texts.

    Attributes:
        tokens: of the output, those left out that come from the prompts.
        seconds: None where costs are not known.
        by_arm: rounds per arm.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float | None = None
    by_arm: Counter[str] = field(default_factory=Counter)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, bonus tokens included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "rounds_by_arm": dict(sorted(self.by_arm.items())),
        }


def round_seconds(labels: RoundLabels, arms: Sequence[str], costs: CostModel) -> Tensor:
    """`[rounds, arms]`, float64: what a round of each arm takes for a sequence that is alone.

    Drafting and verifying, not catching up: what that takes depends on the rounds before. All in
    all each network that is used consumes a text once, whatever the route.
    """
    tokens = labels.drafted_of(arms) + 1
    lengths = torch.arange(labels.num_rounds)[:, None] + labels.num_prompt + tokens
    drafts = [costs.draft(arm, 1) for arm in arms]
    rows = [
        [costs.verify(n, n * length) + draft for n, length, draft in zip(*row, drafts, strict=True)]
        for row in zip(tokens.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(labels.num_rounds, len(arms))


def route_taken(rounds: Iterable[RoundRecord]) -> Route:
    """The route of a sequence that ran."""
    return {record.position: record.drafter for record in rounds}


class Oracle:
    """The best routes of a set of rows, and what any route makes of them.

    Args:
        rows: labels of the texts.
        arms: what may be chosen; `none` may be among them. Of arms that are equally good, the one
            that stands first is taken.
        categories: of the rows; all are of one if None.
        costs: with them, routes are the fastest; without, those of the fewest rounds.
        seconds: instead of `costs`, `[rounds, arms]` per row: what each round would take.

    Raises:
        SettingsError: no arms, arms without labels, both of `costs` and `seconds`, categories or
            seconds that do not fit the rows, or a round that takes no time.
    """

    def __init__(
        self,
        rows: Sequence[RoundLabels],
        arms: Sequence[str],
        *,
        categories: Sequence[str] | None = None,
        costs: CostModel | None = None,
        seconds: Sequence[Tensor] | None = None,
    ) -> None:
        if not arms or len(set(arms)) != len(arms):
            raise SettingsError(f"arms={list(arms)!r}: expected one or more, each of them once")
        if costs is not None and seconds is not None:
            raise SettingsError("an oracle takes costs or seconds, not both")
        if costs is not None:
            seconds = [round_seconds(row, arms, costs) for row in rows]
        self.rows = list(rows)
        self.arms = tuple(arms)
        self.categories = [""] * len(self.rows) if categories is None else list(categories)
        # Plain lists: all of what follows looks at one number at a time.
        self._emitted = [row.acceptance_of(arms).tolist() for row in self.rows]
        self._seconds = None if seconds is None else [part.tolist() for part in seconds]
        sizes = [(row.num_rounds, len(arms)) for row in self.rows]
        if len(self.categories) != len(sizes) or (
            seconds is not None and [tuple(part.shape) for part in seconds] != sizes
        ):
            raise SettingsError(
                f"{len(self.categories)} categories or the seconds given do not fit {len(sizes)} "
                f"rows of these (rounds, arms): {sizes}"
            )
        if seconds is not None and any(bool((part <= 0).any()) for part in seconds):
            raise SettingsError(
                "an oracle of seconds needs rounds that take time, found some of 0 or less; the "
                "cost table is empty: measure costs first"
            )

    # Routes ----------------------------------------------------------------------------------

    def single(self, arm: str) -> list[Route]:
        """The arm in every round of every row."""
        return [self._constant(row, arm) for row in range(len(self.rows))]

    def best_single(self) -> list[Route]:
        """The arm that is best for all rows together."""
        return self.single(self._best(range(len(self.rows))))

    def per_task(self) -> list[Route]:
        """In every row the arm that is best for all rows of its category together."""
        best = {
            category: self._best([r for r, c in enumerate(self.categories) if c == category])
            for category in set(self.categories)
        }
        return [self._constant(row, best[c]) for row, c in enumerate(self.categories)]

    def per_prompt(self) -> list[Route]:
        """In every row the arm that is best for it."""
        return [self._constant(row, self._best([row])) for row in range(len(self.rows))]

    def per_round(self) -> list[Route]:
        """In every round the arm that the best route takes from there: nothing is better."""
        return [self._optimum(row) for row in range(len(self.rows))]

    def greedy(self) -> list[Route]:
        """In every round the arm that emits most in it (with costs: most per second)."""
        routes: list[Route] = []
        for row, table in enumerate(self._emitted):
            rates = [
                [n / self._cost(row, i, a) for a, n in enumerate(emitted)]
                for i, emitted in enumerate(table)
            ]
            routes.append({i + 1: self.arms[r.index(max(r))] for i, r in enumerate(rates)})
        return routes

    def _constant(self, row: int, arm: str) -> Route:
        self._column(arm)
        return dict.fromkeys(range(1, len(self._emitted[row]) + 1), arm)

    def _best(self, rows: Iterable[int]) -> str:
        """The arm whose single use costs least over `rows`."""
        rows = list(rows)
        costs = [sum(self._total(row, column) for row in rows) for column in range(len(self.arms))]
        return self.arms[costs.index(min(costs))]

    def _total(self, row: int, column: int) -> float:
        table, at, total = self._emitted[row], 0, 0.0
        while at < len(table):
            total += self._cost(row, at, column)
            at += table[at][column]
        return total

    def _optimum(self, row: int) -> Route:
        table = self._emitted[row]
        rest = [0.0] * (len(table) + 1)  # least cost from each position to the end
        route: dict[int, str] = {}
        for at in reversed(range(len(table))):
            ways = [
                self._cost(row, at, a) + rest[at + emitted] for a, emitted in enumerate(table[at])
            ]
            rest[at] = min(ways)
            route[at + 1] = self.arms[ways.index(rest[at])]
        return route

    def _cost(self, row: int, at: int, column: int) -> float:
        return 1.0 if self._seconds is None else float(self._seconds[row][at][column])

    def _column(self, arm: str) -> int:
        if arm not in self.arms:
            raise SettingsError(f"arm {arm!r} is not among {', '.join(self.arms)}")
        return self.arms.index(arm)

    # What they come to -----------------------------------------------------------------------

    def follow(self, routes: Sequence[Route]) -> Outcome:
        """What the texts take with these routes, one per row.

        Raises:
            SettingsError: not as many routes as rows, an arm that is not among the oracle's, or a
                route that has none for a position that it comes to.
        """
        if len(routes) != len(self.rows):
            raise SettingsError(
                f"{len(routes)} routes for {len(self.rows)} rows; give one for each"
            )
        outcome = Outcome(seconds=None if self._seconds is None else 0.0)
        for row, (route, table) in enumerate(zip(routes, self._emitted, strict=True)):
            at = 0
            while at < len(table):
                if at + 1 not in route:
                    raise SettingsError(
                        f"row {self.rows[row].id!r}: the route comes to output position {at + 1} "
                        "and has no arm there; a run's route fits labels of the same text, target "
                        "and drafters only"
                    )
                arm = route[at + 1]
                column = self._column(arm)
                outcome.rounds += 1
                outcome.by_arm[arm] += 1
                outcome.tokens += table[at][column]
                if outcome.seconds is not None:
                    outcome.seconds += self._cost(row, at, column)
                at += table[at][column]
        return outcome

    def as_dict(self) -> dict[str, Any]:
        """All of them, for `bench.json`: `single` by arm, `best_single`, `task`, `prompt`, `round`
        (the optimum), `round_greedy`, and what they minimise."""
        return {
            "minimises": "rounds" if self._seconds is None else "seconds",
            "single": {arm: self.follow(self.single(arm)).as_dict() for arm in self.arms},
            "best_single": self.follow(self.best_single()).as_dict(),
            "task": self.follow(self.per_task()).as_dict(),
            "prompt": self.follow(self.per_prompt()).as_dict(),
            "round": self.follow(self.per_round()).as_dict(),
            "round_greedy": self.follow(self.greedy()).as_dict(),
        }
