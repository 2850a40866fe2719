"""The heads that can be trained on top of a DFlash drafter, in the shape of `drafter_kinds.py`.

What comes of either is the whole drafter with its head, in a folder of its own: the drafter that it
began with stays as it is, and the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whiflash_agents.drafter_kinds import Family, Kind, NewNetwork
from whiflash_agents.engine.errors import SettingsError

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.drafters.base import Drafter
    from whiflash_agents.engine.target import Target
    from whiflash_agents.engine.training.feature_source import FeatureSource
    from whiflash_agents.engine.training.objective import Objective
    from whiflash_agents.engine.training.texts import TrainingText
    from whiflash_agents.settings import DraftersSection

PLAIN = "dflash-plain"  # the drafter that a head was trained for, beside it with the head


class HeadOptions:
    """What both heads share."""

    __slots__ = ()

    @property
    def family(self) -> Family:
        return "dflash"

    def check(self, begin: NewNetwork) -> None:
        if begin.init is None:
            raise SettingsError("there is no drafter to train a head for; name one (--dflash)")
        if begin.warm_start is not None:
            raise SettingsError("warm_start: a head begins with random weights; leave this out")

    def longest_text(self, network: Any, target: Target) -> int:
        return target.max_context

    def save(self, network: Any, folder: Path) -> None:
        from whiflash_agents.engine.checkpoints import save_dflash

        save_dflash(network, folder)

    def _load(self, begin: NewNetwork, target: Target) -> Any:
        """The drafter, which must be one that can be written again."""
        from whiflash_agents.engine.checkpoints import dflash_layout, load_dflash

        assert begin.init is not None  # `check` ran
        drafter = load_dflash(begin.init, target)
        dflash_layout(drafter)
        return drafter


@dataclass(frozen=True, slots=True)
class LocalHeadOptions(HeadOptions):
    """A local head (DeLS-Spec, 2607.07409).

    Attributes:
        state_size, rank: its sizes.
        weight, unigram_weight: what its logits and the frequencies of tokens count.
        anchors: most windows of a text in one step.
    """

    state_size: int = 128
    rank: int = 64
    weight: float = 0.3
    unigram_weight: float = 0.3
    anchors: int = 64

    @property
    def kind(self) -> Kind:
        return "local-head"

    @property
    def reads_source(self) -> bool:
        return False

    def new_network(
        self, target: Target, texts: Sequence[TrainingText], chat: Chat, begin: NewNetwork
    ) -> Any:
        from whiflash_agents.engine.drafters.local_head import LocalHeadConfig
        from whiflash_agents.engine.training.local_head import new_local_head

        drafter = self._load(begin, target)
        config = LocalHeadConfig(
            target.hidden_size,
            target.vocab_size,
            drafter.config.num_drafted,
            self.state_size,
            self.rank,
            self.weight,
            self.unigram_weight,
        )
        drafter.local_head = new_local_head(config, target, texts, seed=begin.seed)
        return drafter

    def new_objective(self, network: Any, target: Target, source: FeatureSource) -> Objective:
        from whiflash_agents.engine.training.local_head import LocalHeadObjective

        return LocalHeadObjective(network.local_head, target, anchors=self.anchors)

    def identity(self) -> dict[str, Any]:
        names = ("state_size", "rank", "weight", "unigram_weight", "anchors")
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @property
    def follows_texts(self) -> tuple[str, ...]:
        return ("begin",)  # the head begins with the frequencies of tokens

    def drafters(
        self, folder: Path, target: Target, settings: DraftersSection
    ) -> dict[str, Drafter]:
        return _with_and_without(folder, target, "local_head")


@dataclass(frozen=True, slots=True)
class LengthHeadOptions(HeadOptions):
    """AdaFlash's adaptive length head (2607.19223).

    Attributes:
        bottleneck: its inner width.
        anchors: most blocks of a text in one step.
    """

    bottleneck: int = 256
    anchors: int = 64

    @property
    def kind(self) -> Kind:
        return "length-head"

    @property
    def reads_source(self) -> bool:
        return True

    def new_network(
        self, target: Target, texts: Sequence[TrainingText], chat: Chat, begin: NewNetwork
    ) -> Any:
        from whiflash_agents.engine.training.length_head import new_length_head

        drafter = self._load(begin, target)
        drafter.length_head = new_length_head(
            drafter, target, bottleneck=self.bottleneck, seed=begin.seed
        )
        return drafter

    def new_objective(self, network: Any, target: Target, source: FeatureSource) -> Objective:
        from whiflash_agents.engine.training.length_head import LengthHeadObjective

        return LengthHeadObjective(
            network.length_head, network, target, source, anchors=self.anchors
        )

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "bottleneck": self.bottleneck, "anchors": self.anchors}

    @property
    def follows_texts(self) -> tuple[str, ...]:
        return ()

    def drafters(
        self, folder: Path, target: Target, settings: DraftersSection
    ) -> dict[str, Drafter]:
        return _with_and_without(folder, target, "length_head")


def heads_of(network: Any) -> tuple[str, ...]:
    """The heads that a network has: of `local head` and `length head`."""
    names = ("local_head", "length_head")
    return tuple(n.replace("_", " ") for n in names if getattr(network, n, None) is not None)


def _with_and_without(folder: Path, target: Target, head: str) -> dict[str, Drafter]:
    """The chain as the drafter in `folder` drafts it, and without `head`."""
    from whiflash_agents.engine.checkpoints import load_dflash
    from whiflash_agents.engine.drafters.dflash import DFlashContext, DFlashDrafter

    plain = load_dflash(folder, target)
    setattr(plain, head, None)
    context = DFlashContext(plain)
    context.name = PLAIN  # keys and values of its own
    return {"dflash": DFlashDrafter(load_dflash(folder, target)), PLAIN: DFlashDrafter(context)}
