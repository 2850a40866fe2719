"""Training of routers: networks that foresee acceptance lengths from what the target last knew.

The published head (WhiFlash, 2606.07710) predicts a difference between two arms; the head for N
arms has one output each. Both learn from round labels (`routing/labels.py`): every arm from the
same state at every round of the target's own output. What the figures say is not how small the
error is but what routing by it is worth, between the best single arm and the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import SettingsError
from ..routing.labels import RoundLabels
from ..routing.neural import RouterHead
from ..routing.neural_acceptance import AcceptanceHead, NeuralAcceptance
from ..routing.oracle import Oracle, Route
from .fitting import Examples, Fit, FitSettings, explained, fit, predict
from .walks import routed_by, walked_examples


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
    head: RouterHead,
    labels: Sequence[RoundLabels],
    arms: Sequence[str],
    settings: FitSettings | None = None,
    *,
    threshold: float = 0.0,
) -> RouterReport:
    """Fit the published head to the difference in acceptance length. Its weights begin anew.

    Args:
        labels: of the rows; those without rounds are left out.
        arms: the autoregressive and the block arm.
        threshold: with which the report routes: the autoregressive arm where more is predicted.

    Raises:
        SettingsError: not two arms, arms without labels, too few rows, a loss that is not finite.
    """
    if isinstance(arms, str) or len(arms) != 2:
        raise SettingsError(f"arms={arms!r}: expected an autoregressive and a block arm")
    autoregressive, block = arms
    rows = _rows(labels, arms)
    examples = []
    for row in rows:
        lengths = row.acceptance_of(arms).float()
        examples.append(Examples((row.hidden,), lengths[:, :1] - lengths[:, 1:]))
    result = fit(head, examples, settings or FitSettings())
    routes: list[Route] = []
    for row in (rows[i] for i in result.reported):
        differences = predict(head, (row.hidden,))[:, 0].tolist()
        routes.append(
            {i + 1: autoregressive if d > threshold else block for i, d in enumerate(differences)}
        )
    return _report(head, result, examples, rows, arms, ["difference"], routes)


def train_acceptance(
    head: AcceptanceHead,
    labels: Sequence[RoundLabels],
    settings: FitSettings | None = None,
    *,
    walks: int = 8,
) -> RouterReport:
    """Fit the head for N arms to the acceptance length of each. Its weights begin anew.

    What was seen lately is among its inputs, so it learns at the rounds of random walks along the
    texts (`walks.py`). The report routes to the arm of the longest length that `NeuralAcceptance`
    predicts, round by round, each of them seen before the next.

    Args:
        labels: of the rows, with labels for the head's arms; those without rounds are left out.
        walks: along each text.

    Raises:
        SettingsError: no walk, arms without labels, too few rows, a loss that is not finite.
    """
    if walks < 1:
        raise SettingsError(f"walks={walks}: expected at least 1")
    settings = settings or FitSettings()
    rows = _rows(labels, head.arms)
    examples = walked_examples(rows, head.arms, walks=walks, seed=settings.seed)
    result = fit(head, examples, settings)
    device = head.outputs.weight.device
    held = [replace(rows[i], hidden=rows[i].hidden.to(device)) for i in result.reported]
    routes = routed_by(NeuralAcceptance(head), held, head.arms)
    return _report(head, result, examples, rows, head.arms, head.arms, routes)


def _rows(labels: Sequence[RoundLabels], arms: Sequence[str]) -> list[RoundLabels]:
    """The rows with rounds. Raises what an oracle says of the arms, before time is spent."""
    rows = [row for row in labels if row.num_rounds]
    Oracle(rows, arms)
    return rows


def _report(
    network: nn.Module,
    result: Fit,
    examples: Sequence[Examples],
    rows: Sequence[RoundLabels],
    arms: Sequence[str],
    outputs: Sequence[str],
    routes: Sequence[Route],
) -> RouterReport:
    held = [examples[i] for i in result.reported]
    predicted = torch.cat([predict(network, example.inputs).cpu() for example in held])
    r2 = explained(predicted, torch.cat([example.targets for example in held]))
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
