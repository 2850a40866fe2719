"""Training a low-rank adapter (Hu et al., 2106.09685) of a causal LM on the responses of texts.

The model stays as it is; beside each of its linear layers, the output head left out, a product of
two thin matrices is learnt. B begins with zeros, so that training sets out from the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from ..errors import SettingsError
from .objective import Loss
from .texts import TrainingText


class LowRankPair(nn.Module):
    """A `[rank, in]` and B `[out, rank]` of one layer."""

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        a = torch.empty(rank, layer.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5.0), generator=generator)
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return linear(linear(x, self.a), self.b)


class LowRankAdapter(nn.Module):
    """The pairs for all linear layers of a model but its output head.

    Args:
        model: a transformers causal LM.
        rank: of the pairs.
        alpha: the change is scaled by `alpha / rank`.
        seed: of A.

    Raises:
        SettingsError: rank or alpha out of range, or no linear layer.
    """

    def __init__(
        self, model: nn.Module, rank: int = 16, alpha: float = 32.0, seed: int = 0
    ) -> None:
        super().__init__()
        if rank < 1 or not alpha > 0.0:
            raise SettingsError(f"rank={rank}, alpha={alpha}: expected at least 1, and above 0")
        self.alpha = alpha
        self.scale = alpha / rank
        head = model.get_output_embeddings()  # type: ignore[operator]
        self.layers: dict[str, nn.Linear] = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not head
        }
        if not self.layers:
            raise SettingsError(
                f"{type(model).__name__} has no linear layers beside its head; an adapter of this "
                "kind cannot change it"
            )
        generator = torch.Generator().manual_seed(seed)
        # Names of modules must not hold dots.
        self.pairs = nn.ModuleDict(
            {
                name.replace(".", "/"): LowRankPair(layer, rank, generator)
                for name, layer in self.layers.items()
            }
        )

    def named_pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Per layer's name (A, B), for `save_adapter`."""
        return {
            name.replace("/", "."): (pair.a.detach(), pair.b.detach())
            for name, pair in self.pairs.items()
            if isinstance(pair, LowRankPair)
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model computes with the pairs."""

        def changed(pair: nn.Module) -> Any:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
                return output + (self.scale * pair(inputs[0])).to(output.dtype)

            return hook

        handles = [
            layer.register_forward_hook(changed(self.pairs[name.replace(".", "/")]))
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class AdapterObjective:
    """Cross entropy of the response tokens.

    Args:
        model: a transformers causal LM with an attention that computes gradients; its own weights
            are frozen.
        adapter: of that model.
        max_length: a longer text is refused; None allows any.
    """

    def __init__(
        self, model: nn.Module, adapter: LowRankAdapter, max_length: int | None = None
    ) -> None:
        self.network: nn.Module = adapter
        self._adapter = adapter
        self._model = model.eval().requires_grad_(False)
        self._max_length = max_length

    def loss(self, text: TrainingText, generator: torch.Generator) -> Loss:
        """Nothing is drawn from `generator`.

        Raises:
            SettingsError: a text longer than `max_length`.
        """
        ids = text.token_ids
        if self._max_length is not None and len(ids) > self._max_length:
            raise SettingsError(
                f"text {text.id!r} has {len(ids)} tokens, more than {self._max_length}; leave it "
                "out, or raise max_length"
            )
        device = next(self._model.parameters()).device
        end = text.responses[-1][1]
        tokens = torch.tensor([ids[:end]], device=device)
        where = torch.tensor(
            [t - 1 for start, stop in text.responses for t in range(start, stop)], device=device
        )
        with self._adapter.applied():
            logits = self._model(
                input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=where
            ).logits[0]
        wanted = tokens[0, where + 1]
        total = cross_entropy(logits.float(), wanted, reduction="sum")
        right = float((logits.detach().argmax(-1) == wanted).sum())
        count = float(len(where))
        return Loss(total, count, {"accuracy": (right, count)})
