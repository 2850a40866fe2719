"""The entropy router of WhiFlash (2606.07710): hard text to the autoregressive drafter.

`H_t` is the entropy, in nats, of the target's next-token distribution at the last accepted
position, before temperature. Above the threshold an EAGLE-3 tree drafts, else a DFlash block.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..sequence import SequenceState
from .two_arms import TwoArmRouter


class EntropyRouter(TwoArmRouter):
    """The autoregressive arm if `H_t > threshold`, else the block arm.

    Args:
        threshold: in nats, from a grid search on held-out prompts (`whiflash-batch calibrate`).
    """

    name = "entropy"
    signals = frozenset({"entropy"})

    def __init__(
        self, autoregressive: str = "eagle3", block: str = "dflash", *, threshold: float
    ) -> None:
        super().__init__(autoregressive, block, threshold)

    def values(self, sequences: Sequence[SequenceState]) -> list[float | None]:
        return [None if (known := s.signals) is None else known.entropy for s in sequences]
