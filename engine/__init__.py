"""The routed drafting loop in pure torch: token ids in, token ids and telemetry out.

This floor knows nothing of traces, chat templates, JSON, LangChain or Ray. Names resolve on first
use, so that importing `whiflash_agents.engine.errors` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "EngineSettings": "engine_settings",
    "Event": "request",
    "GenerationResult": "request",
    "Request": "request",
    "SamplingParams": "request",
    "Target": "target",
    "WhiFlashEngine": "engine",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
