"""Thresholds of the published routers, found by grid search on labelled rounds, and kept.

The target writes the turns of some traces itself; every drafter is labelled at every round of them
(`bench.py`); then each threshold of a grid is followed through all of these texts, and the one that
takes the least time by the costs measured here wins: over all rows, and per category for the
reader. What is found is kept in the DFlash drafter's folder, and routers use it from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from whiflash_agents.engine.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    from whiflash_agents.engine.costs import CostModel
    from whiflash_agents.engine.routing.labels import RoundLabels

FILE = "whiflash-calibration.json"
_POINTS = 41  # thresholds tried: quantiles of the values met


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold and what it makes of the texts it was found on.

    Attributes:
        value: above it, the autoregressive drafter drafts.
        tokens_per_second: by the measured costs.
        mean_acceptance_length: tokens per round.
        tried: of the grid, `[threshold, tokens per second]`.
    """

    value: float
    tokens_per_second: float
    mean_acceptance_length: float
    tried: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found for one target and pair of drafters.

    Attributes:
        target, eagle3: their names; it holds for these only (and the drafter it lies beside).
        rows: texts it was found on.
        entropy: thresholds of router `entropy` in nats, by category; `all` is what runs use.
        neural: the same of router `neural`, in tokens; empty without its weights.
    """

    target: str
    eagle3: str
    rows: int
    entropy: dict[str, Threshold]
    neural: dict[str, Threshold] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write it to `folder`, whole or not at all; returns the file.

        Raises:
            OutputError: it cannot be written.
        """
        path = folder / FILE
        temporary = path.with_name(f".{FILE}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OutputError(
                f"{path} cannot be written: {error.strerror}; give a folder of yours with -o and "
                "the threshold with --entropy-threshold"
            ) from error
        return path

    @classmethod
    def load(cls, folder: Path, *, target: str, eagle3: str) -> Calibration | None:
        """What was kept in `folder` for this target and EAGLE-3 drafter; None if nothing was.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            found = cls(
                tree["target"],
                tree["eagle3"],
                int(tree["rows"]),
                {name: Threshold(**its) for name, its in tree["entropy"].items()},
                {name: Threshold(**its) for name, its in tree["neural"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no calibration ({type(error).__name__}: {error}); remove it, or run "
                "whiflash-batch calibrate again"
            ) from error
        return found if (found.target, found.eagle3) == (target, eagle3) else None


def find_thresholds(
    labels: Sequence[RoundLabels],
    values: Sequence[Sequence[float]],
    categories: Sequence[str],
    costs: CostModel,
    *,
    autoregressive: str = "eagle3",
    block: str = "dflash",
) -> dict[str, Threshold]:
    """The best threshold over all rows (`all`), and for every category if there are several.

    Args:
        values: per row and round, what is compared with the threshold.
    """
    found = {"all": _best(labels, values, costs, autoregressive, block)}
    names = sorted(set(categories))
    for name in names if len(names) > 1 else ():
        mine = [i for i, category in enumerate(categories) if category == name]
        found[name] = _best(
            [labels[i] for i in mine], [values[i] for i in mine], costs, autoregressive, block
        )
    return found


def _best(
    labels: Sequence[RoundLabels],
    values: Sequence[Sequence[float]],
    costs: CostModel,
    autoregressive: str,
    block: str,
) -> Threshold:
    from whiflash_agents.engine.routing.oracle import Oracle

    oracle = Oracle(labels, [autoregressive, block], costs=costs)
    met = sorted({value for row in values for value in row})
    step = max(1, len(met) // _POINTS)
    grid = [met[0] - 1.0, *met[::step], met[-1]] if met else [0.0]

    def routes(threshold: float) -> list[dict[int, str]]:
        return [
            {i + 1: autoregressive if v > threshold else block for i, v in enumerate(row)}
            for row in values
        ]

    tried = []
    best: tuple[float, Threshold] | None = None
    for threshold in dict.fromkeys(grid):
        outcome = oracle.follow(routes(threshold))
        rate = outcome.tokens_per_second or 0.0
        tried.append([threshold, rate])
        if best is None or rate > best[0]:
            best = rate, Threshold(threshold, rate, outcome.mean_acceptance_length)
    assert best is not None  # the grid holds a point
    return Threshold(best[1].value, best[0], best[1].mean_acceptance_length, tried)
