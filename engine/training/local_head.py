"""Training of a local head, alone and on token ids (DeLS-Spec, 2607.07409).

Windows as long as a block are drawn from the responses; the head reads each from its bonus token
on, and learns to say what comes next. The target is not run: its embedding is all that is read, so
an epoch takes a small part of what the drafter's own took.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..drafters.local_head import LocalHead, LocalHeadConfig
from ..errors import SettingsError
from ..sampling import greedy
from ..target import Target
from .dflash import draw_anchors
from .head_loss import head_loss, softmax
from .objective import Loss
from .texts import TrainingText

_STD = 0.02  # of the vocabulary head's rows: it begins close to the bare frequencies
_SMOOTHING = 1.0  # times that every token is counted beforehand


def log_frequencies(texts: Iterable[TrainingText], vocab_size: int) -> Tensor:
    """`[vocab_size]`, the log of each token's smoothed share of all responses.

    Raises:
        SettingsError: a token outside the vocabulary.
    """
    counts = torch.full((vocab_size,), _SMOOTHING, dtype=torch.float64)
    for text in texts:
        for start, end in text.responses:
            said = torch.tensor(text.token_ids[start:end])
            if (highest := int(said.max())) >= vocab_size:
                raise SettingsError(
                    f"text {text.id!r}: token {highest} is outside the target's vocabulary of "
                    f"{vocab_size}; was the text made with another tokenizer?"
                )
            counts += torch.bincount(said, minlength=vocab_size)
    return (counts / counts.sum()).log().float()


def new_local_head(
    config: LocalHeadConfig, target: Target, texts: Iterable[TrainingText], *, seed: int = 0
) -> LocalHead:
    """A local head with random weights and the frequencies of `texts`, in float32 on the target's
    device, with gradients.

    Raises:
        SettingsError: a size or a weight out of range, or a token outside the vocabulary.
    """
    for name in ("depth", "state_size", "rank"):
        if (size := getattr(config, name)) < 1:
            raise SettingsError(f"{name}={size!r}: expected an integer of at least 1")
    for name in ("weight", "unigram_weight"):
        if not 0.0 <= (weight := getattr(config, name)) <= 10.0:
            raise SettingsError(f"{name}={weight!r}: expected a number from 0 to 10")
    if config.depth < 2:
        raise SettingsError(
            "the drafter's blocks propose 1 token each, and a local head corrects from the second "
            "on; use a drafter with larger blocks"
        )
    generator = torch.Generator().manual_seed(seed)
    head = LocalHead(config)
    with torch.no_grad():
        for layer in (head.input, head.recurrent, head.project):
            bound = layer.in_features**-0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
        head.vocabulary.weight.normal_(0.0, _STD, generator=generator)
        head.unigram.copy_(log_frequencies(texts, config.vocab_size))
    return head.to(target.device)


class LocalHeadObjective:
    """The loss of a local head: cross-entropy of what follows, at the slots that it corrects.

    Args:
        network: to be trained; float32.
        target: its embedding is read as it is.
        anchors: most windows of a text.

    Raises:
        SettingsError: a setting out of range.
    """

    def __init__(self, network: LocalHead, target: Target, *, anchors: int = 64) -> None:
        if not isinstance(anchors, int) or anchors < 1:
            raise SettingsError(f"anchors={anchors!r}: expected an integer of at least 1")
        self.network: nn.Module = network
        self.head, self.target, self.anchors = network, target, anchors

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """The loss over windows of `text`. The first token of a block is none of its business, so a
        text without a response of three tokens or more has no loss, and weight 0."""
        head, depth = self.head, self.head.config.depth
        anchors = draw_anchors(text, self.anchors, generator)
        inside = anchors.inside(depth)
        inside[:, :1] = False
        if not inside.any():
            return Loss(head.project.weight.sum() * 0.0, 0.0)
        tokens = torch.tensor(text.token_ids)
        reached = (anchors.positions[:, None] + torch.arange(depth + 1)).clamp(max=len(tokens) - 1)
        windows = tokens[reached].to(self.target.device)
        states = head(embedding(windows[:, :-1], self.target.embedding.detach()))
        inside = inside.to(windows.device)
        labels = windows[:, 1:][inside]
        chosen: list[int] = []

        def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            chosen.extend(greedy(logits))
            wanted = labels[rows, None]
            chances, normaliser = softmax(logits)
            losses = normaliser - logits.gather(1, wanted)
            return losses.sum(), chances.scatter_add_(1, wanted, -torch.ones_like(losses))

        total = head_loss(
            head.logits,
            head.project(states[inside]),
            loss_of,
            width=head.config.vocab_size,
            parameters=(head.vocabulary.weight,),
        )
        right = torch.zeros_like(inside)
        right[inside] = torch.tensor(chosen, device=labels.device) == labels
        sums, counts = right.sum(0).tolist(), inside.sum(0).tolist()
        figures = {
            f"accuracy@{k}": (float(hits), float(count))
            for k, (hits, count) in enumerate(zip(sums, counts, strict=True), start=1)
            if count
        }
        return Loss(total, float(len(labels)), figures)
