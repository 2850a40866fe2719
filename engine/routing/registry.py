"""Routers by name. A new router is one file beside this one and one entry here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import SettingsError
from ..target import Target
from .base import NONE, Router
from .cost_aware import CostAwareRouter
from .entropy import EntropyRouter
from .guard import Guard
from .neural import load_router
from .neural_acceptance import load_acceptance
from .static import StaticRouter


def make_router(
    name: str,
    arms: Sequence[str],
    target: Target,
    *,
    entropy_threshold: float = 0.5,
    neural_threshold: float | None = None,
    weights: str | Path | None = None,
    exploration: float = 0.006,
) -> Router:
    """Build the router called `name`.

    Args:
        name: `none`, the name of an arm (which then drafts always), `entropy`, `neural` or
            `cost-aware`.
        arms: what a router that chooses freely chooses from, beside `none`.
        entropy_threshold: of `entropy`, in nats.
        neural_threshold: of `neural`, in tokens; None takes what its file says.
        weights: a trained router: needed by `neural`, optional for `cost-aware`.
        exploration: share of time that `cost-aware` may lose by trying arms.

    Raises:
        SettingsError: there is no router of that name, or no arm to choose from, or `neural` lacks
            its weights.
        CheckpointError: the weights do not fit the target.
    """
    if name == NONE or (name in arms and len(arms) == 1):
        return StaticRouter(name)
    if name == "entropy":
        return EntropyRouter(threshold=entropy_threshold)
    if name == "neural":
        if weights is None:
            raise SettingsError("router 'neural' needs the file of a trained router (weights)")
        router = load_router(weights, hidden_size=target.hidden_size, device=target.device)
        if neural_threshold is not None:
            router.threshold = neural_threshold
        return router
    if name == "cost-aware":
        predictor = None
        if weights is not None:
            predictor = load_acceptance(
                weights, hidden_size=target.hidden_size, device=target.device
            )
        return Guard(CostAwareRouter(arms, predictor, exploration))
    raise SettingsError(
        f"router {name!r} is not known; known: none, the name of a drafter, entropy, neural, "
        "cost-aware"
    )
