"""The training loop: texts in, a trained network out, and no step lost to a crash.

A step adds up the losses of a few texts, divides the gradients by what the losses weigh, clips
them, and lets AdamW take them in. What a step does depends on settings, texts and its number alone
(`schedule.py`), so that a run that was killed and goes on ends with the same weights, bit for bit,
as one that was not.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from ..errors import SettingsError
from .checkpoint import Checkpoints, TrainingState
from .held_out import Tally, evaluate
from .identity import texts_fingerprint
from .objective import Objective
from .schedule import Schedule, TrainSettings
from .texts import TrainingText, check_ids

_WINDOW = 50  # steps that figures are averaged over


@dataclass(frozen=True, slots=True)
class StepReport:
    """How training stands after a step.

    Attributes:
        step, total: steps done, and in all.
        loss, figures: means over the last steps.
        texts_per_second: since this sitting began.
        seconds: of training, over all sittings.
        seconds_left: at this pace.
    """

    step: int
    total: int
    loss: float
    figures: Mapping[str, float]
    learning_rate: float
    texts_per_second: float
    seconds: float
    seconds_left: float


@dataclass(slots=True)
class Training:
    """What came of a sitting.

    Attributes:
        finished: whether all steps are done; if not, another sitting goes on from here.
        resumed: the step that this sitting began at.
        loss, figures: means over the last steps.
        history: `{"step", "loss", "figures"}` of held-out texts, oldest first.
    """

    finished: bool
    step: int
    total: int
    resumed: int
    seconds: float
    loss: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


class TrainingLoop:
    """Trains an objective's network.

    Args:
        objective: its network on its device, in float32, with gradients where it is to learn.
        texts: to train on, each with an id of its own.
        folder: of the checkpoints; a run goes on from those that it finds there.
        identity: what else decides what is learnt (the target, the objective's own settings), as
            JSON takes it; a run does not go on from checkpoints of another.
        held_out: texts that the loss is told of on the way and at the end.
        evaluations: how often.
        on_step: told after every step.
        on_held_out: told the step, and what held-out texts say.

    Raises:
        SettingsError: no texts, two of one id, or a network that is not in float32.
    """

    def __init__(
        self,
        objective: Objective,
        texts: Sequence[TrainingText],
        settings: TrainSettings,
        folder: str | Path,
        *,
        identity: Mapping[str, Any] | None = None,
        held_out: Sequence[TrainingText] = (),
        evaluations: int = 8,
        on_step: Callable[[StepReport], None] | None = None,
        on_held_out: Callable[[int, Tally], None] | None = None,
    ) -> None:
        check_ids(texts)
        if not isinstance(evaluations, int) or evaluations < 1:
            raise SettingsError(f"evaluations={evaluations!r}: expected an integer of at least 1")
        self.objective = objective
        self.settings = settings
        self.schedule = Schedule(texts, settings)
        self._network = objective.network
        self._device = _check_network(self._network)
        self._trained = [p for p in self._network.parameters() if p.requires_grad]
        self._held_out = held_out
        self._every = -(-self.schedule.total // evaluations)
        self._on_step, self._on_held_out = on_step, on_held_out
        self._optimizer = self._new_optimizer()
        self.checkpoints = Checkpoints(
            folder,
            {
                "settings": settings.decisive(),
                "texts": {"count": len(texts), "fingerprint": texts_fingerprint(texts)},
                **(identity or {}),
            },
        )
        self._recent: deque[Tally] = deque(maxlen=_WINDOW)
        self._stopping = False

    def run(self) -> Training:
        """Train to the end, or until time is up; the network is in evaluation mode afterwards.

        Raises:
            ChangedError: checkpoints of something else.
            SettingsError: a loss that is not finite.
            OutputError: checkpoints cannot be read or written.
        """
        state = self.checkpoints.restore(self._network, self._optimizer) or TrainingState()
        begun, resumed = state.seconds, state.step
        started = saved = time.monotonic()
        total = self.schedule.total
        self._network.train()
        while state.step < total and not self._stopping:
            self._step(state.step)
            state.step += 1
            if state.step == total or state.step % self._every == 0:
                self._evaluate(state)
            now = time.monotonic()
            state.seconds = begun + now - started
            self._tell(state, resumed, now - started)
            if state.step < total:
                if self.settings.max_minutes and now - started >= 60 * self.settings.max_minutes:
                    break
                if now - saved >= self.settings.checkpoint_seconds:
                    self.checkpoints.save(state, self._network, self._optimizer)
                    saved = time.monotonic()
        if state.step > resumed:
            self.checkpoints.save(state, self._network, self._optimizer)
        self._network.eval()
        recent = self._recent_figures()
        return Training(
            state.step == total,
            state.step,
            total,
            resumed,
            state.seconds,
            recent.loss,
            recent.means(),
            state.history,
        )

    def stop(self) -> None:
        """End after the step at hand, with a checkpoint; safe to call from a signal handler."""
        self._stopping = True

    def _step(self, step: int) -> None:
        bfloat16 = self.settings.autocast == "bfloat16"
        self._optimizer.zero_grad(set_to_none=True)
        tally = Tally()
        for text in self.schedule.batch(step):
            with torch.autocast(self._device.type, torch.bfloat16, enabled=bfloat16):
                loss = self.objective.loss(text, self.schedule.generator(step, text))
            value = loss.total.item()
            if not math.isfinite(value):
                raise self._not_finite(step, f"the loss of text {text.id!r} is {value}")
            if loss.weight:
                loss.total.backward()
            tally.add(value, loss.weight, loss.figures)
        self._recent.append(tally)
        if not tally.weight:
            return  # no text of this batch has anything to teach
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.div_(tally.weight)
        norm = clip_grad_norm_(self._trained, self.settings.clip)
        if not math.isfinite(norm):
            raise self._not_finite(step, f"the gradient's norm is {norm.item()}")
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step)
        self._optimizer.step()

    def _not_finite(self, step: int, found: str) -> SettingsError:
        settings = self.settings
        remedy = f"Lower peak_learning_rate={settings.peak_learning_rate}"
        if settings.autocast != "float32":
            remedy += f", or compute in float32 (autocast={settings.autocast!r} now)"
        return SettingsError(
            f"step {step + 1} of {self.schedule.total}: {found}; nothing of this step was kept. "
            f"{remedy}"
        )

    def _evaluate(self, state: TrainingState) -> None:
        if not self._held_out:
            return
        found = evaluate(
            self.objective,
            self._held_out,
            seed=self.settings.seed,
            autocast=self.settings.autocast,
        )
        state.history.append({"step": state.step, **found.as_dict()})
        if self._on_held_out is not None:
            self._on_held_out(state.step, found)

    def _tell(self, state: TrainingState, resumed: int, seconds: float) -> None:
        if self._on_step is None:
            return
        recent, done = self._recent_figures(), state.step - resumed
        self._on_step(
            StepReport(
                state.step,
                self.schedule.total,
                recent.loss,
                recent.means(),
                self.schedule.learning_rate(state.step - 1),
                done * self.settings.texts_per_batch / seconds if seconds else 0.0,
                state.seconds,
                seconds / done * (self.schedule.total - state.step),
            )
        )

    def _recent_figures(self) -> Tally:
        recent = Tally()
        for tally in self._recent:
            recent.add(tally.total, tally.weight, tally.figures)
        return recent

    def _new_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self._trained if p.dim() > 1]
        others = [p for p in self._trained if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.settings.peak_learning_rate,
            fused=self._device.type in ("cpu", "cuda"),
        )


def _check_network(network: torch.nn.Module) -> torch.device:
    """The network's device."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters:
        raise SettingsError(
            f"{type(network).__name__} has no weights with gradients; call requires_grad_() first"
        )
    if strange := {str(p.dtype) for p in parameters} - {"torch.float32"}:
        raise SettingsError(
            f"{type(network).__name__} has weights in {', '.join(sorted(strange))}; train in "
            "float32 (network.float()), and let autocast compute in bfloat16"
        )
    return parameters[0].device
