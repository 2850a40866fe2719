"""Find models: the default agent, a local folder, or a name on the Hugging Face hub.

`resolve_model` turns what the user wrote into a folder that the engine loads, with the chat and
response templates to use where the folder's own are not the right ones.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from whiflash_agents.engine.errors import ModelNotFoundError

# A drafter's repository: config and weights, which are often still pickled (and then loaded with
# `weights_only`).
_DRAFTER_PATTERNS = ["*.json", "*.safetensors", "pytorch_model*.bin"]
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. `name` is what output rows show; a template that is None means the
    tokenizer's own; `adapter` is merged into the weights when they are loaded."""

    path: Path
    name: str
    chat_template: str | None = None
    response_template: dict[str, Any] | None = None
    adapter: Path | None = None


def cache_dir() -> Path:
    """The user's cache folder for this program; `WHIFLASH_CACHE` overrides the platform's place."""
    override = os.environ.get("WHIFLASH_CACHE")
    if override:
        return Path(override).expanduser().absolute()  # workers may run in another folder
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("whiflash-agents"))


def resolve_model(name: str | None = None, adapter: str | None = None) -> ModelFiles:
    """Find the model `name`; None, or its own name, is the default agent.

    What the agent is made from (SmolLM2-135M-Instruct, which can be named too) is downloaded and
    converted on first use. An existing local folder wins over a hub name; what looks like a path
    (`./x`, `/x`, `~/x`) is never looked up on the hub.

    Args:
        adapter: folder of a low-rank adapter, to go with the model; without a `name` it takes the
            place of the agent's own.

    Raises:
        ModelNotFoundError: nothing usable under that name; the text says what was tried and what
            to do.
    """
    from .embedded import default_agent

    if default_agent.is_meant(name, adapter):
        return replace(_base(), name=default_agent.NAME, adapter=default_agent.adapter())
    files = _base() if name in (None, default_agent.NAME) else _resolve(name)
    if adapter is None:
        return files
    path = Path(adapter).expanduser()
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelNotFoundError(
            f"adapter (--adapter): there is no {ADAPTER_CONFIG} in {path}; give the folder of a "
            "low-rank adapter as the PEFT library writes it"
        )
    return replace(files, adapter=path.absolute(), name=f"{files.name}+{path.absolute().name}")


def _resolve(name: str) -> ModelFiles:
    if not name.strip():
        raise ModelNotFoundError(
            "the model's name is empty: give a folder, a hub name (owner/name), or nothing for "
            "the default agent"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return _local(path)
    if path.is_file():
        raise ModelNotFoundError(
            f"{name} is a file; expected the folder that holds config.json, the weights "
            "(*.safetensors) and the tokenizer"
        )
    if name == _base_name():
        return _base()
    if _looks_like_path(name):
        raise ModelNotFoundError(
            f"there is no folder {name}: target (--target) takes the folder of a model, a hub "
            "name (owner/name), or nothing for the default agent"
        )
    return _from_hub(name)


def find_local(name: str | None) -> Path | None:
    """The folder of the model `name` if it is on this machine; None if it would be fetched first.

    Raises:
        ModelNotFoundError: it looks like a folder, and there is no model in it.
    """
    from .embedded import default_agent, default_target

    if name in (None, default_agent.NAME, default_target.NAME):
        return default_target.installed(cache_dir())
    if Path(name).expanduser().is_dir() or Path(name).is_file() or _looks_like_path(name):
        return resolve_model(name).path
    return _in_hub_cache(name)


def find_local_drafter(name: str) -> Path | None:
    """The folder of the drafter `name` if it is on this machine; None if it is not."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    return None if path.is_file() or _looks_like_path(name) else _in_hub_cache(name)


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no name for the hub: told where the model is looked for
        return None
    return Path(config).parent if isinstance(config, str) else None


def resolve_drafter(name: str, network: str) -> Path:
    """The folder of the drafter `name`: a local folder, or a hub name that is fetched into one.
    `network` is the setting that names it (`eagle3`, `dflash`).

    Raises:
        ModelNotFoundError: nothing of that name; the text says what was tried and what to do.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelNotFoundError(
            f"{network} (--{network}): {name} is a file; expected the folder that holds a "
            "drafter's config.json and weights"
        )
    if _looks_like_path(name):
        raise ModelNotFoundError(
            f"{network} (--{network}): there is no folder {name} (from {Path.cwd()}); a drafter is "
            "given as its folder or as a hub name (owner/name)"
        )
    return _fetch(name, _DRAFTER_PATTERNS)


def embedded_template(file: str) -> str:
    """The text of one of the templates shipped in `whiflash_agents/embedded/`."""
    return (resources.files("whiflash_agents.embedded") / file).read_text(encoding="utf-8")


def _base_name() -> str:
    from .embedded import default_target

    return default_target.NAME


def _base() -> ModelFiles:
    from .embedded import default_target

    return ModelFiles(
        path=default_target.install(cache_dir()),
        name=default_target.NAME,
        chat_template=embedded_template("chat_template.jinja"),
        response_template=json.loads(embedded_template("response_template.json")),
    )


def _local(path: Path) -> ModelFiles:
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(any(path.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        missing.append("weights (model*.safetensors)")
    if not any(path.glob("tokenizer*")) and not (path / "vocab.json").is_file():
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ModelNotFoundError(
            f"{path} is not a complete model folder: {', '.join(missing)} not found in it. Save "
            "model and tokenizer with save_pretrained, or download the whole repository"
        )
    resolved = path.resolve()
    if resolved.parent == (cache_dir() / "models").resolve() and (path / "manifest.json").is_file():
        return _base()  # named by its folder, it still needs its templates
    return ModelFiles(path=path, name=resolved.name)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1 or "\\" in name


def _from_hub(name: str) -> ModelFiles:
    files = _local(_fetch(name, _HUB_PATTERNS))
    return ModelFiles(path=files.path, name=name)


def _fetch(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a folder here nor a valid hub name (owner/name): {error}"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = [_plain(line) for line in str(error).strip().splitlines()]
        raise ModelNotFoundError(
            f"there is no folder {name!r}, and the Hugging Face hub did not deliver such a "
            f"model: {reason[0] if reason else type(error).__name__}. Check the name and the "
            "network; a gated model needs a token (hf auth login)"
        ) from error


def _plain(line: str) -> str:
    """A line of the hub library without the names and numbers of the errors underneath."""
    return re.sub(r"^(Got: )?(\w+Error: )?(\[Errno -?\d+\] )?", "", line).rstrip(". ")
