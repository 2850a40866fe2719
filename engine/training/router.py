"""Training of routers: networks that foresee acceptance lengths from what the target last knew.

The published head (WhiFlash, 2606.07710) predicts a difference between two arms; the head for N
arms has one output each. Both learn from round labels (`routing/labels.py`): every arm from the
same state at every round of the target's own output. What the figures say is not how small the
error is but what routing by it is worth, between the best single arm and the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingsError
from ..routing.labels import RoundLabels
from ..routing.oracle import Oracle, Route
from .fitting import Examples, Fit, FitSettings, explained, fit, predict


@dataclass(slots=True)
class RouterReport:
    """How good a trained router is, on rows that neither fitting nor stopping has seen.

    Attributes:
        r2: per output, the share of the labels' variance that is explained; None where they do not
            vary.
        best_single: the arm that is best for these rows, known in hindsight.
        routed, single, oracle, greedy: tokens per round of the router, of that arm, of the optimum
            per round, and of the arm that is longest in each round.
        by_arm: the router's rounds per arm.
    """

    fit: Fit
    r2: dict[str, float | None]
    best_single: str
    routed: float
    single: float
    oracle: float
    greedy: float
    by_arm: dict[str, int]

    @property
    def regret(self) -> float:
        """Tokens per round that the oracle per round has and the router has not."""
        return self.oracle - self.routed

    @property
    def captured(self) -> float | None:
        """Share of the oracle's gain over the best single arm; below 0, that arm alone is better.
        None where there is nothing to gain."""
        gain = self.oracle - self.single
        return (self.routed - self.single) / gain if gain > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "fit": self.fit.as_dict(),
            "r2": self.r2,
            "best_single": self.best_single,
            "tokens_per_round": {
                "routed": self.routed,
                "best_single": self.single,
                "oracle": self.oracle,
                "oracle_greedy": self.greedy,
            },
            "regret": self.regret,
            "captured": self.captured,
            "rounds_by_arm": self.by_arm,
        }


def train_difference(
    head: nn.Module,
    labels: Sequence[RoundLabels],
    arms: Sequence[str],
    settings: FitSettings | None = None,
    *,
    threshold: float = 0.0,
) -> RouterReport:
    """Fit the published head to the difference in acceptance length.

    Args:
        head: `RouterHead`: `[rounds, hidden]` to `[rounds]`. Its weights begin anew.
        labels: of the rows; those without rounds are left out.
        arms: the autoregressive and the block arm.
        threshold: with which the report routes: the autoregressive arm where more is predicted.

    Raises:
        SettingsError: not two arms, arms without labels, too few rows, a loss that is not finite.
    """
    if isinstance(arms, str) or len(arms) != 2:
        raise SettingsError(f"arms={arms!r}: expected an autoregressive and a block arm")
    autoregressive, block = arms

    def examples(row: RoundLabels) -> Examples:
        lengths = row.acceptance_of(arms).float()
        return Examples((row.hidden,), lengths[:, :1] - lengths[:, 1:])

    def choose(predicted: Tensor) -> list[str]:
        return [autoregressive if p > threshold else block for p in predicted[:, 0].tolist()]

    return _train(head, labels, arms, ["difference"], examples, choose, settings)


def train_acceptance(
    network: nn.Module,
    labels: Sequence[RoundLabels],
    arms: Sequence[str],
    settings: FitSettings | None = None,
    *,
    inputs: Callable[[RoundLabels], tuple[Tensor, ...]] = lambda row: (row.hidden,),
) -> RouterReport:
    """Fit a network with one output per arm to the acceptance lengths. The report routes to the arm
    of the longest one predicted.

    Args:
        network: gives `[rounds, arms]`. Its weights begin anew.
        labels: of the rows; those without rounds are left out.
        arms: of the outputs, in order.
        inputs: what the network takes of a row's rounds, each `[rounds, ...]`.

    Raises:
        SettingsError: no arms, arms without labels, too few rows, a loss that is not finite.
    """

    def examples(row: RoundLabels) -> Examples:
        return Examples(inputs(row), row.acceptance_of(arms).float())

    def choose(predicted: Tensor) -> list[str]:
        return [arms[best] for best in predicted.argmax(1).tolist()]

    return _train(network, labels, arms, arms, examples, choose, settings)


def _train(
    network: nn.Module,
    labels: Sequence[RoundLabels],
    arms: Sequence[str],
    outputs: Sequence[str],
    examples: Callable[[RoundLabels], Examples],
    choose: Callable[[Tensor], list[str]],
    settings: FitSettings | None,
) -> RouterReport:
    rows = [row for row in labels if row.num_rounds]
    Oracle(rows, arms)  # refuses arms that make no choice, or have no labels, before time is spent
    made = [examples(row) for row in rows]
    result = fit(network, made, settings or FitSettings())
    reported = [made[i] for i in result.reported]
    predicted = [predict(network, example.inputs).cpu() for example in reported]
    r2 = explained(torch.cat(predicted), torch.cat([example.targets for example in reported]))
    routes: list[Route] = [dict(enumerate(choose(part), start=1)) for part in predicted]
    oracle = Oracle([rows[i] for i in result.reported], arms)
    routed, single = oracle.follow(routes), oracle.follow(oracle.best_single())
    return RouterReport(
        fit=result,
        r2=dict(zip(outputs, r2, strict=True)),
        best_single=next(iter(single.by_arm)),
        routed=routed.mean_acceptance_length,
        single=single.mean_acceptance_length,
        oracle=oracle.follow(oracle.per_round()).mean_acceptance_length,
        greedy=oracle.follow(oracle.greedy()).mean_acceptance_length,
        by_arm=dict(sorted(routed.by_arm.items())),
    )
