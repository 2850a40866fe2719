"""What the target knows of a text: hidden states that drafters read, and what enters its head.

Features are computed from the target each time that a text comes up, or once and kept on disk: with
a small target computing is cheaper than reading, with a large one it is most of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..attention import PackedRow
from ..errors import ContextLengthError, SettingsError
from ..kv_cache import GRANULE, KVCache
from ..target import Target, TargetBatch
from .texts import TrainingText


@dataclass(slots=True)
class TextFeatures:
    """One text as the target sees it, on the target's device.

    Attributes:
        token_ids: `[tokens]`, int64.
        features: by hidden state, in Hugging Face indexing (0 is the embedding output):
            `[tokens, hidden]` in the target's dtype.
        hidden: `[tokens, hidden]`, the vectors that enter `lm_head`, behind the final norm.
    """

    token_ids: Tensor
    features: dict[int, Tensor]
    hidden: Tensor


class FeatureSource(Protocol):
    """Where an objective gets the features of its texts."""

    def __call__(self, text: TrainingText) -> TextFeatures:
        """The features of `text`; tensors without gradients that training may save."""


class ComputedFeatures:
    """Features from a forward of the target over the text, `chunk` tokens at a time.

    Args:
        layers: hidden states that are wanted, in Hugging Face indexing.
        chunk: tokens per forward; bounds the memory that attention takes.

    Raises:
        SettingsError: a layer that the target does not have, or a chunk below 1.

    Attributes:
        target, layers: as given; layers ascending.
    """

    def __init__(self, target: Target, layers: Sequence[int], *, chunk: int = 512) -> None:
        if not isinstance(chunk, int) or chunk < 1:
            raise SettingsError(f"chunk={chunk!r}: expected an integer of at least 1")
        for layer in layers:
            if not 0 <= layer <= target.num_layers:
                raise SettingsError(
                    f"hidden state {layer} was asked for; target {target.name} has 0 (the "
                    f"embedding output) to {target.num_layers}"
                )
        self.target = target
        self.layers = tuple(sorted(set(layers)))
        self._chunk = chunk
        self._cache: KVCache | None = None
        self._head_reads_last = self._compare_last()

    def __call__(self, text: TrainingText) -> TextFeatures:
        """Run the target over `text`.

        Raises:
            ContextLengthError: it is longer than the target's context.
            SettingsError: a token is outside the target's vocabulary, or there is not enough
                memory.
        """
        self._check(text)
        size, wanted = len(text.token_ids), self._wanted
        cache = self._cache_for(size)
        parts: dict[int, list[Tensor]] = {layer: [] for layer in wanted}
        vectors: list[Tensor] = []
        # A training loop computes in bfloat16 by autocast; the target has a dtype of its own.
        with torch.autocast(self.target.device.type, enabled=False):
            for start in range(0, size, self._chunk):
                end = min(start + self._chunk, size)
                features, hidden = self._forward(text.token_ids[start:end], start, cache)
                for layer in wanted:
                    parts[layer].append(features[layer])
                vectors.append(hidden)
        joined = {layer: _joined(rows) for layer, rows in parts.items()}
        last = self.target.num_layers
        return TextFeatures(
            torch.tensor(text.token_ids, device=self.target.device),
            {layer: joined[layer] for layer in self.layers},
            joined[last] if self._head_reads_last else _joined(vectors),
        )

    @property
    def _wanted(self) -> tuple[int, ...]:
        if not self._head_reads_last:
            return self.layers
        return tuple(sorted({*self.layers, self.target.num_layers}))

    def _forward(
        self, token_ids: Sequence[int], start: int, cache: KVCache
    ) -> tuple[dict[int, Tensor], Tensor]:
        batch = TargetBatch()
        batch.add(
            PackedRow(0, start, len(token_ids)),
            token_ids,
            range(start, start + len(token_ids)),
            # Logits of one row, where the head's input is a hidden state that is captured anyway.
            logits_from=len(token_ids) - 1 if self._head_reads_last else 0,
        )
        output = self.target.forward(batch, cache, capture=self._wanted)
        return output.features, output.hidden

    def _compare_last(self) -> bool:
        """Whether the last hidden state is what enters the head, so that logits of a whole text,
        most of a small target's work, need not be computed to get it."""
        self._head_reads_last = False
        last, ids = self.target.num_layers, [t % self.target.vocab_size for t in (1, 3, 5, 4)]
        batch = TargetBatch()
        batch.add(PackedRow(0, 0, len(ids)), ids, range(len(ids)), logits_from=0)
        output = self.target.forward(batch, self._cache_for(len(ids)), capture=(last,))
        return torch.equal(output.features[last], output.hidden)

    def _cache_for(self, size: int) -> KVCache:
        if self._cache is None or self._cache.positions < size:
            self._cache = None  # before the larger one is taken
            self._cache = self.target.new_cache(-(-size // GRANULE) * GRANULE)
        return self._cache

    def _check(self, text: TrainingText) -> None:
        size = len(text.token_ids)
        if not size:
            raise SettingsError(f"text {text.id!r} has no tokens; leave it out")
        if size > self.target.max_context:
            raise ContextLengthError(
                f"text {text.id!r} has {size} tokens, target {self.target.name} has a context of "
                f"{self.target.max_context}; leave it out or shorten it"
            )
        if (highest := max(text.token_ids)) >= self.target.vocab_size:
            raise SettingsError(
                f"text {text.id!r}: token {highest} is outside the target's vocabulary of "
                f"{self.target.vocab_size}; was the text made with another tokenizer?"
            )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The chunks of a text in one tensor that autograd may save: those of a forward are inference
    tensors, and a copy made outside is not."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone()
