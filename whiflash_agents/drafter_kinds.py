"""The kinds of drafter that can be trained: what is particular to each, behind one shape.

`Eagle3Options` and `DFlashOptions` say what was asked for; each makes its network and its objective
from the engine's parts, writes it in its public layout, and builds the arms that draft with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from whiflash_agents.engine.errors import SettingsError

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.drafters.base import Drafter
    from whiflash_agents.engine.target import Target
    from whiflash_agents.engine.training.feature_source import FeatureSource
    from whiflash_agents.engine.training.objective import Objective
    from whiflash_agents.engine.training.texts import TrainingText
    from whiflash_agents.settings import DraftersSection

DRAFT_VOCABULARY = 16_000
BLOCK_SIZE = 8
NUM_LAYERS = 3

Family = Literal["eagle3", "dflash"]
Kind = Literal["eagle3", "dflash", "local-head", "length-head"]


@dataclass(frozen=True, slots=True)
class NewNetwork:
    """How a network begins.

    Attributes:
        init: folder of a drafter to go on from, which has sizes of its own.
        warm_start: begin with weights of the target; None is yes, unless there is an `init`.
        seed: of weights that begin at random.
    """

    init: Path | None = None
    warm_start: bool | None = None
    seed: int = 0

    @property
    def warms(self) -> bool:
        return self.init is None and self.warm_start is not False

    def told_of(self, network: Any) -> str:
        """How `network` began, to tell one beginning from another; asked before it is trained."""
        from whiflash_agents.engine.training.identity import network_fingerprint

        if self.init is not None:
            return f"drafter {network_fingerprint(network)}"
        return "warm start" if self.warms else "random weights"


class KindOptions(Protocol):
    """A kind of drafter, and what was asked of it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def family(self) -> Family:
        """What kind of drafter it is, or is for."""

    @property
    def reads_source(self) -> bool:
        """Whether its objective takes features from a source; otherwise it makes its own."""

    def check(self, begin: NewNetwork) -> None:
        """Refuse options that contradict one another, before anything is loaded.

        Raises:
            SettingsError: naming them.
        """

    def new_network(
        self, target: Target, texts: Sequence[TrainingText], chat: Chat, begin: NewNetwork
    ) -> Any:
        """The network to train: float32, with gradients, on the target's device. Without texts it
        is made all the same, to see whether it can be.

        Args:
            texts: that it is trained on.

        Raises:
            SettingsError, UnsupportedTargetError, CheckpointError: it cannot be made as asked for.
        """

    def new_objective(self, network: Any, target: Target, source: FeatureSource) -> Objective:
        """What it is trained by."""

    def longest_text(self, network: Any, target: Target) -> int:
        """Tokens of the longest text that the objective can take."""

    def identity(self) -> dict[str, Any]:
        """What of the options decides what is learnt, beside the network's own shape."""

    @property
    def follows_texts(self) -> tuple[str, ...]:
        """What of a training's identity depends on the texts, and is not known before them: names,
        dotted."""

    def save(self, network: Any, folder: Path) -> None:
        """Write `network` in its public layout."""

    def drafters(
        self, folder: Path, target: Target, settings: DraftersSection
    ) -> dict[str, Drafter]:
        """The arms that draft with the drafter in `folder`."""


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """An EAGLE-3 drafter.

    Attributes:
        draft_vocab: tokens that it knows; `DRAFT_VOCABULARY`, or the target's if it has fewer,
            where None.
        feature_layers: hidden states that it reads; the paper's where None.
        steps: of training-time test.
        decay: what each step counts, as a share of the one before.
    """

    draft_vocab: int | None = None
    feature_layers: tuple[int, ...] | None = None
    steps: int = 7
    decay: float = 0.8

    @property
    def kind(self) -> Kind:
        return "eagle3"

    @property
    def family(self) -> Family:
        return "eagle3"

    @property
    def reads_source(self) -> bool:
        return True

    def check(self, begin: NewNetwork) -> None:
        given = {"draft_vocab": self.draft_vocab, "feature_layers": self.feature_layers}
        _refuse_beside_init(begin, given)

    def new_network(
        self, target: Target, texts: Sequence[TrainingText], chat: Chat, begin: NewNetwork
    ) -> Any:
        from whiflash_agents.engine.checkpoints import load_eagle3
        from whiflash_agents.engine.training.new_drafter import new_eagle3
        from whiflash_agents.engine.training.vocabulary import choose_vocabulary
        from whiflash_agents.engine.training.warm_start import warm_start_eagle3

        if begin.init is not None:
            return load_eagle3(begin.init, target).float().requires_grad_(True)
        size = self.draft_vocab
        if size is None:
            size = min(DRAFT_VOCABULARY, target.vocab_size)
        ends = {token for token in _ends(chat) if token < target.vocab_size}
        network = new_eagle3(
            target,
            choose_vocabulary(texts, size, target.vocab_size, always=ends),
            feature_layers=self.feature_layers,
            seed=begin.seed,
        )
        if begin.warms:
            warm_start_eagle3(network, target)
        return network

    def new_objective(self, network: Any, target: Target, source: FeatureSource) -> Objective:
        from whiflash_agents.engine.training.eagle3 import Eagle3Objective

        return Eagle3Objective(network, target, source, steps=self.steps, decay=self.decay)

    def longest_text(self, network: Any, target: Target) -> int:
        return target.max_context

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "steps": self.steps, "decay": self.decay}

    @property
    def follows_texts(self) -> tuple[str, ...]:
        return ()

    def save(self, network: Any, folder: Path) -> None:
        from whiflash_agents.engine.checkpoints import save_eagle3

        save_eagle3(network, folder)

    def drafters(
        self, folder: Path, target: Target, settings: DraftersSection
    ) -> dict[str, Drafter]:
        from whiflash_agents.engine.checkpoints import load_eagle3
        from whiflash_agents.engine.drafters.registry import neural_drafters

        return neural_drafters(
            eagle3=load_eagle3(folder, target),
            eagle3_depth=settings.eagle3_depth,
            eagle3_top_k=settings.eagle3_top_k,
            eagle3_tokens=settings.eagle3_tokens,
        )


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """A DFlash drafter.

    Attributes:
        block_size: slots of a block, the bonus token's included; `BLOCK_SIZE` where None.
        num_layers: its decoder layers; `NUM_LAYERS` where None.
        feature_layers: hidden states that it reads; z-lab's spacing where None.
        mask_token: what fills the other slots; found in the vocabulary where None.
        objective: `standard` learns from the texts, `on-policy` from what the network itself
            drafts along them (AdaFlash, 2607.19223).
        anchors: most blocks of a text in one step.
        gamma: how fast the weights of later slots fall; the paper's where None.
    """

    block_size: int | None = None
    num_layers: int | None = None
    feature_layers: tuple[int, ...] | None = None
    mask_token: int | None = None
    objective: Literal["standard", "on-policy"] = "standard"
    anchors: int = 64
    gamma: float | None = None

    @property
    def kind(self) -> Kind:
        return "dflash"

    @property
    def family(self) -> Family:
        return "dflash"

    @property
    def reads_source(self) -> bool:
        return self.objective == "standard"

    def check(self, begin: NewNetwork) -> None:
        names = ("block_size", "num_layers", "feature_layers", "mask_token")
        _refuse_beside_init(begin, {name: getattr(self, name) for name in names})

    def new_network(
        self, target: Target, texts: Sequence[TrainingText], chat: Chat, begin: NewNetwork
    ) -> Any:
        from whiflash_agents.engine.checkpoints import load_dflash
        from whiflash_agents.engine.training.new_drafter import choose_mask_token, new_dflash
        from whiflash_agents.engine.training.warm_start import warm_start_dflash

        if begin.init is not None:
            network = load_dflash(begin.init, target)
            # They were trained for the drafter as it was.
            network.local_head = network.length_head = None
            return network.float().requires_grad_(True)
        mask = self.mask_token
        if mask is None:
            used = {token for text in texts for token in text.token_ids}
            mask = choose_mask_token(
                target,
                chat.tokenizer.get_added_vocab(),
                num_tokens=len(chat.tokenizer),
                used=used | _ends(chat),
            )
        network = new_dflash(
            target,
            block_size=BLOCK_SIZE if self.block_size is None else self.block_size,
            num_layers=NUM_LAYERS if self.num_layers is None else self.num_layers,
            mask_token_id=mask,
            feature_layers=self.feature_layers,
            seed=begin.seed,
        )
        if begin.warms:
            warm_start_dflash(network, target)
        return network

    def new_objective(self, network: Any, target: Target, source: FeatureSource) -> Objective:
        from whiflash_agents.engine.training.dflash import DFlashObjective
        from whiflash_agents.engine.training.on_policy import OnPolicyDFlashObjective

        if self.objective == "on-policy":
            return OnPolicyDFlashObjective(network, target, anchors=self.anchors, gamma=self.gamma)
        return DFlashObjective(network, target, source, anchors=self.anchors, gamma=self.gamma)

    def longest_text(self, network: Any, target: Target) -> int:
        # The teacher goes on behind the network's own blocks.
        room = 0 if self.reads_source else network.config.block_size
        return target.max_context - room

    def identity(self) -> dict[str, Any]:
        names = ("objective", "anchors", "gamma")
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @property
    def follows_texts(self) -> tuple[str, ...]:
        return () if self.mask_token is not None else ("network.mask_token_id",)

    def save(self, network: Any, folder: Path) -> None:
        from whiflash_agents.engine.checkpoints import save_dflash

        save_dflash(network, folder)

    def drafters(
        self, folder: Path, target: Target, settings: DraftersSection
    ) -> dict[str, Drafter]:
        from whiflash_agents.engine.checkpoints import load_dflash
        from whiflash_agents.engine.drafters.registry import neural_drafters

        return neural_drafters(
            dflash=load_dflash(folder, target), ddtree_nodes=settings.ddtree_nodes
        )


def describe(network: Any) -> dict[str, Any]:
    """A drafter's configuration and the number of weights that are trained, as JSON takes it."""
    count = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return {"weights": count, **asdict(network.config)}


def draft_coverage(network: Any, texts: Sequence[TrainingText]) -> float | None:
    """Share of the response tokens of `texts` that a drafter can say; None if that is all tokens
    of the target, or there are no responses."""
    from whiflash_agents.engine.training.vocabulary import coverage

    d2t = None if network.head is None else network.head.d2t
    return None if d2t is None else coverage(d2t, texts)


def _ends(chat: Chat) -> set[int]:
    return {token for token in chat.end_token_ids if isinstance(token, int)}


def _refuse_beside_init(begin: NewNetwork, options: Mapping[str, Any]) -> None:
    """A drafter that is gone on with has its sizes: other ones would be ignored."""
    if begin.init is None:
        return
    given = [name for name, value in options.items() if value is not None]
    if begin.warm_start:
        given.append("warm_start")
    if given:
        raise SettingsError(
            f"{', '.join(given)} cannot be given with init={str(begin.init)!r}: a drafter that is "
            "gone on with is as it is. Leave out one or the other"
        )
