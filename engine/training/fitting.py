"""Fitting a small network to labels by squared error, with rows held out.

Rounds of one row are alike, so what is held out is whole rows: some decide when to stop, others,
which nothing has looked at, say how good the network is.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ..errors import SettingsError


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How a network is fitted: AdamW, a short warm-up, then a cosine down to 0.

    Attributes:
        peak_learning_rate: after the warm-up (the WhiFlash paper's, 2606.07710).
        weight_decay: of AdamW.
        batch_size: rounds per step.
        epochs: at most.
        warmup: share of all steps.
        patience: epochs without a better loss on the stopping rows after which it ends.
        stopping, reported: share of the rows that decide when to stop, and of those that the
            figures are of; at least one row each.
        seed: of the split, the initial weights, the order and dropout.

    Raises:
        SettingsError: a value out of range.
    """

    peak_learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch_size: int = 256
    epochs: int = 40
    warmup: float = 0.05
    patience: int = 5
    stopping: float = 0.15
    reported: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "patience"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SettingsError(
                    f"{name}={getattr(self, name)!r}: expected an integer of at least 1"
                )
        for name in ("stopping", "reported"):
            if not 0.0 < getattr(self, name) < 0.5:
                raise SettingsError(f"{name}={getattr(self, name)!r}: expected 0 < {name} < 0.5")
        if not 0.0 <= self.warmup <= 1.0:
            raise SettingsError(f"warmup={self.warmup!r}: expected a share from 0 to 1")
        if not self.peak_learning_rate > 0.0 or not self.weight_decay >= 0.0:
            raise SettingsError(
                f"peak_learning_rate={self.peak_learning_rate!r}, weight_decay="
                f"{self.weight_decay!r}: expected a rate above 0 and a decay of at least 0"
            )


@dataclass(slots=True)
class Examples:
    """One row's rounds.

    Attributes:
        inputs: of the network, each `[rounds, ...]`.
        targets: `[rounds, outputs]`.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor


@dataclass(slots=True)
class Fit:
    """What came of it.

    Attributes:
        train, stopping, reported: rows by index.
        epochs: that were run; the network has the weights of `best_epoch`, counted from 1.
        train_loss: mean squared error over the last epoch, with dropout.
        stopping_loss: at the best epoch.
    """

    train: list[int]
    stopping: list[int]
    reported: list[int]
    epochs: int = 0
    best_epoch: int = 0
    train_loss: float = math.inf
    stopping_loss: float = math.inf

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": {name: len(getattr(self, name)) for name in ("train", "stopping", "reported")},
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "train_loss": self.train_loss,
            "stopping_loss": self.stopping_loss,
        }


def split_rows(count: int, settings: FitSettings) -> tuple[list[int], list[int], list[int]]:
    """Indices of the rows to train on, to stop by, and to report of, drawn from the seed.

    Raises:
        SettingsError: fewer than three rows.
    """
    if count < 3:
        raise SettingsError(
            f"{count} rows with rounds; training needs three or more: one to learn from, one to "
            "stop by and one to report of. Label more rows, or longer outputs"
        )
    order = list(range(count))
    random.Random(settings.seed).shuffle(order)
    stopping, reported = (
        max(1, round(count * share)) for share in (settings.stopping, settings.reported)
    )
    held = order[: stopping + reported]
    return sorted(order[len(held) :]), sorted(held[:stopping]), sorted(held[stopping:])


def fit(network: nn.Module, rows: Sequence[Examples], settings: FitSettings) -> Fit:
    """Fit `network(*inputs)` to the targets; it ends in evaluation mode, without gradients, with
    the weights that were best on the stopping rows.

    Args:
        network: on its device, in float32; gives `[rounds, outputs]`, or `[rounds]` for a single
            output. Its last linear layer makes the outputs, with a bias. Weights begin anew.
        rows: each with a round or more.

    Raises:
        SettingsError: too few rows, another kind of network, or a loss that is not finite.
    """
    train, stopping, reported = split_rows(len(rows), settings)
    result = Fit(train, stopping, reported)
    device = next(network.parameters()).device
    inputs, targets = _joined([rows[i] for i in train], device)
    count = len(targets)
    per_epoch = -(-count // settings.batch_size)
    total = per_epoch * settings.epochs
    warmup = max(1, round(total * settings.warmup))

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    network.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.peak_learning_rate, weight_decay=settings.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    held = _joined([rows[i] for i in stopping], device)
    best: dict[str, Tensor] = {}
    with torch.random.fork_rng():  # initialisation and dropout draw from the global generators
        torch.manual_seed(settings.seed)
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        _centre(network, inputs, targets)
        for epoch in range(1, settings.epochs + 1):
            network.train()
            squares = 0.0
            order = torch.randperm(count).to(device)
            for chosen in order.split(settings.batch_size):
                optimizer.zero_grad()
                loss = mse_loss(_outputs(network, [x[chosen] for x in inputs]), targets[chosen])
                loss.backward()
                optimizer.step()
                schedule.step()
                squares += loss.item() * len(chosen)
            result.epochs, result.train_loss = epoch, squares / count
            stopping_loss = mse_loss(predict(network, held[0]), held[1]).item()
            if not math.isfinite(stopping_loss):
                raise SettingsError(
                    f"the loss is {stopping_loss} in epoch {epoch}; lower peak_learning_rate="
                    f"{settings.peak_learning_rate}, and label with a target in bfloat16 or float32"
                )
            if stopping_loss < result.stopping_loss:
                result.stopping_loss, result.best_epoch = stopping_loss, epoch
                best = copy.deepcopy(network.state_dict())
            elif epoch - result.best_epoch >= settings.patience:
                break
    network.load_state_dict(best)
    network.eval().requires_grad_(False)
    return result


@torch.no_grad()
def predict(network: nn.Module, inputs: Sequence[Tensor], at_once: int = 4096) -> Tensor:
    """`[rounds, outputs]` without dropout, on the network's device."""
    network.eval()
    device = next(network.parameters()).device
    parts = zip(*(x.split(at_once) for x in inputs), strict=True)
    return torch.cat([_outputs(network, [x.to(device) for x in part]) for part in parts])


def explained(predicted: Tensor, targets: Tensor) -> list[float | None]:
    """R² of each output: the share of the targets' variance that the predictions explain; below 0
    they are worse than the mean. None where the targets do not vary.

    Args:
        predicted, targets: `[rounds, outputs]`.
    """
    targets, predicted = targets.double().cpu(), predicted.double().cpu()
    left = (targets - predicted).square().sum(0)
    there = (targets - targets.mean(0)).square().sum(0)
    pairs = zip(left.tolist(), there.tolist(), strict=True)
    return [1.0 - a / b if b > 0.0 else None for a, b in pairs]


@torch.no_grad()
def _centre(network: nn.Module, inputs: Sequence[Tensor], targets: Tensor) -> None:
    """Begin with the mean of the targets: a bias that sets out from 0 takes thousands of steps of
    1e-3 to get to a length of 4."""
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    bias = linear[-1].bias if linear else None
    if bias is None or bias.shape != targets.shape[1:]:
        raise SettingsError(
            f"{type(network).__name__} does not end in a linear layer with a bias of "
            f"{targets.shape[1]}; give a network with one output per target"
        )
    bias.add_(targets.mean(0) - predict(network, inputs).mean(0))


def _outputs(network: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    found: Tensor = network(*inputs)
    return found[:, None] if found.dim() == 1 else found


def _joined(rows: Sequence[Examples], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """The rounds of all `rows`, one behind the other."""
    inputs = [torch.cat(parts).to(device) for parts in zip(*(r.inputs for r in rows), strict=True)]
    return inputs, torch.cat([r.targets for r in rows]).to(device)
