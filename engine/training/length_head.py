"""Training of AdaFlash's adaptive length head (2607.19223): how much of a block will be right.

Blocks at random anchors, as in `dflash.py`, drafted by a drafter that stays as it is. The label of
a block is the share that its greedy draft has right, from the beginning on; what a response does
not reach counts as wrong, since nothing is accepted behind its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..drafters.candidates import Coupling
from ..drafters.dflash_model import DFlashModel
from ..drafters.length_head import LengthHead, predicted, share_of, worth_verifying
from ..drafters.local_chain import draft_chains
from ..errors import SettingsError
from ..sampling import greedy
from ..target import Target
from .dflash import BlockTraining, draw_anchors
from .head_loss import pieces
from .objective import Loss

if TYPE_CHECKING:
    from .feature_source import FeatureSource
    from .texts import TrainingText


def new_length_head(
    drafter: DFlashModel, target: Target, *, bottleneck: int = 256, seed: int = 0
) -> LengthHead:
    """A length head with random weights for `drafter`, in float32 on the target's device, with
    gradients.

    Raises:
        SettingsError: a width below 1.
    """
    if not isinstance(bottleneck, int) or bottleneck < 1:
        raise SettingsError(f"bottleneck={bottleneck!r}: expected an integer of at least 1")
    generator = torch.Generator().manual_seed(seed)
    head = LengthHead(drafter.config.layers.hidden_size, bottleneck)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                bound = parameter.shape[1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                parameter.zero_()
    return head.to(target.device)


class LengthHeadObjective:
    """The loss of a length head: cross-entropy between the share it predicts and the true one.

    Figures: `acceptance_length`, what the drafter's blocks really have (bonus token included);
    `length_error`, mean distance of the prediction from it, as a share of the block;
    `verification_saved`, drafted tokens that a plain cut would not verify; `tokens_lost`, accepted
    ones among these, as a share of all accepted ones.

    Args:
        network: to be trained; float32.
        drafter: whose blocks it is to judge; it is not changed. Its local head, if it has one,
            corrects them first.
        target: of the drafter.
        source: of features; it must give the layers of `drafter.config.feature_layers`.
        anchors: most blocks of a text.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(
        self,
        network: LengthHead,
        drafter: DFlashModel,
        target: Target,
        source: FeatureSource,
        *,
        anchors: int = 64,
    ) -> None:
        self.network: nn.Module = network
        self.head, self.drafter, self.target, self.source = network, drafter, target, source
        self.blocks = BlockTraining(drafter, target, anchors=anchors, gamma=None)

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss over blocks of `text`. A text without a response of two tokens or more has none,
        and weight 0."""
        anchors = draw_anchors(text, self.blocks.anchors, generator)
        if not len(anchors.positions):
            return Loss(self.head.out.weight.sum() * 0.0, 0.0)
        config = self.drafter.config
        with torch.no_grad():
            found = self.source(text)
            features = torch.cat([found.features[i] for i in config.feature_layers], dim=-1)
            slots = self.drafter.norm(
                self.blocks.slots(features, found.token_ids, anchors.positions)
            )
            drafted = self._draft(slots, found.token_ids, anchors.positions)
            inside = anchors.inside(config.num_drafted)
            behind = anchors.positions[:, None] + torch.arange(1, config.num_drafted + 1)
            said = found.token_ids.cpu()[behind.clamp(max=len(found.token_ids) - 1)]
            right = (drafted.cpu() == said) & inside
            accepted = right.long().cumprod(1).sum(1).to(slots.device)
        logits = self.head(slots).float()
        share = share_of(accepted.float(), config.num_drafted)
        with torch.autocast(logits.device.type, enabled=False):
            total = binary_cross_entropy_with_logits(logits, share, reduction="sum")
        figures = self._figures(logits.detach(), accepted, inside)
        return Loss(total, float(len(logits)), figures)

    def _draft(self, slots: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
        """What the drafter says greedily: target tokens, `[blocks, num_drafted]`."""
        drafter, config = self.drafter, self.drafter.config
        drafting = slots[:, config.block_size - config.num_drafted :]
        anchors, depth = anchors.to(slots.device), config.num_drafted
        own, local = drafter.head, drafter.local_head
        width = self.target.vocab_size if own is None else own.lm_head.out_features

        def target_ids(ids: Tensor) -> Tensor:
            return ids if own is None else own.target_ids(ids)

        best: list[int] = []
        for part in pieces(len(drafting), width * depth):
            logits = self.blocks.logits(drafting[part].flatten(0, 1))
            if local is None:
                ids = torch.tensor(greedy(logits), device=logits.device)
                best += target_ids(ids).tolist()
                continue
            rows = anchors[part].repeat_interleave(depth)
            chains = draft_chains(
                local,
                self.target.embedding,
                token_ids[anchors[part]],
                logits,
                [depth] * len(anchors[part]),
                rows,
                Coupling(torch.zeros(len(rows), device=rows.device), rows, sampled=False),
                target_ids,
                scored=False,
            )
            best += chains[0]
        return torch.tensor(best).view(-1, depth)

    def _figures(
        self, logits: Tensor, accepted: Tensor, inside: Tensor
    ) -> dict[str, tuple[float, float]]:
        most = self.drafter.config.num_drafted
        lengths = predicted(logits, most).tolist()
        true, drafted = accepted.tolist(), inside.sum(1).tolist()
        kept = [min(depth, worth_verifying(x)) for x, depth in zip(lengths, drafted, strict=True)]
        count, slots = float(len(true)), float(sum(drafted))
        off = sum(abs(x - y) for x, y in zip(lengths, true, strict=True)) / (most + 1)
        lost = sum(max(0, y - k) for y, k in zip(true, kept, strict=True))
        return {
            "acceptance_length": (sum(true) + count, count),
            "length_error": (off, count),
            "verification_saved": (slots - sum(kept), slots),
            "tokens_lost": (float(lost), float(sum(true))),
        }
