"""Training of DFlash on its own drafts (AdaFlash, 2607.19223).

Trained on texts alone, a block drafter never meets what follows a token of its own that the text
does not have. Here it drafts a block at every anchor, and the target, its teacher, says what it
would say behind each drafted token. The loss of a slot is half cross-entropy to the teacher's
likeliest token and half the reverse divergence, KL(student || teacher), which is cheap only where
the teacher finds likely what the student says.

The teacher reads all blocks of a text in one forward behind the text itself, each block seeing the
text before its anchor and itself: a tree of chains, as the engine verifies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..attention import PackedRow
from ..drafters.dflash_model import DFlashModel
from ..errors import ContextLengthError, SettingsError
from ..kv_cache import GRANULE, KVCache
from ..sampling import greedy
from ..target import Target, TargetBatch
from .dflash import BlockTraining, draw_anchors
from .draft_figures import draft_figures
from .head_loss import pieces, precise, softmax
from .objective import Loss

if TYPE_CHECKING:
    from .texts import TrainingText


class OnPolicyDFlashObjective:
    """The loss of a DFlash network on what it drafts along texts of its target.

    Features come from the same forward that the teacher goes on from, so there is no source of
    features to give.

    Args:
        network: to be trained; float32. It should draft sensibly already.
        target: the teacher; its embedding and head are used as they are, unless the network has its
            own.
        anchors: most blocks of a text.
        gamma: how fast the weights of drafted tokens fall; `default_gamma` where None.
        divergence: the share of KL(student || teacher), the rest being cross-entropy.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        network: DFlashModel,
        target: Target,
        *,
        anchors: int = 32,
        gamma: float | None = None,
        divergence: float = 0.5,
    ) -> None:
        if not 0.0 <= divergence <= 1.0:
            raise SettingsError(f"divergence={divergence!r}: expected a share from 0 to 1")
        self.network: nn.Module = network
        self.target, self.divergence = target, divergence
        self.blocks = BlockTraining(network, target, anchors=anchors, gamma=gamma)
        self._cache: KVCache | None = None

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss over blocks of `text`. A text without a response of two tokens or more has none,
        and weight 0. Slots that draft beyond the response do not count.

        Raises:
            ContextLengthError: text and block are longer than the target's context.
        """
        blocks = self.blocks
        network = blocks.network
        anchors = draw_anchors(text, blocks.anchors, generator)
        if not len(anchors.positions):
            return Loss(network.norm.weight.sum() * 0.0, 0.0)
        tokens = torch.tensor(text.token_ids, device=self.target.device)
        features = self._read(text, int(anchors.positions[-1]))
        hidden = blocks.run(features, tokens, anchors.positions)
        drafted = self._draft(hidden)
        teacher = self._teach(text, anchors.positions.tolist(), drafted.tolist())

        inside = anchors.inside(hidden.shape[1])
        block, depth = (part.to(hidden.device) for part in inside.nonzero(as_tuple=True))
        said = teacher[block * hidden.shape[1] + depth]
        labels = blocks.draft_ids(torch.tensor(greedy(said), device=said.device))
        known = (
            None
            if network.head is None
            else network.head.target_ids(
                torch.arange(network.head.lm_head.out_features, device=said.device)
            )
        )
        weights = blocks.weights(depth) * (labels >= 0)
        share = self.divergence

        def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            wanted, weight = labels[rows, None].clamp(min=0), weights[rows, None]
            student, normaliser = softmax(logits)
            entropy = normaliser - logits.gather(1, wanted)
            reference = said[rows] if known is None else said[rows].index_select(1, known)
            ratio = (logits - normaliser) - precise(reference).log_softmax(-1)
            divergence = (student * ratio).sum(-1, keepdim=True)
            # d KL / d logits = student * (ratio - KL); d CE / d logits = student - one-hot.
            gradient = student * (share * (ratio - divergence) + (1.0 - share))
            gradient.scatter_add_(1, wanted, torch.full_like(entropy, share - 1.0))
            losses = share * divergence + (1.0 - share) * entropy
            return (losses * weight).sum(), gradient.mul_(weight)

        total = blocks.head_loss(hidden[block, depth], loss_of)
        correct = torch.zeros_like(inside)
        correct[inside] = (blocks.draft_ids(drafted[block, depth]) == labels).cpu()
        return Loss(total, float(weights.sum()), draft_figures(correct, inside))

    @torch.no_grad()
    def _draft(self, hidden: Tensor) -> Tensor:
        """What the network says at `hidden` `[blocks, slots, hidden]`, as target tokens."""
        flat, own = hidden.flatten(0, 1), self.blocks.network.head
        best: list[int] = []
        for part in pieces(len(flat), self.target.vocab_size):
            best += greedy(self.blocks.logits(flat[part]))
        ids = torch.tensor(best, device=hidden.device).view(hidden.shape[:2])
        return ids if own is None else own.target_ids(ids)

    def _read(self, text: TrainingText, length: int) -> Tensor:
        """Run the target over the first `length` tokens, whose keys and values stay; features
        `[length, layers * hidden]`."""
        config = self.blocks.network.config
        room = self.blocks.anchors * config.num_drafted
        if length + config.block_size > self.target.max_context:
            raise ContextLengthError(
                f"text {text.id!r}: a block of {config.block_size} behind {length} tokens exceeds "
                f"the context of target {self.target.name} ({self.target.max_context}); leave the "
                "text out or shorten it"
            )
        if self._cache is None or self._cache.positions < length + room:
            self._cache = None  # before the larger one is taken
            self._cache = self.target.new_cache(-(-(length + room) // GRANULE) * GRANULE)
        batch = TargetBatch()
        row = PackedRow(0, 0, length)
        batch.add(row, text.token_ids[:length], range(length), logits_from=length - 1)
        layers = config.feature_layers
        with torch.autocast(self.target.device.type, enabled=False):
            output = self.target.forward(batch, self._cache, capture=tuple(sorted(set(layers))))
        return torch.cat([output.features[layer] for layer in layers], dim=-1).clone()

    def _teach(self, text: TrainingText, anchors: list[int], drafted: list[list[int]]) -> Tensor:
        """The target's logits behind every token of the blocks but the last, in their order,
        `[blocks * num_drafted, vocab]`: what a slot should have said."""
        assert self._cache is not None  # `_read` ran
        length, depth = anchors[-1], len(drafted[0])
        token_ids: list[int] = []
        positions: list[int] = []
        for anchor, draft in zip(anchors, drafted, strict=True):
            token_ids += [text.token_ids[anchor], *draft[:-1]]
            positions += range(anchor, anchor + depth)
        begins = torch.tensor(anchors).repeat_interleave(depth)
        block = torch.arange(len(token_ids)) // depth
        before = torch.arange(length) < begins[:, None]
        within = (block[:, None] == block).tril()
        row = PackedRow(
            0,
            length,
            len(token_ids),
            tree=torch.cat((before, within), dim=1),
            tail_positions=torch.cat((torch.arange(length), torch.tensor(positions))),
        )
        batch = TargetBatch()
        batch.add(row, token_ids, positions, logits_from=0)
        with torch.autocast(self.target.device.type, enabled=False):
            output = self.target.forward(batch, self._cache)
        return output.logits.clone()
