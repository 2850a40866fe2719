"""The default agent: SmolLM2-135M-Instruct with an adapter that makes it call tools, and the
drafters and routers trained for it. All of them are in the package, under `agent/`, each with the
model card that says how it was made.

The drafters and routers are for this agent only: whoever names another target, or another adapter,
names drafters of that one too.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

NAME = "SmolLM2-135M-Agent"
_ROUTER_FILES = {
    "neural": "router-neural.safetensors",
    "cost-aware": "router-cost-aware.safetensors",
}


def is_meant(target: str | None, adapter: str | None) -> bool:
    """Whether a target and an adapter, as the user names them, are the default agent."""
    return target in (None, NAME) and adapter is None


def folder() -> Path:
    """Where the agent's own files are."""
    return Path(str(resources.files("whiflash_agents.embedded"))) / "agent"


def adapter() -> Path:
    """The folder of the adapter, in the format of the PEFT library."""
    return folder() / "adapter"


def drafter(network: str) -> Path:
    """The folder of the agent's drafter: `eagle3` or `dflash`."""
    return folder() / network


def costs() -> Path:
    """The folder of cost tables measured for the agent and its drafters, each for one machine."""
    return folder() / "costs"


def place_of(path: Path) -> str:
    """`path` as it is called on every machine, if it belongs to the agent; else as it is here."""
    if path.is_relative_to(folder()):
        return f"{NAME}/{path.relative_to(folder()).as_posix()}"
    return str(path)


def router_weights(router: str) -> Path | None:
    """The file of the router trained for agent and drafters; None for routers without weights."""
    return folder() / _ROUTER_FILES[router] if router in _ROUTER_FILES else None
