"""Walks along labelled texts: the rounds that an engine would have had with some choice of arms.

What a predictor has seen of a sequence depends on the rounds before. A walk replays them from
labels, without a model: the chosen arm's label says where the next round begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from ..request import Request, SamplingParams
from ..routing.acceptance import AcceptancePredictor, RecentAcceptance
from ..routing.base import NONE
from ..routing.labels import RoundLabels
from ..routing.neural_acceptance import scalar_features
from ..routing.oracle import Route
from ..routing.signals import Signals
from ..sampling import Sampler
from ..sequence import SequenceState
from ..stopping import StopChecker
from ..telemetry import RoundRecord
from .fitting import Examples

_STAY = 0.75  # chance that a random walk keeps its arm
_PLAIN = 0.2  # and that it drafts nothing, without which walks soon take the same steps


def walk(
    row: RoundLabels,
    arms: Sequence[str],
    predictor: AcceptancePredictor,
    choose: Callable[[int, SequenceState], int],
) -> Route:
    """Have the rounds of `row`, and let `predictor` observe them.

    Args:
        choose: from the index of a round in the labels and the sequence, which carries the signals
            before that round: the arm, as an index of `arms`.

    Returns:
        the arm of every round that there was.
    """
    emitted, drafted = row.acceptance_of(arms).tolist(), row.drafted_of(arms).tolist()
    entropies, margins = row.entropy.tolist(), row.margin.tolist()
    sequence = _sequence(row)
    route: dict[int, str] = {}
    at = 0
    while at < row.num_rounds:
        sequence.signals = Signals(entropies[at], margins[at], row.hidden[at])
        column = choose(at, sequence)
        route[at + 1] = arms[column]
        count = emitted[at][column]
        predictor.observe(
            sequence, RoundRecord(at + 1, arms[column], drafted[at][column], count - 1, count)
        )
        at += count
    predictor.close(sequence)
    return route


def walked_examples(
    rows: Sequence[RoundLabels], arms: Sequence[str], *, walks: int, seed: int
) -> list[Examples]:
    """What an `AcceptanceHead` is to learn from each row: hidden states, scalar features and the
    acceptance length of every arm, at the rounds of `walks` random walks.

    A walk goes through all rows, in an order of its own, with one `RecentAcceptance` that knows
    nothing at first, as in a run; it keeps its arm for some rounds, then draws another, and has a
    plain round now and then.
    """
    source = random.Random(seed)
    places: list[list[int]] = [[] for _ in rows]
    scalars: list[list[list[float]]] = [[] for _ in rows]
    for _ in range(walks):
        walker = _RandomWalker(arms, source)
        for number in source.sample(range(len(rows)), len(rows)):
            walker.places, walker.scalars = places[number], scalars[number]
            walk(rows[number], (*arms, NONE), walker.recent, walker.choose)
    return [
        Examples((row.hidden[at], torch.tensor(beside)), row.acceptance_of(arms)[at].float())
        for row, at, beside in zip(rows, places, scalars, strict=True)
    ]


class _RandomWalker:
    """Chooses arms at random, `none` standing behind them, and notes in `places` and `scalars` what
    was known at each round."""

    def __init__(self, arms: Sequence[str], source: random.Random) -> None:
        self.recent = RecentAcceptance()
        self.places: list[int] = []
        self.scalars: list[list[float]] = []
        self._arms = arms
        self._source = source
        self._column = source.randrange(len(arms))

    def choose(self, at: int, sequence: SequenceState) -> int:
        assert sequence.signals is not None  # `walk` sets them
        (lengths,) = self.recent.predict([sequence], self._arms)
        self.places.append(at)
        self.scalars.append(scalar_features(sequence.signals, lengths))
        if self._source.random() < _PLAIN:
            return len(self._arms)
        if self._source.random() >= _STAY:
            self._column = self._source.randrange(len(self._arms))
        return self._column


def routed_by(
    predictor: AcceptancePredictor, rows: Sequence[RoundLabels], arms: Sequence[str]
) -> list[Route]:
    """The routes of one row after another, if every round goes to the arm of the longest
    acceptance length that is predicted."""

    def choose(at: int, sequence: SequenceState) -> int:
        (lengths,) = predictor.predict([sequence], arms)
        return lengths.index(max(lengths))

    return [walk(row, arms, predictor, choose) for row in rows]


def _sequence(row: RoundLabels) -> SequenceState:
    """A sequence for predictors to tell apart; its tokens are in the labels."""
    params = SamplingParams()
    return SequenceState(
        request=Request(row.id, [0], params),
        sampler=Sampler(
            params, vocab_size=1, prompt_ids=[0], eos_token_ids=(), seed=0, device="cpu"
        ),
        stop=StopChecker(params, eos_token_ids=(), decode=None),
        tokens=[0],
        num_prompt=1,
        seed=0,
    )
