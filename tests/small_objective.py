"""A tiny objective for the training loop, also as a program that a test can kill.

    python small_objective.py FOLDER STEPS_BEFORE_SLEEP

trains in FOLDER, says every step on standard output, and sleeps once it has done that many.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from whiflash_agents.engine.training.loop import StepReport, TrainingLoop
from whiflash_agents.engine.training.objective import Loss
from whiflash_agents.engine.training.schedule import TrainSettings
from whiflash_agents.engine.training.texts import TrainingText

VOCAB = 12
SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "texts_per_batch": 3,
    "peak_learning_rate": 0.05,
    "seed": 4,
    "autocast": "bfloat16",
}


class NextToken:
    """Learns which token follows which, from noisy embeddings."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
        self.seen: list[str] = []

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        self.seen.append(text.id)
        ids = torch.tensor(text.token_ids)
        embedded = self.network[0](ids[:-1])
        noise = 0.05 * torch.randn(embedded.shape, generator=generator)
        logits = self.network[1](embedded + noise)
        right = (logits.argmax(-1) == ids[1:]).sum().item()
        total = cross_entropy(logits.float(), ids[1:], reduction="sum")
        return Loss(total, len(ids) - 1, {"accuracy": (right, len(ids) - 1)})


def texts(count: int = 10) -> list[TrainingText]:
    """Runs of the cycle 1 -> 6 -> 11 -> 4 -> 9 -> 2 ..."""
    found = []
    for number in range(count):
        size = 5 + number % 4
        ids = tuple((number + 5 * at) % VOCAB for at in range(size))
        found.append(TrainingText(f"t{number}", ids, ((1, size),)))
    return found


def loop(folder: Path, **changes: Any) -> TrainingLoop:
    options = {k: changes.pop(k) for k in ("on_step", "identity", "held_out") if k in changes}
    settings = TrainSettings(**(SETTINGS | changes))
    return TrainingLoop(NextToken(), texts(), settings, folder, **options)


def weights(running: TrainingLoop) -> dict[str, torch.Tensor]:
    return dict(running.objective.network.state_dict())


def main(folder: str, pause: int) -> None:
    def told(report: StepReport) -> None:
        print(report.step, flush=True)
        if report.step == pause:
            time.sleep(60)

    loop(Path(folder), checkpoint_seconds=0, on_step=told).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
