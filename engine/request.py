"""What is asked of the engine, and what comes back: `Request`, `SamplingParams`, `Event`,
`GenerationResult`. Plain data; nothing here touches a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from .errors import RequestError
from .telemetry import SpeculationStats

FinishReason = Literal["stop", "length", "abort", "error"]


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))


# Fields of `SamplingParams`, what their values must be, and how that is told.
_TYPES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("max_tokens", "min_tokens", "top_k", "top_logprobs"), _is_integer, "an integer"),
    (("seed",), lambda value: value is None or _is_integer(value), "an integer or None"),
    (
        (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ),
        _is_number,
        "a number",
    ),
    (
        ("include_stop", "ignore_eos", "logprobs"),
        lambda value: isinstance(value, bool),
        "True or False",
    ),
    (
        ("logit_bias",),
        lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())),
        "a mapping of token ids to numbers",
    ),
    (
        ("stop",),
        lambda value: _is_list(value) and all(isinstance(text, str) for text in value),
        "a list of strings; wrap a single one in a list",
    ),
    (("stop_token_ids",), _is_list, "a list of token ids"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Semantics and order follow transformers' logits processors.

    `temperature` 0 is greedy. `presence_penalty` and `frequency_penalty` count generated tokens
    only (OpenAI's definition); `repetition_penalty` counts prompt and output (transformers').
    `min_tokens` forbids EOS and `stop_token_ids`, and disregards stop strings, until that many
    tokens were generated. `logprobs` asks for the log-probability of each chosen token,
    `top_logprobs` for that many alternatives; both refer to the model's distribution before any
    processing.

    Raises:
        RequestError: a value of another type, or out of range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, expected: str) -> None:
            raise RequestError(f"{name}={getattr(self, name)!r} is not valid: expected {expected}")

        for names, fits, expected in _TYPES:
            for name in names:
                if not fits(getattr(self, name)):
                    refuse(name, expected)
        if self.max_tokens < 1:
            refuse("max_tokens", "at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            refuse("min_tokens", f"between 0 and max_tokens ({self.max_tokens})")
        if not 0.0 <= self.temperature < float("inf"):
            refuse("temperature", "a finite number >= 0 (0 is greedy)")
        if self.top_k < 0:
            refuse("top_k", "0 (off) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "a number in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            refuse("min_p", "a number in [0, 1]")
        if not 0.0 < self.repetition_penalty < float("inf"):
            refuse("repetition_penalty", "a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                refuse(name, "a finite number")
        if any(not abs(bias) < float("inf") for bias in self.logit_bias.values()):
            refuse("logit_bias", "finite numbers")
        if any(not text for text in self.stop):
            refuse("stop", "non-empty strings")
        if not 0 <= self.top_logprobs <= 100:
            refuse("top_logprobs", "between 0 and 100")


@dataclass(slots=True)
class Request:
    """One generation: `prompt_ids` in, up to `sampling.max_tokens` tokens out.

    `recorded_ids` is what the same turn produced earlier (replay of a trace). It is only a hint for
    drafters that retrieve; it never changes the output.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    recorded_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, before processing) of one chosen token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation. `token_ids`, `logprobs`, `text` and `stats` end at the same token.

    `text` is decoded only when the request has stop strings (with the stop string and what follows
    it removed, unless `include_stop`) and the engine was given a `decode` function; else None.
    `stop_reason` is the token id or the string that ended it, when one did.
    """

    id: str
    prompt_tokens: int
    cached_tokens: int  # prompt positions whose KV was reused
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str | None
    logprobs: list[TokenLogprob] | None
    seed: int
    stats: SpeculationStats
    seconds: float  # from admission to the last token
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """News of one sequence after one round.

    `token_ids` are the tokens this round added (after stops were applied); `text` is the part of
    the text that became safe to show (only for requests with stop strings); `result` is set on the
    last event.
    """

    id: str
    token_ids: list[int]
    text: str | None = None
    result: GenerationResult | None = None
