"""What a training run is made of before it begins: its settings, its steps, rates and order.

Everything here is a function of the settings and the texts, never of what has happened so far, so
that a run that goes on from a checkpoint does what it would have done without a break.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from ..errors import SettingsError
from .texts import TrainingText

# Without effect on what is learnt: a run may go on with others.
_FREE = frozenset({"checkpoint_seconds", "max_minutes"})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a network is trained: AdamW, a linear warm-up, then a cosine down to 0.

    Attributes:
        epochs: times that every text comes up; a fraction is the beginning of an epoch.
        texts_per_batch: texts whose losses make a step.
        peak_learning_rate: after the warm-up.
        warmup: share of all steps.
        weight_decay: of AdamW, for matrices; norms and biases have none.
        clip: longest gradient, by its norm.
        seed: of the order of texts and of all that an objective draws.
        autocast: dtype that the objective computes in; weights are float32 in any case.
        checkpoint_seconds: training time between checkpoints.
        max_minutes: training ends unfinished after this time, to be gone on with.

    Raises:
        SettingsError: a value out of range.
    """

    epochs: float = 4.0
    texts_per_batch: int = 4
    peak_learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    autocast: Literal["bfloat16", "float32"] = "bfloat16"
    checkpoint_seconds: float = 300.0
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        minutes = math.inf if self.max_minutes is None else self.max_minutes
        for name, fits, expected in (
            ("epochs", 0.0 < self.epochs < math.inf, "a number above 0"),
            ("texts_per_batch", _is_count(self.texts_per_batch), "an integer of at least 1"),
            ("peak_learning_rate", 0.0 < self.peak_learning_rate < math.inf, "a rate above 0"),
            ("warmup", 0.0 <= self.warmup < 1.0, "a share from 0 to below 1"),
            ("weight_decay", 0.0 <= self.weight_decay < math.inf, "a number of at least 0"),
            ("clip", self.clip > 0.0, "a norm above 0"),
            ("autocast", self.autocast in ("bfloat16", "float32"), "bfloat16 or float32"),
            ("checkpoint_seconds", self.checkpoint_seconds >= 0.0, "seconds, at least 0"),
            ("max_minutes", minutes > 0.0, "minutes above 0, or None"),
        ):
            if not fits:
                raise SettingsError(f"{name}={getattr(self, name)!r}: expected {expected}")

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is learnt."""
        return {name: value for name, value in asdict(self).items() if name not in _FREE}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


class Schedule:
    """The steps of a run over `texts`.

    Args:
        texts: in the order of the data; at least one.

    Raises:
        SettingsError: there is no text.
    """

    def __init__(self, texts: Sequence[TrainingText], settings: TrainSettings) -> None:
        if not texts:
            raise SettingsError(
                "there is no text to train on; give traces whose turns can be generated or read"
            )
        self.texts = texts
        self.settings = settings
        self.total = max(1, math.ceil(settings.epochs * len(texts) / settings.texts_per_batch))
        self._warmup = round(self.total * settings.warmup)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def batch(self, step: int) -> list[TrainingText]:
        """The texts of `step`, counted from 0. A batch may end one epoch and begin the next."""
        size, count = self.settings.texts_per_batch, len(self.texts)
        places = range(step * size, (step + 1) * size)
        return [self.texts[self._order(at // count)[at % count]] for at in places]

    def learning_rate(self, step: int) -> float:
        """Of `step`, counted from 0; never 0, so that no step is in vain."""
        peak = self.settings.peak_learning_rate
        if step < self._warmup:
            return peak * (step + 1) / (self._warmup + 1)
        done = (step - self._warmup) / (self.total - self._warmup)
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))

    def generator(self, step: int, text: TrainingText) -> torch.Generator:
        """What the objective draws from for `text` in `step`; on the CPU, so that draws do not
        depend on the device."""
        return generator_of(self.settings.seed, str(step), text.id)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.texts)))
        random.Random(f"{self.settings.seed} {epoch}").shuffle(order)
        return order


def generator_of(*parts: str | int) -> torch.Generator:
    """A generator on the CPU, seeded by all `parts` together."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(seed)
