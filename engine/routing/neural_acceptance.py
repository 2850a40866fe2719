"""Acceptance lengths predicted by a network: one trunk on the target's final hidden state, shared
by all arms, and one output per arm. What was seen lately enters beside the trunk, so that the
outputs can follow a text that training did not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import SettingsError
from ..sequence import SequenceState
from ..telemetry import RoundRecord
from .acceptance import RecentAcceptance
from .base import NONE, Surroundings
from .signals import Signals
from .weights import MadeFor, read_router, write_router

_KIND = "acceptance"


def scalar_features(signals: Signals, recent: Sequence[float]) -> list[float]:
    """What enters beside the hidden state: entropy and margin, on a logarithmic scale, and the
    recent acceptance length of each arm. For training, too."""
    return [math.log1p(max(0.0, signals.entropy)), math.log1p(max(0.0, signals.margin)), *recent]


class AcceptanceHead(nn.Module):
    """`Linear(d, d/8) -> GELU`, and from that and the scalar features one output per arm.

    Args:
        hidden_size: d, the target's.
        arms: drafters, in the order of the outputs.
        dropout: in training, behind the trunk.
    """

    def __init__(self, hidden_size: int, arms: Sequence[str], dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.arms = tuple(arms)
        width = max(1, hidden_size // 8)
        self.trunk = nn.Sequential(nn.Linear(hidden_size, width), nn.GELU(), nn.Dropout(dropout))
        self.outputs = nn.Linear(width + 2 + len(self.arms), len(self.arms))

    def forward(self, hidden: Tensor, scalars: Tensor) -> Tensor:
        """Acceptance lengths, `[rows, arms]`.

        Args:
            hidden: `[rows, hidden]`, as it enters `lm_head`.
            scalars: `[rows, 2 + arms]`, of `scalar_features`.
        """
        predicted: Tensor = self.outputs(torch.cat([self.trunk(hidden), scalars], dim=-1))
        return predicted


class NeuralAcceptance:
    """Predicts with a trained head; recent acceptance where there are no signals yet, and for arms
    that the head does not know.

    Args:
        head: computes in float32.
    """

    signals = frozenset({"entropy", "hidden"})

    def __init__(self, head: AcceptanceHead) -> None:
        if not head.arms or len({*head.arms, NONE}) != len(head.arms) + 1:
            raise SettingsError(
                f"acceptance head: arms are {head.arms!r}; expected names of different drafters, "
                "without 'none'"
            )
        self.head = head.float().eval()
        self._recent = RecentAcceptance()
        self._columns = {arm: column for column, arm in enumerate(head.arms)}

    def bind(self, surroundings: Surroundings) -> None:
        self._recent.bind(surroundings)

    def predict(self, sequences: Sequence[SequenceState], arms: Sequence[str]) -> list[list[float]]:
        found = self._recent.predict(sequences, arms)
        recent = self._recent.predict(sequences, self.head.arms)
        known: list[int] = []
        hidden: list[Tensor] = []
        scalars: list[list[float]] = []
        for index, sequence in enumerate(sequences):
            signals = sequence.signals
            if signals is not None and signals.hidden is not None:
                known.append(index)
                hidden.append(signals.hidden)
                scalars.append(scalar_features(signals, recent[index]))
        if known:
            with torch.inference_mode():
                rows = torch.stack(hidden).float()
                outputs = self.head(rows, torch.tensor(scalars, device=rows.device)).tolist()
            for index, output in zip(known, outputs, strict=True):
                found[index] = [
                    max(1.0, output[self._columns[arm]]) if arm in self._columns else value
                    for arm, value in zip(arms, found[index], strict=True)
                ]
        return found

    def kind(self, sequence: SequenceState) -> int:
        return self._recent.kind(sequence)

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        self._recent.observe(sequence, record)

    def close(self, sequence: SequenceState) -> None:
        self._recent.close(sequence)


def save_acceptance(
    head: AcceptanceHead, path: str | Path, made_for: Mapping[str, MadeFor] | None = None
) -> None:
    """Write the head and its arms to a safetensors file, and the target and drafters that it was
    trained for.

    Raises:
        OutputError: it cannot be written.
    """
    fields = {"kind": _KIND, "hidden_size": head.hidden_size, "arms": list(head.arms)}
    write_router(Path(path), fields, head, made_for)


def load_acceptance(
    path: str | Path, *, hidden_size: int, device: torch.device | str = "cpu"
) -> NeuralAcceptance:
    """Read what `save_acceptance` wrote.

    Args:
        hidden_size: of the target.
        device: where the target's hidden states are.

    Raises:
        CheckpointError: it is missing or damaged, or does not fit the target; names the tensor or
            field, what was found and what was expected.
    """
    fields, weights = read_router(Path(path), kind=_KIND, hidden_size=hidden_size)
    if len({*fields["arms"], NONE}) != len(fields["arms"]) + 1:
        raise weights.error("arms", "names of different drafters, without 'none'")
    head = AcceptanceHead(hidden_size, fields["arms"])
    weights.fill(head)
    return NeuralAcceptance(head.to(device))
