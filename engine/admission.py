"""What may be asked of an engine: requests are checked once, before anything is computed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from operator import index

from .errors import ContextLengthError, RequestError
from .kv_cache import GRANULE, KVCache
from .request import Request
from .sampling import Sampler
from .sequence import SequenceState
from .stopping import StopChecker
from .target import Target


def new_sequence(
    request: Request,
    target: Target,
    cache: KVCache,
    *,
    room: int,
    arrival: int,
    decode: Callable[[Sequence[int]], str] | None,
) -> SequenceState:
    """The state of a request that can be honoured.

    Args:
        room: positions that a round needs behind the committed ones.
        arrival: how many requests came before.
        decode: token ids to text, for stop strings.

    Raises:
        ContextLengthError: prompt and `max_tokens` exceed the target's context or the KV cache.
        RequestError: an empty prompt, tokens outside the vocabulary, parameters that cannot be
            honoured.
    """
    params = request.sampling
    try:  # tensors and arrays hold no Python ints
        prompt = list(map(index, request.prompt_ids))
        recorded = list(map(index, request.recorded_ids))
    except TypeError as error:
        raise RequestError(
            f"request {request.id!r}: prompt_ids and recorded_ids must be flat sequences of "
            f"integers: {error}"
        ) from error
    if not prompt:
        raise RequestError(f"request {request.id!r} has an empty prompt; give it a token or more")
    for source, tokens in (("prompt", prompt), ("recorded", recorded)):
        strange = next((t for t in tokens if not 0 <= t < target.vocab_size), None)
        if strange is not None:
            raise RequestError(
                f"request {request.id!r}: {source} token {strange} is outside the target's "
                f"vocabulary of {target.vocab_size}; was it made with another tokenizer?"
            )
    if len(prompt) + params.max_tokens > target.max_context:
        raise ContextLengthError(
            f"request {request.id!r}: {len(prompt)} prompt tokens + max_tokens "
            f"{params.max_tokens} exceed the target's context of {target.max_context}; "
            "shorten the prompt or lower max_tokens"
        )
    most = len(prompt) + params.max_tokens + room
    if most > cache.positions:
        raise ContextLengthError(
            f"request {request.id!r} needs up to {most} KV positions ({len(prompt)} prompt + "
            f"{params.max_tokens} max_tokens + {room} for drafts), the KV cache has "
            f"{cache.positions} (kv_tokens, rounded down to a multiple of {GRANULE}); "
            "lower max_tokens or raise kv_tokens"
        )
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return SequenceState(
        request=request,
        sampler=Sampler(
            params,
            vocab_size=target.vocab_size,
            prompt_ids=prompt,
            eos_token_ids=target.eos_token_ids,
            seed=seed,
            device=target.device,
        ),
        stop=StopChecker(params, eos_token_ids=target.eos_token_ids, decode=decode),
        tokens=prompt,
        num_prompt=len(prompt),
        seed=seed,
        logprobs=[] if params.logprobs or params.top_logprobs else None,
        arrival=arrival,
    )
