"""The one tree of settings, with the same names in TOML, environment and command line.

`load_settings` merges the four sources (command line over environment over TOML file over default)
and refuses what it does not know, by name and with the nearest known name. A field name is unique
in the whole tree, so that `[sampling] max_tokens`, `WHIFLASH_MAX_TOKENS` and `--max-tokens` are
always the same setting. No torch here: the command line reads settings before it loads a model.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from whiflash_agents.embedded import default_agent
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.request import SamplingParams

ENVIRONMENT_PREFIX = "WHIFLASH_"
# Variables with our prefix that are not settings of a run.
OTHER_VARIABLES = frozenset({"WHIFLASH_CACHE"})

# The network that an arm drafts with; None needs no weights.
ARM_NETWORKS: dict[str, str | None] = {
    "lookup": None,
    "eagle3": "eagle3",
    "dflash": "dflash",
    "ddtree": "dflash",
}
# The arms that a router chooses from, `none` aside; None: all whose networks are given.
ROUTER_ARMS: dict[str, tuple[str, ...] | None] = {
    "none": (),
    **{arm: (arm,) for arm in ARM_NETWORKS},
    "entropy": ("eagle3", "dflash"),
    "neural": ("eagle3", "dflash"),
    "cost-aware": None,
}
ROUTERS = tuple(ROUTER_ARMS)
AUTO_ROUTER = "auto"
DEFAULT_ENTROPY = 0.5  # nats; between the certainty of structure and that of free text
_CATCH_UP_FIELDS = {"catch_up", "max_backlog"}
_EAGLE3_FIELDS = {
    *("eagle3", "eagle3_depth", "eagle3_top_k", "eagle3_tokens", "draft_prefill"),
    *_CATCH_UP_FIELDS,
}
_DFLASH_FIELDS = {"dflash", *_CATCH_UP_FIELDS}
_ARM_FIELDS: dict[str, set[str]] = {
    "lookup": set(),
    "eagle3": _EAGLE3_FIELDS,
    "dflash": _DFLASH_FIELDS,
    "ddtree": {"ddtree_nodes", *_DFLASH_FIELDS},
}
_ROUTER_FIELDS = {
    "entropy": {"entropy_threshold"},
    "neural": {"router_weights"},
    "cost-aware": {"router_weights", "exploration", "recalibrate"},
}
NETWORK_NAMES = {"eagle3": "an EAGLE-3 checkpoint", "dflash": "a DFlash checkpoint"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(_Section):
    """The target model and where it runs."""

    target: str | None = Field(
        default=None, description="a folder or a hub name; unset: the default agent"
    )
    adapter: str | None = Field(
        default=None, description="folder of a low-rank adapter, merged into the target at load"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: bfloat16 on a GPU, float32 on a CPU"
    )

    @field_validator("target")
    @classmethod
    def _named(cls, target: str | None) -> str | None:
        if target is not None and not target.strip():
            raise ValueError("expected a folder or a hub name; leave it out for the default model")
        return target

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device):
            raise ValueError("expected auto, cpu, cuda, cuda:N or mps")
        return device


class SamplingSection(_Section):
    """How tokens are chosen; ranges are those of `engine.request.SamplingParams`."""

    max_tokens: int = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: list[str] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    seed: int = Field(
        default=0, description="each row's own seed is a hash of this one and the row's id"
    )

    @model_validator(mode="after")
    def _ranges(self) -> SamplingSection:
        SamplingParams(**self.params())  # raises RequestError, a ValueError that names the field
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} has no effect without logprobs; set logprobs too"
            )
        return self

    def params(self) -> dict[str, Any]:
        """What every row of a run shares: all fields but `seed`, as `SamplingParams` names them."""
        return self.model_dump(exclude={"seed"})


class EngineSection(_Section):
    """How one engine decodes; none of it changes what is generated."""

    router: str = Field(
        default=AUTO_ROUTER,
        description=f"one of {', '.join(ROUTERS)}; auto: cost-aware if the target has neural "
        "drafters, else lookup",
    )
    concurrency: int = Field(default=8, ge=1, description="sequences decoded at once, per engine")
    recorded_drafts: bool = Field(
        default=True, description="lookup also drafts from the recorded turn that a row replays"
    )
    kv_tokens: int | None = Field(
        default=None, ge=64, description="token positions in the KV cache"
    )
    prefill_chunk: int = Field(default=256, ge=1, description="prompt tokens per step and sequence")

    @field_validator("router")
    @classmethod
    def _available_router(cls, router: str) -> str:
        if router in (AUTO_ROUTER, *ROUTERS):
            return router
        near = nearest(router, ROUTERS)
        known = ", ".join((AUTO_ROUTER, *ROUTERS))
        raise ValueError(f"there is no router of this name{near}; use one of {known}")


class DraftersSection(_Section):
    """The neural drafters: where their weights are, how they draft, when they catch up."""

    eagle3: str | None = Field(default=None, description="folder or hub name of an EAGLE-3 drafter")
    dflash: str | None = Field(default=None, description="folder or hub name of a DFlash drafter")
    eagle3_depth: int = Field(default=8, ge=1, description="levels of an EAGLE-3 tree")
    eagle3_top_k: int = Field(
        default=10, ge=1, description="nodes of a level that are expanded; 1 makes a chain"
    )
    eagle3_tokens: int = Field(default=60, ge=1, description="nodes of an EAGLE-3 tree")
    ddtree_nodes: int = Field(default=32, ge=1, description="nodes of a ddtree")
    max_draft_nodes: int = Field(
        default=64, ge=1, description="most drafted tokens verified per sequence and round"
    )
    catch_up: Literal["lazy", "eager"] = Field(
        default="lazy", description="lazy: a drafter catches up when it is chosen"
    )
    draft_prefill: Literal["kv-only", "full"] = Field(
        default="kv-only", description="what a drafter computes of tokens that it missed"
    )
    max_backlog: int = Field(
        default=512, ge=1, description="tokens that a drafter may miss before it catches up unasked"
    )

    @field_validator("eagle3", "dflash")
    @classmethod
    def _named(cls, drafter: str | None) -> str | None:
        if drafter is not None and not drafter.strip():
            raise ValueError("expected a folder or a hub name")
        return drafter

    def check_tree(self, arm: str) -> None:
        """Raises ValueError when the tree that `arm` drafts does not fit its bounds."""
        nodes = {"eagle3": "eagle3_tokens", "ddtree": "ddtree_nodes"}.get(arm)
        if nodes is not None and getattr(self, nodes) > self.max_draft_nodes:
            raise ValueError(
                f"{nodes}={getattr(self, nodes)} is more than max_draft_nodes="
                f"{self.max_draft_nodes}, which bounds what is verified; lower {nodes} "
                f"({option_name(nodes)}) or raise max_draft_nodes (--max-draft-nodes)"
            )
        if arm == "eagle3" and self.eagle3_top_k > self.eagle3_tokens:
            raise ValueError(
                f"eagle3_top_k={self.eagle3_top_k} is more than eagle3_tokens="
                f"{self.eagle3_tokens}: a level would be wider than the tree; lower it"
            )


class RoutingSection(_Section):
    """How the routers that choose between drafters choose."""

    entropy_threshold: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="nats above which router entropy takes eagle3; unset: as calibrated, else "
        f"{DEFAULT_ENTROPY}",
    )
    router_weights: str | None = Field(
        default=None, description="file of a trained router (routers neural and cost-aware)"
    )
    exploration: float = Field(
        default=0.006,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="share of time that router cost-aware may lose trying",
    )
    recalibrate: bool = Field(
        default=False, description="measure costs anew, though they are known for this machine"
    )
    verify_budget: Literal["auto", "all", "gain"] = Field(
        default="auto",
        description="gain: verify drafts as far as it pays; auto: gain with router cost-aware",
    )


class RunSection(_Section):
    """What a run does with its traces."""

    mode: Literal["replay", "continue"] = Field(
        default="replay", description="regenerate every assistant turn, or write the next one"
    )
    workers: int = Field(
        default=1, ge=0, description="Ray actors with one engine each; 0: this process"
    )
    limit: int | None = Field(default=None, ge=1, description="number of traces read")
    format: str | None = Field(
        default=None, description="trace format; unset: recognised by content"
    )
    rounds: bool = Field(default=False, description="rows carry one record per decoding round")


class Settings(_Section):
    """All settings of a run."""

    model: ModelSection = ModelSection()
    sampling: SamplingSection = SamplingSection()
    drafters: DraftersSection = DraftersSection()
    engine: EngineSection = EngineSection()
    routing: RoutingSection = RoutingSection()
    run: RunSection = RunSection()
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.run.workers > 0 and self.model.device.startswith("cuda:"):
            raise ValueError(
                f"device={self.model.device!r} picks a GPU by number, but with workers="
                f"{self.run.workers} Ray assigns the GPUs; use device cuda, or workers 0"
            )
        for arm in self.arms:
            self.drafters.check_tree(arm)
        for network in self.networks:
            if self.drafter(network) is None:
                raise ValueError(
                    f"router={self.router!r} drafts with {NETWORK_NAMES[network]}, and "
                    f"none is given; give its folder or hub name as {network} (--{network})"
                )
        if self.router == "neural" and self.router_weights("neural") is None:
            raise ValueError(
                "router='neural' needs a trained router; give its file as router_weights "
                "(--router-weights)"
            )
        return self

    @property
    def router(self) -> str:
        """The router's name, `auto` resolved."""
        if self.engine.router != AUTO_ROUTER:
            return self.engine.router
        neural = any(self.drafter(network) is not None for network in NETWORK_NAMES)
        return "cost-aware" if neural else "lookup"

    def drafter(self, network: str) -> str | None:
        """Folder or hub name of the drafter `eagle3` or `dflash`: the one given, or the default
        agent's own if that is the target; None if there is none."""
        given: str | None = getattr(self.drafters, network)
        if given is None and default_agent.is_meant(self.model.target, self.model.adapter):
            return str(default_agent.drafter(network))
        return given

    def router_weights(self, router: str) -> str | None:
        """The file of a trained router: the one given, or for the default agent with its own
        drafters the one that was trained for them; None if there is none."""
        if self.routing.router_weights is not None:
            return self.routing.router_weights
        own = default_agent.is_meant(self.model.target, self.model.adapter) and all(
            getattr(self.drafters, network) is None for network in NETWORK_NAMES
        )
        weights = default_agent.router_weights(router) if own else None
        return None if weights is None else str(weights)

    @property
    def arms(self) -> tuple[str, ...]:
        """The drafters that the router chooses from, `none` aside."""
        arms = ROUTER_ARMS[self.router]
        return self.available_arms() if arms is None else arms

    def available_arms(self) -> tuple[str, ...]:
        """Every drafter that the target has: those without a network, and those whose is there."""
        return tuple(
            arm
            for arm, network in ARM_NETWORKS.items()
            if network is None or self.drafter(network) is not None
        )

    @property
    def networks(self) -> tuple[str, ...]:
        """The drafting networks that the router needs: of `eagle3` and `dflash`."""
        needed = (ARM_NETWORKS[arm] for arm in self.arms)
        return tuple(dict.fromkeys(network for network in needed if network is not None))

    def unused_settings(self) -> list[str]:
        """Fields of `drafters` and `routing` that were set and have no effect with this router."""
        used = {"max_draft_nodes"} if self.arms else set()
        used = used.union(*(_ARM_FIELDS[arm] for arm in self.arms))
        if self.drafters.catch_up == "eager":
            used.discard("max_backlog")
        used |= _ROUTER_FIELDS.get(self.router, set())
        if self.arms:
            used.add("verify_budget")
        if self.routing.verify_budget == "gain":
            used.add("recalibrate")
        return sorted((self.drafters.model_fields_set | self.routing.model_fields_set) - used)

    def origin_of(self, field: str) -> str | None:
        """Who set `field`: the option, the environment variable or the line of the file, as the
        user knows it; None if nobody did."""
        return self._origins.get(field)

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Settings from flat field names: `Settings.of(router="lookup", max_tokens=64)`.

        Reads neither file nor environment. Raises `SettingsError` as `load_settings` does.
        """
        return load_settings(values, environment={}, spell=str)


def option_name(field: str) -> str:
    """The command-line spelling of a field: `max_tokens` -> `--max-tokens`."""
    return "--" + field.replace("_", "-")


def sections() -> dict[str, str]:
    """Field name -> section name, for every field of the tree."""
    return {
        name: section
        for section, info in Settings.model_fields.items()
        for name in info.annotation.model_fields  # type: ignore[union-attr]
    }


def load_settings(
    command_line: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    spell: Callable[[str], str] = option_name,
) -> Settings:
    """Merge command line over environment over TOML file over defaults.

    `command_line` maps field names to values; None means "not given". `environment` defaults to
    `os.environ`. `spell` turns a field name into what the caller wrote, for messages.

    Raises `SettingsError` for an unknown key, a value of the wrong type or out of range (the text
    says which source set it), or a file that cannot be read.
    """
    values: dict[tuple[str, str], Any] = {}
    origin: dict[tuple[str, str], str] = {}
    known = sections()

    def put(key: tuple[str, str], value: Any, source: str) -> None:
        values[key] = value
        origin[key] = source

    if config is not None:
        for (section, name), value in _read_toml(Path(config)).items():
            put((section, name), value, f"{config}: [{section}] {name}")
    for variable, text in sorted((os.environ if environment is None else environment).items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in known:
            near = nearest(name, known, spell=lambda field: ENVIRONMENT_PREFIX + field.upper())
            raise SettingsError(
                f"environment variable {variable} is not a setting{near}; "
                f"unset it or correct its name"
            )
        key = (known[name], name)
        put(key, _from_text(key, text, variable), f"environment variable {variable}")
    for name, value in (command_line or {}).items():
        if name not in known:
            raise SettingsError(f"{name!r} is not a setting{nearest(name, known)}")
        if value is not None:
            put((known[name], name), value, spell(name))

    tree: dict[str, dict[str, Any]] = {}
    for (section, name), value in values.items():
        tree.setdefault(section, {})[name] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error, origin)) from None
    settings._origins.update({name: source for (_, name), source in origin.items()})
    return settings


def nearest(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """`" (did you mean 'max_tokens'?)"`, or nothing when no known name is near.

    Near is what a slip of the hand makes of a name. `spell` turns it into what the user writes;
    what all names share (a prefix) belongs there, because it would make any two of them alike.
    """
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f" (did you mean {spell(match[0])!r}?)" if match else ""


def _read_toml(path: Path) -> dict[tuple[str, str], Any]:
    try:
        tree = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the settings: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a valid TOML file: {error}") from None
    known = sections()
    out: dict[tuple[str, str], Any] = {}
    for section, fields in tree.items():
        if section not in Settings.model_fields:
            hint = nearest(section, Settings.model_fields)
            if section in known:
                hint = f" ({section!r} belongs under [{known[section]}])"
            raise SettingsError(f"{path}: [{section}] is not a section of the settings{hint}")
        if not isinstance(fields, dict):
            raise SettingsError(f"{path}: {section!r} must be a section: [{section}]")
        for name, value in fields.items():
            if known.get(name) != section:
                hint = nearest(name, [field for field, home in known.items() if home == section])
                if name in known:
                    hint = f" (it belongs under [{known[name]}])"
                raise SettingsError(f"{path}: [{section}] {name} is not a setting{hint}")
            out[section, name] = value
    return out


def _from_text(key: tuple[str, str], text: str, variable: str) -> Any:
    """The value of an environment variable. Lists are written as JSON: '["###", "END"]'."""
    section, name = key
    annotation = Settings.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
    adapter: TypeAdapter[Any] = TypeAdapter(annotation.annotation)
    try:
        if annotation.annotation == list[str]:
            return adapter.validate_json(text)
        return adapter.validate_python(text)
    except ValidationError as error:
        expected = error.errors()[0]["msg"]
        if annotation.annotation == list[str]:
            expected = 'expected a JSON list of strings such as ["###"]'
        raise SettingsError(_refused(f"environment variable {variable}", text, expected)) from None


def _explain(error: ValidationError, origin: Mapping[tuple[str, str], str]) -> str:
    """The first problem in one sentence: where the value came from, the value, what is expected."""
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    place = tuple(str(part) for part in problem["loc"])
    if len(place) >= 2:
        source = origin.get((place[0], place[1]), f"{place[0]}.{place[1]}")
        return _refused(source, problem["input"], message)
    # A rule of a whole section: its message names the field; say where that field came from.
    message = _lower_first(message)
    named = re.match(r"(\w+)=", message)
    if named and (home := sections().get(named.group(1))):
        name = named.group(1)
        setter = origin.get((home, name))
        if setter:
            return f"{setter}: {message.removeprefix(f'{name}=')}"
    return message


def _refused(source: str, value: object, expected: str) -> str:
    return f"{source}: {value!r} is not valid: {_lower_first(expected)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
