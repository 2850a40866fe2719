"""What is asked of a drafter's training, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.training_texts import CONCURRENCY, check_recorded

if TYPE_CHECKING:
    from whiflash_agents.batch.plan import InputCount
    from whiflash_agents.drafter_acceptance import Acceptance
    from whiflash_agents.drafter_kinds import KindOptions
    from whiflash_agents.engine.training.loop import Training
    from whiflash_agents.settings import Settings
    from whiflash_agents.training_texts import TextSet

COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is to be trained, on what of the traces, and how long.

    Attributes:
        network: its kind and what is particular to it.
        output: folder of the drafter.
        responses: file of regenerated responses; `responses.jsonl` beside `output` if None, which
            drafters of one target in one place then share.
        regenerate: train on the target's own answers, not on the recorded turns.
        concurrency: turns generated at once.
        epochs, texts_per_batch, learning_rate: as in `TrainSettings`.
        minutes: training ends unfinished after that time.
        checkpoint_minutes: training time between checkpoints.
        held_out: share of the traces that is kept to judge by.
        features: `computed`, or a folder to keep them in.
        init: a drafter to go on from.
        warm_start: begin with weights of the target; None is yes, unless there is an `init`.
        max_length: longest text in tokens; the target's context if None.
        restart: begin anew, whatever an earlier sitting left.
        command: for the model card.

    Raises:
        SettingsError: a value out of range, or one that would be ignored.
    """

    network: KindOptions
    output: Path
    responses: Path | None = None
    regenerate: bool = True
    concurrency: int = CONCURRENCY
    epochs: float = 4.0
    texts_per_batch: int = 4
    learning_rate: float = 1e-3
    minutes: float | None = None
    checkpoint_minutes: float = 5.0
    held_out: float = 0.05
    features: str = COMPUTED
    init: str | None = None
    warm_start: bool | None = None
    max_length: int | None = None
    restart: bool = False
    command: str | None = None

    def __post_init__(self) -> None:
        minutes = math.inf if self.minutes is None else self.minutes
        longest = 2 if self.max_length is None else self.max_length
        for name, fits, expected in (
            ("concurrency", self.concurrency >= 1, "an integer of at least 1"),
            ("max_length", longest >= 2, "2 tokens or more"),
            ("held_out", 0.0 <= self.held_out <= 0.5, "a share from 0 to 0.5"),
            ("minutes", minutes > 0.0, "minutes above 0"),
            ("checkpoint_minutes", self.checkpoint_minutes >= 0.0, "minutes, at least 0"),
        ):
            if not fits:
                raise SettingsError(f"{name}={getattr(self, name)}: expected {expected}")
        if self.features != COMPUTED and not self.network.reads_source:
            raise SettingsError(
                f"features={self.features!r}: the on-policy objective computes them itself; leave "
                "this out"
            )

    def check_mode(self, mode: str) -> None:
        """Refuse what cannot be together with training on recorded turns.

        Args:
            mode: of the settings.

        Raises:
            SettingsError: naming it.
        """
        if self.regenerate:
            return
        check_recorded(mode)
        if self.responses is not None:
            raise SettingsError(
                f"responses={str(self.responses)!r}: with --no-regenerate recorded turns are "
                "trained on, and no responses are taken from a file or kept; leave out one or the "
                "other"
            )


@dataclass(slots=True)
class TrainedDrafter:
    """What came of a sitting.

    Attributes:
        plan, settings: as given.
        target: its name.
        traces: the files.
        input: what was in them.
        texts: what was made of it; without the texts themselves, `train` and `held_out` count them.
        network: the drafter's configuration, and its number of weights.
        training: as the loop told.
        acceptance: by arm, on held-out texts; empty where training is unfinished, or none are held
            out.
        measured: texts that it was measured on.
        coverage: share of the response tokens trained on that the drafter can say; None where it
            can say all.
        heads: those of the network, by name.
        machine: device, dtype and threads.
    """

    plan: TrainingPlan
    settings: Settings
    target: str
    traces: list[str]
    input: InputCount
    texts: TextSet
    train: int
    held_out: int
    network: dict[str, Any]
    training: Training
    machine: dict[str, Any]
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    measured: int = 0
    coverage: float | None = None
    heads: tuple[str, ...] = ()
