"""What `whiflash-batch doctor` tells: what is installed, which devices and models are found, what
is missing, and what a drafter costs in memory.

Nothing is downloaded. Weights are loaded only when a drafter is named, because whether it belongs
to the target shows in its tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whiflash_agents.devices import pick_device
from whiflash_agents.engine.errors import WhiFlashError
from whiflash_agents.models import cache_dir, find_local, resolve_drafter, resolve_model
from whiflash_agents.settings import NETWORK_NAMES, Settings

if TYPE_CHECKING:
    from whiflash_agents.engine.drafters.context import DraftContext
    from whiflash_agents.engine.drafters.dflash_model import DFlashModel
    from whiflash_agents.engine.target import Target

_PROBLEM_KINDS = ("missing", "wrong")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` is fine, `note` is good to know, the others need a hand."""

    area: str
    name: str
    state: Literal["ok", "note", "missing", "wrong"]
    text: str

    @property
    def is_problem(self) -> bool:
        return self.state in _PROBLEM_KINDS


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at this installation, this machine, and the models that `settings` name."""
    yield from _packages()
    yield from _devices(settings)
    yield from _models(settings)


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for line in metadata.requires("whiflash-agents") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            text = f"not installed; pip install '{requirement}'"
            yield Finding("packages", requirement.name, "missing", text)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Finding("packages", requirement.name, "ok", version)
        else:
            text = f"{version}, expected {requirement.specifier}; pip install '{requirement}'"
            yield Finding("packages", requirement.name, "wrong", text)


def _devices(settings: Settings) -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    yield Finding("devices", "cpu", "ok", f"{os.cpu_count()} cores, torch uses {threads} threads")
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        text = f"{torch.cuda.get_device_name(index)}, {free:.1f} of {total:.1f} GiB free"
        yield Finding("devices", f"cuda:{index}", "ok", text)
    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        build = "CPU build" if cuda is None else f"built for CUDA {cuda}"
        text = f"none found by torch {torch.__version__} ({build}); everything runs on the CPU"
        yield Finding("devices", "GPU", "note", text)
    try:
        device, dtype = pick_device(settings.model.device, settings.model.dtype)
        yield Finding("devices", "used by a run", "ok", f"{device}, {dtype}")
    except WhiFlashError as error:
        yield Finding("devices", "used by a run", "wrong", str(error))


def _models(settings: Settings) -> Iterator[Finding]:
    yield Finding("models", "cache", "ok", str(cache_dir()))
    name = "target" if settings.model.target else "default agent"
    try:
        path = find_local(settings.model.target)
    except WhiFlashError as error:
        yield Finding("models", name, "missing", str(error))
        return
    if path is None:
        yield Finding("models", name, "note", "not on this machine yet; fetched on first use")
        return
    yield Finding("models", name, "ok", f"{path} ({_describe_config(path)})")
    model = resolve_model(settings.model.target, settings.model.adapter)
    if model.adapter is not None:
        size = _mib(sum(f.stat().st_size for f in model.adapter.iterdir()))
        yield Finding("models", "adapter", "ok", f"{model.adapter} ({size}); makes it {model.name}")
    asked = {n: v for n in NETWORK_NAMES if (v := settings.drafter(n)) is not None}
    if not asked:
        text = "none named; --eagle3 and --dflash look at one and say what it costs in memory"
        yield Finding("drafters", "neural drafters", "note", text)
        return
    try:
        target = _load_target(settings, path, model.adapter)
    except WhiFlashError as error:
        yield Finding("models", name, "wrong", str(error))
        return
    yield from _drafters(settings, target, asked)
    yield from _routers(settings)


def _routers(settings: Settings) -> Iterator[Finding]:
    """Trained routers that a run with these settings finds."""
    from whiflash_agents.engine.routing.weights import models_of, router_of

    for name in ("neural", "cost-aware"):
        weights = settings.router_weights(name)
        if weights is None:
            continue
        try:
            if router_of(weights) == name:
                made_for = ", ".join(model.name for model in models_of(weights).values())
                text = f"{weights}: trained for {made_for or 'models that it does not name'}"
                yield Finding("routers", name, "ok", text)
        except WhiFlashError as error:
            yield Finding("routers", name, "wrong", str(error))


def _load_target(settings: Settings, path: Path, adapter: Path | None) -> Target:
    from whiflash_agents.engine.target import Target

    device, dtype = pick_device(settings.model.device, settings.model.dtype)
    return Target.load(path, device=device, dtype=dtype, adapter=adapter)


def _drafters(settings: Settings, target: Target, asked: dict[str, str]) -> Iterator[Finding]:
    from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3
    from whiflash_agents.engine.drafters.context import draft_context
    from whiflash_agents.engine.drafters.registry import neural_drafters

    loaders: dict[str, Any] = {"eagle3": load_eagle3, "dflash": load_dflash}
    models: dict[str, Any] = {}
    for kind, name in asked.items():
        try:
            models[kind] = model = loaders[kind](resolve_drafter(name, kind), target)
        except WhiFlashError as error:
            yield Finding("drafters", kind, "wrong", str(error))
            continue
        size = sum(p.numel() for p in model.parameters()) / 1e6
        layers = ", ".join(map(str, model.config.feature_layers))
        shape = model.config.layer if kind == "eagle3" else model.config.layers
        text = (
            f"{name}: {size:.1f} M parameters, reads hidden states {layers} of the target, drafts "
            f"up to position {shape.max_positions:,}"
        )
        if kind == "dflash":
            text += _heads(model)
        yield Finding("drafters", kind, "ok", text)
    arms = neural_drafters(**models)
    contexts = {c.name: c for arm in arms.values() if (c := draft_context(arm)) is not None}
    yield from _memory(settings, target, contexts)


def _heads(drafter: DFlashModel) -> str:
    """What is told of the heads on top of a DFlash drafter."""
    text = ""
    if (local := drafter.local_head) is not None:
        text += (
            f"; local head beside it (rank {local.config.rank}, weights {local.config.weight:g} "
            f"and {local.config.unigram_weight:g}): corrects dflash, not ddtree"
        )
    if drafter.length_head is not None:
        text += "; AdaFlash length head: truncates what dflash verifies, not ddtree"
    if names := drafter.config.unused_length_head:
        text += (
            f"; its AdaFlash length head ({len(names)} tensors) is not used: it is of another "
            "shape, or predicts a threshold and no length (thresh_head_direct_len)"
        )
    return text


def _memory(
    settings: Settings, target: Target, contexts: dict[str, DraftContext]
) -> Iterator[Finding]:
    """What a position costs, and the most that target features can take."""
    planes = {"target": target.plane} | {n: c.plane_shape for n, c in contexts.items()}
    for name, plane in planes.items():
        each = plane.bytes_per_position(target.dtype)
        text = (
            f"{each:,} bytes a position: {_mib(each * target.max_context)} for the target's "
            f"context of {target.max_context:,}"
        )
        yield Finding("memory", f"KV cache, {name}", "ok", text)
    if not contexts:
        return
    layers = {layer for c in contexts.values() for layer in c.feature_layers}
    each = len(layers) * target.hidden_size * target.dtype.itemsize
    held = settings.drafters.max_backlog + settings.engine.prefill_chunk
    text = (
        f"{each:,} bytes a position ({len(layers)} hidden states): at most {_mib(each * held)} a "
        f"sequence (max_backlog {settings.drafters.max_backlog} + prefill_chunk "
        f"{settings.engine.prefill_chunk}), whatever its length"
    )
    yield Finding("memory", "feature buffer", "ok", text)


def _describe_config(path: Path) -> str:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    parts = [", ".join(config.get("architectures") or ["architecture not named"])]
    for key, unit in (("num_hidden_layers", "layers"), ("hidden_size", "hidden size")):
        if key in text:
            parts.append(f"{unit} {text[key]}")
    weights = [f for f in path.iterdir() if re.search(r"\.(safetensors|bin)$", f.name)]
    parts.append(_mib(sum(f.stat().st_size for f in weights)))
    return ", ".join(parts)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
