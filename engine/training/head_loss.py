"""Losses over a vocabulary, computed a few rows at a time.

Logits of all rows at once would be most of a training's memory: 500 anchors of 15 slots over a
vocabulary of 150,000 take 4.5 GB, and their gradients as much again. So each piece of rows goes
through the head, its loss, and back, before the next one; what is kept is the gradient of the
rows, and of the head where it is trained. Losses give their gradient with respect to the logits
themselves: it is a softmax that they have anyway, and on a CPU every pass over logits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..target import Target

# Logits of one piece. Measured on CPU: with fewer than 100 rows a head of 49,152 tokens is slower
# per row.
_PIECE = 1 << 23

Head = Callable[[Tensor], Tensor]
# From logits (float32 at least, not to be changed) of a piece, and which rows they are, to the sum
# of their losses and its gradient with respect to these logits.
LossOf = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class FrozenHead:
    """A target's output head without gradients of its own: `[rows, hidden]` -> `[rows, vocab]`.

    Computes in the head's dtype, as the target does.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, hidden: Tensor) -> Tensor:
        head = self._target.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        weight = head.weight.detach()
        return linear(hidden.to(weight.dtype), weight, None if bias is None else bias.detach())


def precise(logits: Tensor) -> Tensor:
    """`logits` in float32 at least, as softmax and its sums need it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def pieces(rows: int, width: int) -> list[slice]:
    """Slices of `rows` whose logits over `width` tokens fit a piece."""
    step = max(1, _PIECE // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[rows, vocab]` and the log of what they were normalised by, `[rows, 1]`."""
    chances = logits.softmax(-1)
    return chances, logits.amax(-1, keepdim=True) - chances.amax(-1, keepdim=True).log()


def head_loss(
    head: Head,
    hidden: Tensor,
    loss_of: LossOf,
    *,
    width: int,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """The sum of `loss_of` over all pieces of `hidden`; scalar, differentiable.

    Args:
        head: from hidden states to logits.
        hidden: `[rows, hidden]`, what enters the head.
        width: tokens of the head's vocabulary.
        parameters: weights that `head` reads and that are trained.
    """
    trained = tuple(p for p in parameters if p.requires_grad)
    total: Tensor = _Summed.apply(head, loss_of, width, hidden, *trained)
    return total


class _Summed(torch.autograd.Function):
    """Takes gradients on the way: the loss is a sum, so what comes back is one number to multiply
    them by."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, loss_of: LossOf, width: int, hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        total = torch.zeros((), dtype=precise(hidden[:0]).dtype, device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        into = torch.zeros_like(hidden)
        sums = [torch.zeros_like(p) for p in parameters]
        for part in pieces(len(hidden), width):
            with torch.set_grad_enabled(wanted):
                rows = hidden[part].detach().requires_grad_(wanted)
                logits = head(rows)
            loss, gradient = loss_of(precise(logits.detach()), part)
            total += loss
            if wanted:
                found = torch.autograd.grad(logits, (rows, *parameters), gradient.to(logits.dtype))
                into[part] = found[0]
                for kept, new in zip(sums, found[1:], strict=True):
                    kept += new
        ctx.save_for_backward(into, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return None, None, None, *(saved * grad for saved in ctx.saved_tensors)
