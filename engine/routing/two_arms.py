"""What the published policies share: one number per sequence against one threshold, and two arms.

WhiFlash (2606.07710) routes between an autoregressive drafter and a block-diffusion drafter. Where
its text is silent, this is decided here: before the first forward there is no signal, and the block
drafter goes first; an arm that cannot serve a sequence leaves it to the other one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from ..errors import SettingsError
from ..sequence import SequenceState
from .base import NONE, Router, Surroundings


class TwoArmRouter(Router):
    """The autoregressive arm where a sequence's value exceeds the threshold, else the block arm.

    Args:
        autoregressive, block: the arms' names.
        threshold: in the unit of what the subclass returns from `values`.

    Raises:
        SettingsError: the arms are one, or the threshold is not a number.
    """

    def __init__(self, autoregressive: str, block: str, threshold: float) -> None:
        if autoregressive == block or NONE in (autoregressive, block):
            raise SettingsError(
                f"router {self.name!r} chooses between two drafters, got {autoregressive!r} and "
                f"{block!r}; name an autoregressive and a block drafter"
            )
        if math.isnan(threshold):
            raise SettingsError(
                f"router {self.name!r}: threshold is {threshold}; expected a number "
                "(`whiflash-batch calibrate` finds it)"
            )
        self.autoregressive = autoregressive
        self.block = block
        self.threshold = threshold
        self.arms = (autoregressive, block)

    def bind(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    @abstractmethod
    def values(self, sequences: Sequence[SequenceState]) -> list[float | None]:
        """What is compared with the threshold; None where there is no signal yet."""

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [
            self._serving(sequence, value is not None and value > self.threshold)
            for sequence, value in zip(sequences, self.values(sequences), strict=True)
        ]

    def _serving(self, sequence: SequenceState, autoregressive: bool) -> str:
        first, second = self.autoregressive, self.block
        if not autoregressive:
            first, second = second, first
        available = self._surroundings.available
        if available(first, sequence):
            return first
        return second if available(second, sequence) else NONE
