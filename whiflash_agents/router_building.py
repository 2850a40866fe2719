"""The router of a session: its threshold, its trained weights, and what is to be told of both.

A threshold is the user's, else the one that `calibrate` kept for just these weights, else the
default. Trained weights say what they were trained for. Where either belongs to other models, that
is told: such a router still routes, only badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whiflash_agents.calibration import FILE, Calibration
from whiflash_agents.settings import DEFAULT_ENTROPY

if TYPE_CHECKING:
    from whiflash_agents.batch.session_spec import Models, SessionSpec
    from whiflash_agents.engine.routing.base import Router
    from whiflash_agents.engine.routing.weights import MadeFor


@dataclass(frozen=True, slots=True)
class BuiltRouter:
    """A router for one engine.

    Attributes:
        threshold: of router `entropy`, in nats; None for the others.
        notes: sentences for the user.
    """

    router: Router
    threshold: float | None
    notes: list[str]


def build_router(spec: SessionSpec, models: Models) -> BuiltRouter:
    """The router that `spec` asks for.

    Raises:
        SettingsError, CheckpointError: it cannot be built; weights or a calibration that it needs
            are damaged or do not fit the target.
    """
    from whiflash_agents.engine.routing.registry import make_router

    routing, notes = spec.routing, []
    entropy, neural = routing.entropy_threshold, None
    if spec.router == "entropy":
        if entropy is None:
            kept, why = _calibrated(spec, models, "entropy")
            entropy, why = (DEFAULT_ENTROPY, f"the default; {why}") if kept is None else (kept, why)
        else:
            why = f"as {spec.threshold_from} says" if spec.threshold_from else "as given"
        notes.append(f"router entropy: threshold {entropy:.4g} nats ({why})")
    elif spec.router == "neural":
        neural, why = _calibrated(spec, models, "neural")
        own = "that of its weights; " if neural is None else f"{neural:.4g} tokens, "
        notes.append(f"router neural: threshold {own}{why}")
    if routing.router_weights is not None and spec.router in ("neural", "cost-aware"):
        notes += _strangers(spec, models, routing.router_weights)
    router = make_router(
        spec.router,
        spec.arms,
        models.target,
        entropy_threshold=DEFAULT_ENTROPY if entropy is None else entropy,
        neural_threshold=neural,
        weights=routing.router_weights,
        exploration=routing.exploration,
    )
    return BuiltRouter(router, entropy if spec.router == "entropy" else None, notes)


def made_for(spec: SessionSpec, models: Models) -> dict[str, MadeFor]:
    """Target and drafters of `spec`, as files that hold for them name them."""
    from whiflash_agents.engine.routing.weights import MadeFor

    names = {"target": spec.name} | {n: path.name for n, path in spec.drafter_paths.items()}
    identity = models.identity()
    return {part: MadeFor(name, identity[part]) for part, name in names.items()}


def _calibrated(spec: SessionSpec, models: Models, router: str) -> tuple[float | None, str]:
    """The threshold of `router` kept for these models, and where it is from; or None, and why."""
    folder = spec.drafter_paths["dflash"]
    found = Calibration.load(folder)
    if found is None:
        return None, f"no calibration of this pair in {folder}"
    path = folder / FILE
    these = made_for(spec, models)
    if parts := found.unlike({part: model.identity for part, model in these.items()}):
        theirs = {part: (found.models[part], found.identity[part]) for part in parts}
        ours = {part: (these[part].name, these[part].identity) for part in parts}
        told = f"it is for other models: {_compared(theirs, ours)}"
        return None, f"the calibration in {path} is not used, because {told}"
    thresholds = getattr(found, router)
    if not thresholds:
        return None, f"the calibration in {path} was made without its weights"
    return thresholds["all"].value, f"as calibrated for this pair in {path}"


def _strangers(spec: SessionSpec, models: Models, weights: str) -> list[str]:
    """A warning, if a trained router was trained for other models; it may not say for which."""
    from whiflash_agents.engine.routing.weights import models_of

    told = models_of(weights)
    if not told:
        return []
    these = made_for(spec, models)
    theirs = {
        part: (model.name, model.identity)
        for part, model in told.items()
        if part in these and model.identity != these[part].identity
    }
    if not theirs:
        return []
    ours = {part: (these[part].name, these[part].identity) for part in theirs}
    return [
        f"warning: router {weights} was trained for other models, and foresees what those would "
        f"accept: {_compared(theirs, ours)}. Train one for these (whiflash-batch train router)"
    ]


def _compared(theirs: Mapping[str, tuple[str, str]], ours: Mapping[str, tuple[str, str]]) -> str:
    """`target 'a' (0123abcd), here 'b' (4567cdef)`, one for each: equal names may hide other
    weights."""
    lines = []
    for part, (name, identity) in theirs.items():
        mine, its = ours[part]
        lines.append(f"{part} {name!r} ({identity[:8]}), here {mine!r} ({its[:8]})")
    return "; ".join(lines)
