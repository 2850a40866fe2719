"""Drafters by name. A new drafter is one file beside this one and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import SettingsError
from .base import Drafter
from .ddtree import DDTreeDrafter
from .dflash import DFlashContext, DFlashDrafter
from .dflash_model import DFlashModel
from .eagle3 import Eagle3Drafter
from .eagle3_model import Eagle3Model
from .lookup import LookupDrafter

# Drafters that need no weights.
_FACTORIES: dict[str, Callable[..., Drafter]] = {"lookup": LookupDrafter}


def neural_drafters(
    *,
    eagle3: Eagle3Model | None = None,
    dflash: DFlashModel | None = None,
    eagle3_depth: int = 8,
    eagle3_top_k: int = 10,
    eagle3_tokens: int = 60,
    ddtree_nodes: int = 32,
) -> dict[str, Drafter]:
    """The arms over the networks that are given, for one engine: `eagle3`; `dflash` and `ddtree`,
    which share one context.

    Raises:
        SettingsError: a setting below 1, or a network of the other kind.
    """
    for name, model, kind in (("eagle3", eagle3, Eagle3Model), ("dflash", dflash, DFlashModel)):
        if model is not None and not isinstance(model, kind):
            raise SettingsError(
                f"{name}: expected a {kind.__name__} (engine.checkpoints.load_{name}), got a "
                f"{type(model).__name__}"
            )
    arms: dict[str, Drafter] = {}
    if eagle3 is not None:
        arms["eagle3"] = Eagle3Drafter(
            eagle3, depth=eagle3_depth, top_k=eagle3_top_k, total_tokens=eagle3_tokens
        )
    if dflash is not None:
        context = DFlashContext(dflash)
        arms["dflash"] = DFlashDrafter(context)
        arms["ddtree"] = DDTreeDrafter(context, nodes=ddtree_nodes)
    return arms


def drafter_names() -> list[str]:
    """The drafters that `make_drafter` can build: those without weights."""
    return sorted(_FACTORIES)


def make_drafter(name: str, **settings: Any) -> Drafter:
    """Build the drafter called `name`.

    Raises:
        SettingsError: there is none of that name.
    """
    if name not in _FACTORIES:
        raise SettingsError(
            f"drafter {name!r} is not available; available: none, {', '.join(drafter_names())}"
        )
    return _FACTORIES[name](**settings)
