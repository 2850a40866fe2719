"""Thresholds of the published routers, found by grid search on labelled rounds, and kept.

The target writes the turns of some traces itself; every drafter is labelled at every round of them
(`bench.py`); then each threshold of a grid is followed through all of these texts, and the one that
takes the least time by the costs measured here wins: over all rows, and per category for the
reader. What is found is kept in the DFlash drafter's folder, and routers use it from then on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.engine.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    from whiflash_agents.engine.costs import CostModel
    from whiflash_agents.engine.routing.labels import RoundLabels

FILE = "whiflash-calibration.json"
_POINTS = 41  # thresholds tried: quantiles of the values met
_REMEDY = "remove the file, or run whiflash-batch calibrate again, which replaces it"


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
        models: what it holds for: `target`, `eagle3` and `dflash`, and what they are called.
        identity: of the weights of each (`engine.training.identity.network_identity`).
        rows: texts it was found on.
        entropy: thresholds of router `entropy` in nats, by category; `all` is what runs use.
        neural: the same of router `neural`, in tokens; empty without its weights.
    """

    models: dict[str, str]
    identity: dict[str, str]
    rows: int
    entropy: dict[str, Threshold]
    neural: dict[str, Threshold] = field(default_factory=dict)

    def unlike(self, identity: Mapping[str, str]) -> list[str]:
        """Of `target`, `eagle3` and `dflash`, those that it was not found for."""
        return [part for part in self.models if self.identity[part] != identity.get(part)]

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
            raise OutputError(
                f"{path} cannot be written: {error.strerror}; give a folder of yours with -o and "
                "the threshold with --entropy-threshold"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, folder: Path) -> Calibration | None:
        """What was kept in `folder`, for whatever models; None if nothing was.

        Raises:
            CheckpointError: the file is damaged; the text names the field.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
        except (ValueError, RecursionError):
            raise CheckpointError(f"{path} is damaged: it is no JSON; {_REMEDY}") from None
        read = _Reader(path)
        top = read.mapping(tree, "the file")
        parts = ("target", "eagle3", "dflash")
        models, identity = (read.mapping(top.get(n), n) for n in ("models", "identity"))
        rows, neural = top.get("rows"), top.get("neural")
        if not isinstance(rows, int) or isinstance(rows, bool):
            raise read.error("rows", rows, "a number of texts")
        return cls(
            {part: read.text(models.get(part), f"models.{part}") for part in parts},
            {part: read.text(identity.get(part), f"identity.{part}") for part in parts},
            rows,
            read.thresholds(top.get("entropy"), "entropy"),
            read.thresholds(neural, "neural") if neural else {},
        )


class _Reader:
    """Reads fields of a calibration file, and names the one that is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, name: str, value: object, expected: str) -> CheckpointError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        found = "is missing" if value is None else f"is {shown}"
        return CheckpointError(
            f"{self._path} is damaged: {name} {found}, expected {expected}; {_REMEDY}"
        )

    def mapping(self, value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(name, value, "a JSON object")
        return value

    def text(self, value: object, name: str) -> str:
        if not isinstance(value, str):
            raise self.error(name, value, "a text")
        return value

    def number(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "a number")
        if not math.isfinite(value):
            raise self.error(name, value, "a finite number")
        return float(value)

    def thresholds(self, value: object, name: str) -> dict[str, Threshold]:
        found = {}
        for category, its in self.mapping(value, name).items():
            fields = self.mapping(its, f"{name}.{category}")
            value_of, rate, length = (
                self.number(fields.get(part), f"{name}.{category}.{part}")
                for part in ("value", "tokens_per_second", "mean_acceptance_length")
            )
            found[category] = Threshold(value_of, rate, length, fields.get("tried", []))
        if "all" not in found:
            raise self.error(f"{name}.all", None, "the threshold over all texts")
        return found


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
