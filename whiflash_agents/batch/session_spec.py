"""What a session is built from: `SessionSpec`, which travels to other processes, and the `Models`
that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.devices import pick_device
from whiflash_agents.settings import DraftersSection, RoutingSection, Settings

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.target import Target
    from whiflash_agents.models import ModelFiles


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """All that is needed to build a session in another process. Weights are read from `path`.

    `threads` is the number of CPU threads torch may use; None leaves torch's own choice.
    `threshold_from` is who set the entropy threshold, as the user knows it.
    """

    path: Path
    name: str
    chat_template: str | None
    response_template: dict[str, Any] | None
    device: str
    dtype: str
    router: str
    concurrency: int
    kv_tokens: int | None
    prefill_chunk: int
    recorded_drafts: bool
    rounds: bool
    threads: int | None = None
    drafters: DraftersSection = field(default_factory=DraftersSection)
    drafter_paths: dict[str, Path] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    routing: RoutingSection = field(default_factory=RoutingSection)
    adapter: Path | None = None
    threshold_from: str | None = None

    @classmethod
    def of(
        cls, settings: Settings, model: ModelFiles, drafters: Mapping[str, Path] | None = None
    ) -> SessionSpec:
        """The session that `settings` ask for, with the weights found at `model` and those of the
        networks that the router drafts with at `drafters`."""
        return cls(
            path=model.path.absolute(),  # an actor may stand in another folder
            name=model.name,
            chat_template=model.chat_template,
            response_template=model.response_template,
            device=settings.model.device,
            dtype=settings.model.dtype,
            router=settings.router,
            concurrency=settings.engine.concurrency,
            kv_tokens=settings.engine.kv_tokens,
            prefill_chunk=settings.engine.prefill_chunk,
            recorded_drafts=settings.engine.recorded_drafts,
            rounds=settings.run.rounds,
            drafters=settings.drafters,
            drafter_paths={name: path.absolute() for name, path in (drafters or {}).items()},
            arms=settings.arms,
            routing=settings.routing.model_copy(
                update={"router_weights": settings.router_weights(settings.router)}
            ),
            adapter=model.adapter,
            threshold_from=settings.origin_of("entropy_threshold"),
        )


@dataclass(slots=True)
class Models:
    """What is loaded from disk, for one session or for several over the same weights."""

    target: Target
    chat: Chat
    networks: dict[str, Any]
    machine: dict[str, Any]

    @classmethod
    def load(cls, spec: SessionSpec) -> Models:
        """Load target, chat format and drafting networks. Raises what `Target.load`, `Chat` and the
        checkpoints raise."""
        import torch

        from whiflash_agents.chat import Chat
        from whiflash_agents.engine import Target
        from whiflash_agents.engine.checkpoints import load_dflash, load_eagle3

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        device, dtype = pick_device(spec.device, spec.dtype)
        target = Target.load(spec.path, device=device, dtype=dtype, adapter=spec.adapter)
        loaders = {"eagle3": load_eagle3, "dflash": load_dflash}
        return cls(
            target,
            Chat.from_pretrained(
                spec.path,
                chat_template=spec.chat_template,
                response_template=spec.response_template,
            ),
            {name: loaders[name](path, target) for name, path in spec.drafter_paths.items()},
            {"device": device, "dtype": dtype, "threads": torch.get_num_threads()},
        )

    def identity(self) -> dict[str, str]:
        """What tells the weights of target and networks from others, whatever their folders are
        called."""
        from whiflash_agents.engine.training.identity import network_identity

        parts = {"target": self.target.model, **self.networks}
        return {part: network_identity(network) for part, network in parts.items()}
