"""What a drafter accepts of texts that its target wrote: by arm, and by span of the response.

Rounds are those that the arm alone would have, one behind the other along each response, from
round labels (`engine/routing/labels.py`): what an engine would do, without its clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whiflash_agents.engine.request import Request, SamplingParams

if TYPE_CHECKING:
    from whiflash_agents.chat import Chat
    from whiflash_agents.engine.drafters.base import Drafter
    from whiflash_agents.engine.target import Target
    from whiflash_agents.engine.training.texts import TrainingText


@dataclass(slots=True)
class Rounds:
    """Rounds and the tokens that they gave."""

    rounds: int = 0
    tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 0 without a round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, tokens: int) -> None:
        self.rounds += 1
        self.tokens += tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


@dataclass(slots=True)
class Acceptance:
    """One arm's rounds: of all texts, and of the rounds that begin in a kind of span."""

    total: Rounds = field(default_factory=Rounds)
    by_span: dict[str, Rounds] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.total.as_dict(),
            "by_span": {kind: rounds.as_dict() for kind, rounds in sorted(self.by_span.items())},
        }


def measure_acceptance(
    target: Target,
    drafters: Mapping[str, Drafter],
    texts: Sequence[TrainingText],
    chat: Chat,
    *,
    sampling: Callable[[TrainingText], SamplingParams],
    max_draft_nodes: int,
    on_text: Callable[[int], None] = lambda done: None,
) -> dict[str, Acceptance]:
    """Every arm's rounds along the responses of `texts`.

    Args:
        drafters: by arm, new ones.
        sampling: how a text was generated: drafts are coupled to its noise.
        on_text: told the number of texts done.

    Raises:
        What `RoundLabeller` raises.
    """
    from whiflash_agents.engine.routing.labels import RoundLabeller

    found = {arm: Acceptance() for arm in drafters}
    if not texts:
        return found
    longest = max(len(text.token_ids) for text in texts)
    labeller = RoundLabeller(target, drafters, max_length=longest, max_draft_nodes=max_draft_nodes)
    for number, text in enumerate(texts, start=1):
        for start, end in text.responses:
            prompt, output = text.token_ids[:start], text.token_ids[start:end]
            params = sampling(text)
            params = replace(params, max_tokens=max(params.max_tokens, len(output)))
            labels = labeller.label(Request(text.id, prompt, params), output)
            spans = chat.parse(prompt, output).spans
            kinds = [span.kind for span in spans for _ in range(span.start, span.end)]
            for arm, accepted in found.items():
                _walk(accepted, labels.acceptance_of([arm])[:, 0].tolist(), kinds)
        on_text(number)
    return found


def _walk(accepted: Acceptance, emitted: Sequence[int], kinds: Sequence[str]) -> None:
    """Count the rounds that begin where the one before ended. Round i begins at output token i + 1,
    the first one being the prompt's."""
    at = 0
    while at < len(emitted):
        accepted.total.add(emitted[at])
        if at + 1 < len(kinds):
            accepted.by_span.setdefault(kinds[at + 1], Rounds()).add(emitted[at])
        at += emitted[at]
