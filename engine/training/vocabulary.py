"""The draft vocabulary: the tokens that a drafter with a head of its own can propose.

A head over the whole vocabulary is most of a small drafter's time, and most of it is never said:
EAGLE-3 drafts from the tokens that are most frequent in its training data (Li et al., 2503.01840;
FR-Spec, 2502.14856, on how few suffice). Which they are depends on what the target writes, so they
are counted in its responses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SettingsError
from .texts import TrainingText


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Tokens of the target that a drafter knows.

    Attributes:
        ids: target token ids, ascending; their index is the draft id.
        vocab_size: the target's vocabulary.
        coverage: share of the response tokens it was chosen by that are in it; None where there
            were none.
    """

    ids: tuple[int, ...]
    vocab_size: int
    coverage: float | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> Tensor:
        """`[draft_vocab]` int64 offsets: target id minus draft id, as checkpoints have it."""
        return torch.tensor(self.ids) - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """`[vocab]` bool, whether a target token is in it."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[list(self.ids)] = True
        return mask


def choose_vocabulary(
    texts: Iterable[TrainingText],
    size: int,
    vocab_size: int,
    *,
    always: Iterable[int] = (),
    prompt_weight: float = 0.0,
) -> DraftVocabulary:
    """The `size` tokens that responses have most often.

    Of equally frequent ones the lower id is taken, and where the texts have too few the lowest ids
    that are missing: byte-pair vocabularies are ordered by frequency.

    Args:
        texts: read once.
        vocab_size: the target's.
        always: tokens that are in it whatever the texts say: end of turn, tool-call markers.
        prompt_weight: what a token outside of responses counts, a response token being 1.

    Raises:
        SettingsError: a size that is not 1 to `vocab_size` or below the number of `always`, tokens
            outside the target's vocabulary, a negative weight.
    """
    forced = set(always)
    if not 1 <= size <= vocab_size:
        raise SettingsError(
            f"a draft vocabulary of {size!r} tokens: expected 1 to the target's {vocab_size}"
        )
    if len(forced) > size:
        raise SettingsError(
            f"a draft vocabulary of {size} token{'' if size == 1 else 's'} cannot hold the "
            f"{len(forced)} that it always has; make it larger"
        )
    if not prompt_weight >= 0.0:
        raise SettingsError(f"prompt_weight={prompt_weight!r}: expected 0 or more")
    said: Counter[int] = Counter()
    read: Counter[int] = Counter()
    for text in texts:
        for start, end in text.responses:
            said.update(text.token_ids[start:end])
        if prompt_weight:
            read.update(text.token_ids)
    strange = {t for t in (*forced, *said, *read) if not 0 <= t < vocab_size}
    if strange:
        raise SettingsError(
            f"token {min(strange)} is outside the target's vocabulary of {vocab_size}; were the "
            "texts made with another tokenizer?"
        )
    counts = {
        token: said[token] + prompt_weight * (read[token] - said[token])
        for token in said.keys() | read.keys()
    }
    order = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = set(forced)
    for candidates in (order, range(vocab_size)):
        for token in candidates:
            if len(chosen) == size:
                break
            chosen.add(token)
    total = said.total()
    covered = sum(count for token, count in said.items() if token in chosen)
    return DraftVocabulary(tuple(sorted(chosen)), vocab_size, covered / total if total else None)


def coverage(d2t: Tensor, texts: Iterable[TrainingText]) -> float | None:
    """Share of the response tokens of `texts` that a drafter knows; None where there is none.

    Args:
        d2t: offsets `[draft_vocab]`, as in `DraftHead`.
    """
    known = set((torch.arange(len(d2t), device=d2t.device) + d2t).tolist())
    covered = total = 0
    for text in texts:
        for start, end in text.responses:
            covered += sum(token in known for token in text.token_ids[start:end])
            total += end - start
    return covered / total if total else None


def draft_ids(d2t: Tensor | None, vocab_size: int) -> Tensor:
    """`[vocab]` int64: the draft id of every target token, -1 for those outside.

    Args:
        d2t: offsets, as in `DraftHead`; None where both vocabularies are the same.
    """
    if d2t is None:
        return torch.arange(vocab_size)
    ids = torch.full((vocab_size,), -1, device=d2t.device)
    known = torch.arange(len(d2t), device=d2t.device)
    ids[known + d2t] = known
    return ids
