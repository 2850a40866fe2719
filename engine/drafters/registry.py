"""Drafters by name. A new drafter is one file beside this one and one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import SettingsError
from .base import Drafter
from .lookup import LookupDrafter

_FACTORIES: dict[str, Callable[..., Drafter]] = {"lookup": LookupDrafter}


def drafter_names() -> list[str]:
    """The drafters that `make_drafter` can build."""
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
