"""Cost tables kept between runs, one file for each combination that they were measured for.

A table holds for a target, its drafters, their settings and the machine. The name of its file is a
hash over all of these, and the file repeats them: what is damaged, or is not what was asked for, is
measured anew, and that is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from whiflash_agents.engine.costs import CostModel, CostTable

from .embedded import default_agent
from .models import cache_dir

if TYPE_CHECKING:
    from whiflash_agents.engine import WhiFlashEngine

FORMAT = "whiflash-agents costs"
VERSION = 1  # of the file, and of what and how is measured: raised, it makes all tables stale


def load_or_measure(
    engine: WhiFlashEngine,
    *,
    key_parts: Mapping[str, Any],
    recalibrate: bool,
    on_phase: Callable[[str], None],
) -> tuple[CostModel, str]:
    """The costs of `engine`: those kept by an earlier run, those that come with the default agent
    if they were measured on a machine like this, or measured now (and kept).

    Args:
        engine: an idle one.
        key_parts: what times depend on beyond what the engine itself tells (`key_of`), as JSON
            takes it; the folders of weights, say.
        recalibrate: measure, whatever is kept.
        on_phase: told what is about to take a few seconds.

    Returns:
        the model to give to the engine, and a sentence that says where its table comes from: with
        the reason, if it was measured though a file was there, or could not be kept.

    Raises:
        SettingsError, WhiFlashError: what `measure_costs` raises.
    """
    from whiflash_agents.engine.cost_calibration import measure_costs

    key = key_of(engine, key_parts)
    path = path_of(key)
    reason = "as asked for"
    if not recalibrate:
        table, reason = load(path, key)
        if table is not None:
            return CostModel(table), f"costs read from {path}"
        shipped = default_agent.costs() / path.name
        table, _ = load(shipped, key)
        if table is not None:
            return CostModel(table), f"costs read from {shipped}, measured on a machine like this"
    on_phase("measuring costs")
    started = time.perf_counter()
    table = measure_costs(engine)
    told = f"costs measured in {time.perf_counter() - started:.1f} s ({reason})"
    try:
        save(path, key, table)
    except OSError as error:
        return CostModel(table), (
            f"{told}; they are not kept, because {path} cannot be written: "
            f"{error.strerror or error}"
        )
    return CostModel(table), f"{told}, kept in {path}"


def key_of(engine: WhiFlashEngine, key_parts: Mapping[str, Any]) -> dict[str, Any]:
    """All that the costs of `engine` depend on, as JSON gives it back."""
    import torch

    from whiflash_agents.engine.cost_calibration import machine_of

    config = engine.target.config.to_dict()
    key = {
        "version": VERSION,
        "torch": torch.__version__,
        "machine": machine_of(engine.target),
        # Without where it was found, and who wrote the file.
        "config": {
            name: value
            for name, value in config.items()
            if not name.startswith("_") and name != "transformers_version"
        },
        "drafters": {name: _drafter_key(drafter) for name, drafter in engine.drafters.items()},
        "settings": asdict(engine.settings),
        "more": key_parts,
    }
    return json.loads(json.dumps(key, default=str))


def _drafter_key(drafter: Any) -> dict[str, Any]:
    """Kind, settings and sizes of a drafter and of its network."""
    from whiflash_agents.engine.drafters.context import draft_context

    told: dict[str, Any] = {"kind": type(drafter).__qualname__, "settings": _scalars(drafter)}
    context = draft_context(drafter)
    if context is not None:
        model = getattr(context, "model", None)
        weights = {} if model is None else dict(model.named_parameters())
        told["network"] = {
            "name": context.name,
            "layers": context.feature_layers,
            "plane": asdict(context.plane_shape),
            "sizes": {name: list(weight.shape) for name, weight in weights.items()},
            "config": _config(model),
        }
    return told


def _config(model: Any) -> dict[str, Any] | None:
    config = getattr(model, "config", None)
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    return None  # a network of someone's own, which its sizes tell


def _scalars(thing: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(thing).items()
        if not name.startswith("_") and isinstance(value, (bool, int, float, str))
    }


def path_of(key: Mapping[str, Any]) -> Path:
    """The file of the table that is kept for `key`."""
    canonical = json.dumps(key, sort_keys=True, default=str).encode()
    return cache_dir() / "costs" / f"{hashlib.sha256(canonical).hexdigest()[:32]}.json"


def load(path: Path, key: Mapping[str, Any]) -> tuple[CostTable | None, str]:
    """The table kept at `path`; or None, and why there is none that can be trusted."""
    try:
        tree = json.loads(path.read_bytes())
        if not isinstance(tree, dict) or tree["format"] != FORMAT:
            return None, f"{path} is not a file of costs"
        if tree["version"] != VERSION:
            return None, f"{path} has version {tree['version']!r}, expected {VERSION}"
        if tree["key"] != key:
            return None, f"{path} was measured for something else"
        table = CostTable.of(tree["table"])
    except FileNotFoundError:
        return None, "no earlier run kept any"
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"
    except KeyError as error:
        return None, f"{path} is damaged: it lacks {error}"
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, or no table
        return None, f"{path} is damaged: {error}"
    arms, networks = set(key["drafters"]), _networks(key)
    if not table.verify.counts or set(table.draft) != arms or set(table.catch_up) != networks:
        return None, f"{path} is damaged: it lacks costs of some drafters"
    return table, ""


def _networks(key: Mapping[str, Any]) -> set[str]:
    drafters = key["drafters"].values()
    return {drafter["network"]["name"] for drafter in drafters if "network" in drafter}


def save(path: Path, key: Mapping[str, Any], table: CostTable) -> None:
    """Write the table at once or not at all: runs that start together may share the file.

    Raises:
        OSError: it cannot be written.
    """
    tree = {"format": FORMAT, "version": VERSION, "key": key, "table": table.as_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid4().hex}")
    try:
        temporary.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
