"""Texts that are kept from training, and what the network makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import SettingsError
from .objective import Objective
from .schedule import generator_of
from .texts import TrainingText


@dataclass(slots=True)
class Tally:
    """Losses added up: of held-out texts, of a batch, of the last few steps.

    Attributes:
        total, weight: sums over texts.
        figures: name to (sum, count).
    """

    total: float = 0.0
    weight: float = 0.0
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, total: float, weight: float, figures: dict[str, tuple[float, float]]) -> None:
        self.total += total
        self.weight += weight
        for name, (value, count) in figures.items():
            before = self.figures.get(name, (0.0, 0.0))
            self.figures[name] = (before[0] + float(value), before[1] + float(count))

    @property
    def loss(self) -> float:
        """The mean loss; 0 where there was nothing to learn from."""
        return self.total / self.weight if self.weight else 0.0

    def means(self) -> dict[str, float]:
        """The mean of every figure that was counted at all."""
        return {name: value / count for name, (value, count) in self.figures.items() if count}

    def as_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "figures": self.means()}


def split_texts(
    texts: Sequence[TrainingText],
    share: float,
    *,
    group: Callable[[TrainingText], str] = lambda text: text.id,
) -> tuple[list[TrainingText], list[TrainingText]]:
    """Texts to train on, and texts to hold out, in their order.

    Whether a text is held out is decided by a hash of its group alone, so that it stays on its side
    whatever other texts come or go. Where all groups would fall on one side, one of them changes.

    Args:
        share: of the groups that are held out, from 0 (none) to 0.5.
        group: texts of one group go together: those that share a beginning, for instance.

    Raises:
        SettingsError: a share out of range, or fewer than two groups to hold one of them out.
    """
    held = held_out_groups(map(group, texts), share)
    kept = [text for text in texts if group(text) not in held]
    return kept, [text for text in texts if group(text) in held]


def held_out_groups(groups: Iterable[str], share: float) -> set[str]:
    """Which of `groups` `split_texts` holds out, for those who have no texts yet.

    Raises:
        SettingsError: as there.
    """
    if not 0.0 <= share <= 0.5:
        raise SettingsError(f"held_out={share!r}: expected a share from 0 to 0.5")
    if not share:
        return set()
    places = {name: _place(name) for name in groups}
    if len(places) < 2:
        found = f"{len(places)} trace{'' if len(places) == 1 else 's'}"
        raise SettingsError(
            f"held_out={share!r}: {found} cannot be trained on and held out, too; give more "
            "traces, or hold nothing out (--held-out 0)"
        )
    held = {name for name, place in places.items() if place < share}
    if not held:
        held = {min(places, key=lambda name: places[name])}
    elif len(held) == len(places):
        held.remove(max(places, key=lambda name: places[name]))
    return held


def _place(name: str) -> float:
    """A number from 0 to 1 for `name`."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@torch.no_grad()
def evaluate(
    objective: Objective, texts: Sequence[TrainingText], *, seed: int, autocast: str = "float32"
) -> Tally:
    """The loss and the figures of `texts`; what is drawn is the same each time. The network is in
    training mode afterwards if it was before.

    Args:
        autocast: bfloat16 or float32, as in training.
    """
    network, tally = objective.network, Tally()
    training = network.training
    network.eval()
    device = next(network.parameters()).device
    try:
        for text in texts:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast == "bfloat16"):
                loss = objective.loss(text, generator_of(seed, "held out", text.id))
            tally.add(loss.total.item(), loss.weight, loss.figures)
    finally:
        network.train(training)
    return tally
