"""The neural router of WhiFlash (2606.07710): a small network on the target's final hidden state.

It predicts by how much the autoregressive drafter's acceptance length exceeds the block drafter's;
the threshold stands for the difference in what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import SettingsError
from ..sequence import SequenceState
from .two_arms import TwoArmRouter
from .weights import MadeFor, read_router, write_router

_KIND = "neural"


class RouterHead(nn.Module):
    """`Linear(d, d/8) -> GELU -> Dropout -> Linear(d/8, 1)`.

    Args:
        hidden_size: d, the target's.
        dropout: in training.
    """

    def __init__(self, hidden_size: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        width = max(1, hidden_size // 8)
        self.layers = nn.Sequential(
            nn.Linear(hidden_size, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]`, as it enters `lm_head`, to `[rows]`: acceptance length of the
        autoregressive arm minus that of the block arm."""
        difference: Tensor = self.layers(hidden).squeeze(-1)
        return difference


class NeuralRouter(TwoArmRouter):
    """The autoregressive arm where the head predicts more than `threshold`, else the block arm.

    Args:
        head: computes in float32.
        threshold: in tokens.
        arms: the autoregressive and the block arm.

    Raises:
        SettingsError: `arms` are not two.
    """

    name = "neural"
    signals = frozenset({"hidden"})

    def __init__(
        self,
        head: RouterHead,
        threshold: float = 0.0,
        arms: Sequence[str] = ("eagle3", "dflash"),
    ) -> None:
        if isinstance(arms, str) or len(arms) != 2:
            raise SettingsError(
                f"router 'neural': arms are {arms!r}; expected an autoregressive and a block arm"
            )
        super().__init__(arms[0], arms[1], threshold)
        self.head = head.float().eval()

    def values(self, sequences: Sequence[SequenceState]) -> list[float | None]:
        values: list[float | None] = [None] * len(sequences)
        known: list[int] = []
        rows: list[Tensor] = []
        for index, sequence in enumerate(sequences):
            if sequence.signals is not None and sequence.signals.hidden is not None:
                known.append(index)
                rows.append(sequence.signals.hidden)
        if rows:
            with torch.inference_mode():
                predicted = self.head(torch.stack(rows).float()).tolist()
            for index, value in zip(known, predicted, strict=True):
                values[index] = value
        return values


def save_router(
    router: NeuralRouter, path: str | Path, made_for: Mapping[str, MadeFor] | None = None
) -> None:
    """Write the head, its arms and its threshold to a safetensors file, and the target and drafters
    that it was trained for.

    Raises:
        OutputError: it cannot be written.
    """
    fields = {
        "kind": _KIND,
        "hidden_size": router.head.hidden_size,
        "arms": list(router.arms),
        "threshold": router.threshold,
    }
    write_router(Path(path), fields, router.head, made_for)


def load_router(
    path: str | Path, *, hidden_size: int, device: torch.device | str = "cpu"
) -> NeuralRouter:
    """Read what `save_router` wrote.

    Args:
        hidden_size: of the target.
        device: where the target's hidden states are.

    Raises:
        CheckpointError: it is missing or damaged, or does not fit the target; names the tensor or
            field, what was found and what was expected.
    """
    fields, weights = read_router(Path(path), kind=_KIND, hidden_size=hidden_size)
    if len(fields["arms"]) != 2 or len(set(fields["arms"])) != 2:
        raise weights.error("arms", "two names, an autoregressive and a block drafter")
    head = RouterHead(hidden_size)
    weights.fill(head)
    return NeuralRouter(head.to(device), weights.number("threshold"), fields["arms"])
