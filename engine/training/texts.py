"""What drafters are trained on: token ids, and which of them the target wrote.

A drafter learns from what the target says, never from what it is told, so a text carries the
ranges of its responses beside its tokens. The engine knows no chats: whoever has traces makes texts
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from ..errors import SettingsError


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One text that the target wrote a part of.

    Attributes:
        id: names the text in messages, in the order of training and in what is drawn for it.
        token_ids: the whole text, prompts and responses.
        responses: half-open ranges `[start, end)` of `token_ids` that the target wrote; ascending,
            disjoint, and each behind one token or more.

    Raises:
        SettingsError: an empty id, a token id below 0, or ranges that are none of the above.
    """

    id: str
    token_ids: tuple[int, ...]
    responses: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise SettingsError(f"text id {self.id!r}: expected a string that is not empty")
        try:
            tokens = tuple(map(index, self.token_ids))
            ranges = tuple((index(start), index(end)) for start, end in self.responses)
        except (TypeError, ValueError):
            raise SettingsError(
                f"text {self.id!r}: expected integers as token ids, and pairs of integers as "
                "responses"
            ) from None
        if (lowest := min(tokens, default=0)) < 0:
            raise SettingsError(f"text {self.id!r}: token id {lowest} is below 0")
        before = 1
        for start, end in ranges:
            if not before <= start < end <= len(tokens):
                raise SettingsError(
                    f"text {self.id!r}: response [{start}, {end}) in a text of {len(tokens)} "
                    f"tokens; expected {before} <= start < end <= {len(tokens)}: responses ascend, "
                    "do not overlap and each follow a token"
                )
            before = end
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "responses", ranges)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the target wrote."""
        return sum(end - start for start, end in self.responses)


def check_ids(texts: Sequence[TrainingText]) -> None:
    """Refuse texts that share an id: their draws and their cached features would be mixed up.

    Raises:
        SettingsError: naming the first id that comes twice.
    """
    seen: set[str] = set()
    for text in texts:
        if text.id in seen:
            raise SettingsError(f"two texts have the id {text.id!r}; give each its own")
        seen.add(text.id)
