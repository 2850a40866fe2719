"""The live state of one sequence: its tokens, how far its KV cache reaches, how it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .features import FeatureBuffer
from .kv_cache import Extent
from .request import Request, TokenLogprob
from .routing.signals import Signals
from .sampling import Sampler
from .stopping import StopChecker
from .telemetry import SpeculationStats


@dataclass(slots=True)
class ContextState:
    """How far one drafter's context reaches in a sequence (`drafters/context.py`).

    Attributes:
        rows: positions whose keys and values it has.
        last: what drafting needs of the last row.
        off: the sequence has outgrown the drafter.
    """

    rows: int = 0
    last: Tensor | None = None
    off: bool = False


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request while it runs.

    Attributes:
        tokens: prompt and output.
        num_cached: tokens whose keys and values are in the extent. In decoding it is one less than
            `len(tokens)`: the bonus token of the last round enters with the next forward.
        extent: its share of the arena; None while it waits.
        contexts: how far the context of each neural drafter reaches.
        features: target features that some of them have not consumed; None when none needs any.
        signals: what the last forward says of it, if the router asked for that.
        last_drafter: who drafted its last round, to tell switches.
    """

    request: Request
    sampler: Sampler
    stop: StopChecker
    tokens: list[int]
    num_prompt: int
    seed: int
    num_cached: int = 0
    extent: Extent | None = None
    cached_tokens: int = 0
    contexts: dict[str, ContextState] = field(default_factory=dict)
    features: FeatureBuffer | None = None
    signals: Signals | None = None
    last_drafter: str = ""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    logprobs: list[TokenLogprob] | None = None
    admitted_at: float | None = None
    arrival: int = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens that are not in the KV cache yet; 1 while decoding."""
        return len(self.tokens) - self.num_cached

    @property
    def is_decoding(self) -> bool:
        return self.num_pending == 1 and self.num_output > 0

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - self.num_output


def common_prefix_length(a: Sequence[int], b: Sequence[int], limit: int | None = None) -> int:
    """Length of the longest common beginning, at a cost in proportion to it: slices (compared at C
    speed) that double until one differs, and a bisection inside that one."""
    end = min(len(a), len(b)) if limit is None else min(len(a), len(b), limit)
    low, high = 0, min(16, end)
    while a[low:high] == b[low:high]:
        if high == end:
            return end
        low, high = high, min(2 * high, end)
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
