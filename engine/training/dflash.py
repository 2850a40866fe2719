"""Training of DFlash on random blocks (Chen et al., 2602.06036, section 3).

Anchors are drawn among the positions of the responses anew for every pass over a text. Each is the
bonus token of a block `[bonus, MASK, ...]` that must say the tokens behind it; all blocks of a text
run in one forward, where each sees the context before its own anchor and itself. The tokens near
the anchor count most, as nothing behind a wrong one is accepted: `exp(-(k - 1) / gamma)` for the
k-th drafted token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..drafters.dflash_model import DFlashConfig, DFlashModel
from ..errors import SettingsError
from ..sampling import greedy
from ..target import Target
from .draft_attention import attend_drafts
from .draft_figures import draft_figures
from .head_loss import FrozenHead, Head, LossOf, head_loss, pieces, softmax
from .objective import Loss
from .vocabulary import draft_ids

if TYPE_CHECKING:
    from .feature_source import FeatureSource
    from .texts import TrainingText


@dataclass(slots=True)
class Anchors:
    """Where the blocks of one text begin.

    Attributes:
        positions: `[blocks]`, int64, of the bonus tokens; ascending.
        ends: `[blocks]`, int64, where each one's response ends.
    """

    positions: Tensor
    ends: Tensor

    def inside(self, depth: int) -> Tensor:
        """Bool `[blocks, depth]`: whether the token that a slot drafts is still in the response."""
        drafted = self.positions[:, None] + torch.arange(1, depth + 1)
        return drafted < self.ends[:, None]


def draw_anchors(text: TrainingText, most: int, generator: torch.Generator) -> Anchors:
    """Up to `most` anchors among the tokens of `text`'s responses, all but their last ones."""
    positions, ends = [], []
    for start, end in text.responses:
        positions.append(torch.arange(start, end - 1))
        ends.append(torch.full((end - 1 - start,), end))
    if not positions:
        return Anchors(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    every = torch.cat(positions)
    drawn = torch.randperm(len(every), generator=generator)[:most].sort().values
    return Anchors(every[drawn], torch.cat(ends)[drawn])


def default_gamma(block_size: int) -> float:
    """The paper's 4, 5 and 7 for blocks of 8, 10 and 16, and the straight lines through them."""
    if block_size <= 10:
        return max(1.0, block_size / 2)
    return 5.0 + (block_size - 10) / 3


class DFlashObjective:
    """The loss of a DFlash network on texts of its target.

    Args:
        network: to be trained; float32.
        target: its embedding and head are used as they are, unless the network has its own.
        source: of features; it must give the layers of `network.config.feature_layers`.
        anchors: most blocks of a text (the paper has 512 in 3,072 tokens).
        gamma: how fast the weights of drafted tokens fall; `default_gamma` where None.
        labels: what a slot must say: the text's token, or the target's likeliest. They are the same
            where the target wrote the text greedily.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        network: DFlashModel,
        target: Target,
        source: FeatureSource,
        *,
        anchors: int = 64,
        gamma: float | None = None,
        labels: Literal["text", "target"] = "text",
    ) -> None:
        if labels not in ("text", "target"):
            raise SettingsError(f"labels={labels!r}: expected 'text' or 'target'")
        self.network: nn.Module = network
        self.target, self.source = target, source
        self.labels = labels
        self.blocks = BlockTraining(network, target, anchors=anchors, gamma=gamma)

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss over blocks of `text`. A text without a response of two tokens or more has none,
        and weight 0."""
        blocks = self.blocks
        network = blocks.network
        anchors = draw_anchors(text, blocks.anchors, generator)
        if not len(anchors.positions):
            return Loss(network.norm.weight.sum() * 0.0, 0.0)
        found = self.source(text)
        tokens = found.token_ids
        features = torch.cat([found.features[i] for i in network.config.feature_layers], dim=-1)
        hidden = blocks.run(features, tokens, anchors.positions)
        inside = anchors.inside(hidden.shape[1])
        block, depth = (part.to(hidden.device) for part in inside.nonzero(as_tuple=True))
        positions = anchors.positions.to(hidden.device)[block] + depth + 1
        right = (
            tokens[positions] if self.labels == "text" else self._likeliest(found.hidden, positions)
        )
        labels = blocks.draft_ids(right)
        weights = blocks.weights(depth) * (labels >= 0)
        chosen: list[int] = []

        def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            chosen.extend(greedy(logits))
            wanted, weight = labels[rows, None].clamp(min=0), weights[rows, None]
            chances, normaliser = softmax(logits)
            losses = normaliser - logits.gather(1, wanted)
            gradient = chances.scatter_add_(1, wanted, -torch.ones_like(losses)).mul_(weight)
            return (losses * weight).sum(), gradient

        total = blocks.head_loss(hidden[block, depth], loss_of)
        correct = torch.zeros_like(inside)
        correct[inside] = torch.tensor(chosen) == labels.cpu()
        return Loss(total, float(weights.sum()), draft_figures(correct, inside))

    @torch.no_grad()
    def _likeliest(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The target's likeliest token at each of `positions`, which the one before says."""
        where, of_row = (positions - 1).unique(return_inverse=True)
        head = FrozenHead(self.target)
        best: list[int] = []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in pieces(len(where), self.target.vocab_size):
                best += greedy(head(hidden[where[part]]))
        return torch.tensor(best, device=hidden.device)[of_row]


class BlockTraining:
    """Blocks of one text, run together: what all objectives for DFlash networks share.

    Args:
        anchors, gamma: as in `DFlashObjective`.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(
        self, network: DFlashModel, target: Target, *, anchors: int, gamma: float | None
    ) -> None:
        if not isinstance(anchors, int) or anchors < 1:
            raise SettingsError(f"anchors={anchors!r}: expected an integer of at least 1")
        if gamma is not None and not gamma > 0.0:
            raise SettingsError(f"gamma={gamma!r}: expected a number above 0")
        self.network, self.target, self.anchors = network, target, anchors
        self.gamma = default_gamma(network.config.block_size) if gamma is None else gamma
        own = network.head
        self.head: Head = FrozenHead(target) if own is None else own
        self._trained = () if own is None else (own.lm_head.weight,)
        self._width = target.vocab_size if own is None else own.lm_head.out_features

    def run(self, features: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
        """All blocks in one forward, each as `DFlashModel.forward` computes it.

        Args:
            features, token_ids, anchors: as in `slots`.

        Returns:
            the final norm's output at the slots that draft, `[blocks, num_drafted, hidden]`.
        """
        config = self.network.config
        slots = self.slots(features, token_ids, anchors)
        output: Tensor = self.network.norm(slots[:, config.block_size - config.num_drafted :])
        return output

    def slots(self, features: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
        """The same before the final norm, at all slots.

        Args:
            features: `[tokens, layers * hidden]`, of the text.
            token_ids: `[tokens]`, the text.
            anchors: `[blocks]`, positions of the bonus tokens, each behind one token or more.

        Returns:
            `[blocks, block_size, hidden]`.
        """
        network, config = self.network, self.network.config
        count, size, length = len(anchors), config.block_size, int(anchors.max())
        device, dtype = token_ids.device, network.fc.weight.dtype
        anchors = anchors.to(device)
        rows = network.context(features[:length].to(dtype)).to(dtype)
        table = network.embed_tokens
        hidden = embedding(
            network.block_tokens(token_ids[anchors]).flatten(),
            self.target.embedding.detach() if table is None else table.weight,
        )
        hidden = hidden.to(dtype) * config.embedding_scale
        slots = torch.arange(size, device=device)
        before = network.rotary(torch.arange(length, device=device), dtype)
        within = network.rotary((anchors[:, None] + slots).flatten(), dtype)
        visible: dict[int | None, tuple[Tensor, Tensor | None]] = {}
        for index, layer in enumerate(network.decoder_layers()):
            window = config.layers.window(index)
            if window not in visible:
                visible[window] = blocks_visible(config, index, anchors)
            x = layer.input_layernorm(hidden)
            own = layer.self_attn.keys_values(x, within)
            attended = attend_drafts(
                layer.self_attn.queries(x, within).unflatten(0, (count, size)),
                layer.self_attn.keys_values(rows, before),
                (own[0].unflatten(1, (count, size)), own[1].unflatten(1, (count, size))),
                *visible[window],
            )
            hidden = layer.finish(attended.flatten(0, 1), hidden)
        return hidden.unflatten(0, (count, size))

    def logits(self, hidden: Tensor) -> Tensor:
        """`run`'s output -> logits over the drafter's vocabulary."""
        return self.network.scale_logits(self.head(hidden))

    def head_loss(self, hidden: Tensor, loss_of: LossOf) -> Tensor:
        """The sum of `loss_of` over the logits of `hidden` `[rows, hidden]`."""
        return head_loss(self.logits, hidden, loss_of, width=self._width, parameters=self._trained)

    def weights(self, depth: Tensor) -> Tensor:
        """Of drafted tokens, `depth` counting from 0."""
        return torch.exp(-depth.to(torch.float32) / self.gamma)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Ids in the drafter's vocabulary of target tokens, -1 for those outside."""
        own = self.network.head
        if own is None or own.d2t is None:
            return target_ids
        return draft_ids(own.d2t, self.target.vocab_size).to(target_ids.device)[target_ids]


def blocks_visible(
    config: DFlashConfig, layer: int, anchors: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What `block_visible` says for one block, for all of them: bool over the context,
    `[blocks, block_size or 1, max anchor]`, and over the block itself, `[block_size, block_size]`
    or None for everything.

    What a slot sees of the context depends on how far before the anchor it is, and on nothing else.
    """
    length = int(anchors.max())
    rows = torch.arange(length, device=anchors.device)
    before = rows < anchors[:, None]
    alone = config.block_visible(layer, 0)
    longest = config.block_visible(layer, length)
    if alone is None or longest is None:
        return before[:, None], None
    distance = anchors[:, None] - rows  # [blocks, length]
    column = (length - distance).clamp(0, length - 1)
    seen = longest.to(anchors.device)[:, column].transpose(0, 1)  # [blocks, block_size, length]
    return seen & before[:, None], alone.to(anchors.device)
