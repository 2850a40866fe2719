"""From logits to the next token: processors in transformers' order, then one Gumbel-max draw.

Every mode is greedy decoding of a perturbed distribution: the token at absolute position `t` is
`argmax(z + g(seed, t, token))`, with `z` the processed logits and `g` Gumbel noise from a hash. The
noise has no generator state, so a token depends on its logits, its parameters, its seed and its
position, and on nothing else: not on the drafter, not on the other rows of a batch.

Order of the processors: logit bias, repetition penalty, presence and frequency penalty, min_tokens,
temperature, top-k, top-p, min-p. It is the order of transformers' `_get_logits_processor`; presence
and frequency penalties do not exist there and stand beside the other penalty. All in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import RequestError
from .noise import gumbel, gumbel_argmax, position_keys, seed_bases
from .request import SamplingParams, TokenLogprob

_FLOAT32_MAX = torch.finfo(torch.float32).max

__all__ = ["LogitsError", "Sampler", "check_vocabulary", "choose", "greedy", "gumbel", "logprobs"]


class LogitsError(RequestError):
    """Some rows given to `choose` admit no token. `rows` maps each of them to what is wrong.

    The other rows are sound: leave the named ones out and call `choose` again.
    """

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__("; ".join(f"row {row}: {problem}" for row, problem in rows.items()))
        self.rows = rows


class _Tally:
    """The distinct tokens of a sequence and how often each occurs, ready as index tensors."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, tokens: Iterable[int], device: torch.device) -> None:
        occurrences = Counter(tokens)
        self._slots = {token: slot for slot, token in enumerate(occurrences)}
        room = torch.zeros(64, dtype=torch.int64)
        ids = torch.tensor(list(occurrences), dtype=torch.int64)
        counts = torch.tensor(list(occurrences.values()), dtype=torch.int64)
        self._ids = torch.cat([ids, room]).to(device)
        self._counts = torch.cat([counts, room]).to(device=device, dtype=torch.float32)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == self._ids.numel():
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        return self._counts[: len(self._slots)]


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if `params` name a token that a model of `vocab_size` cannot produce."""
    for name, tokens in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token!r}, which is not in the vocabulary: "
                    f"expected an integer from 0 to {vocab_size - 1}"
                )
    for token, bias in params.logit_bias.items():
        if abs(bias) > _FLOAT32_MAX:
            raise RequestError(
                f"logit_bias of token {token} is {bias!r}, which does not fit float32; "
                "-1e9 is enough to forbid a token"
            )


class Sampler:
    """Parameters, seed and history of one sequence: all that `choose` needs beside the logits.

    Keeps only the history that the parameters ask for. Under `ignore_eos` an EOS token is an
    ordinary token: it ends nothing, so `min_tokens` does not forbid it (`stop_token_ids` still
    end the sequence, and stay forbidden until `min_tokens`).

    Raises RequestError if `params` name a token outside the vocabulary.
    """

    __slots__ = ("_bases", "_bias", "_ends", "_generated", "_output", "_seen", "params")

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        seed: int,
        device: torch.device | str,
    ) -> None:
        check_vocabulary(params, vocab_size)
        device = torch.device(device)
        self.params = params
        self._bases = seed_bases(seed)
        self._generated = 0

        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            self._bias = (
                torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device),
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device),
            )

        self._seen: _Tally | None = None  # prompt and output
        if params.repetition_penalty != 1.0:
            # Embeddings may have rows (padding, images) beyond the logits: they need no penalty.
            known = (token for token in prompt_ids if token < vocab_size)
            self._seen = _Tally(known, device)

        self._output: _Tally | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._output = _Tally((), device)

        self._ends: Tensor | None = None
        if params.min_tokens:
            ends = set(params.stop_token_ids)
            if not params.ignore_eos:
                ends.update(token for token in eos_token_ids if 0 <= token < vocab_size)
            if ends:
                self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)

    @property
    def is_greedy_plain(self) -> bool:
        """Whether this and every later token is the argmax of the raw logits."""
        return self.params.temperature == 0.0 and not (
            self._bias is not None
            or self._seen is not None
            or self._output is not None
            or self._forbids_ends
        )

    def advance(self, token: int) -> None:
        """Records a token that entered the output; call it once for each, in order."""
        self._generated += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._output is not None:
            self._output.add(token)

    def process(self, logits: Tensor) -> Tensor:
        """Processed scores [vocab] of the next token, float32; removed tokens are -inf.

        `logits` [vocab], any float type, is left unchanged. At temperature 0 the result is not
        divided or truncated: its argmax is the token.
        """
        ids, scores = self._truncate(self._penalise(logits))
        if ids is None:
            return scores
        return torch.full(logits.shape, -math.inf, device=logits.device).scatter_(0, ids, scores)

    @property
    def _forbids_ends(self) -> bool:
        return self._ends is not None and self._generated < self.params.min_tokens

    def _penalise(self, logits: Tensor) -> Tensor:
        """Every processor up to the temperature: float32 [vocab], a new tensor."""
        params = self.params
        scores = logits.detach().to(torch.float32, copy=True)
        if self._bias is not None:
            ids, bias = self._bias
            scores[ids] += bias
        if self._seen is not None:
            seen = scores[self._seen.ids]
            penalty = params.repetition_penalty
            scores[self._seen.ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
        if self._output is not None:
            counts = self._output.counts
            scores[self._output.ids] -= counts * params.frequency_penalty + params.presence_penalty
        if self._forbids_ends:
            scores[self._ends] = -math.inf
        if params.temperature not in (0.0, 1.0):
            scores /= params.temperature
        return scores

    def _truncate(self, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """top-k, top-p, min-p. Returns ids [m] and scores [m] of the survivors; ids None: all."""
        params = self.params
        if params.temperature == 0.0:  # the best token survives every truncation
            return None, scores
        ids: Tensor | None = None
        if 0 < params.top_k < scores.numel():
            best, ids = scores.topk(params.top_k)
            if int((scores >= best[-1]).sum()) > params.top_k:  # ties with the k-th stay
                ids = (scores >= best[-1]).nonzero().flatten()
                best = scores[ids]
            if params.top_p == 1.0 and params.min_p == 0.0:
                return ids, best
            scores = torch.full_like(scores, -math.inf).scatter_(0, ids, best)
        if params.top_p < 1.0:
            scores = _keep_nucleus(scores, params.top_p)
        if params.min_p > 0.0:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < params.min_p * probs.amax(), -math.inf)
        if params.top_p < 1.0 or params.min_p > 0.0:
            ids = (scores > -math.inf).nonzero().flatten()
            return ids, scores[ids]
        return ids, scores


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """`scores` [vocab] with the tokens outside the nucleus at -inf.

    Follows transformers step by step (softmax and cumulative sum over ascending scores), but sorts
    values without their indices, which is many times faster on a CPU, and finds the tokens by
    threshold. Of equal scores across which the boundary falls, the higher token ids survive: what
    a stable sort gives, where transformers leaves it to an unstable one.
    """
    if scores.device.type == "cpu":
        ascending = torch.from_numpy(np.sort(scores.numpy()))
    else:
        ascending = scores.sort().values
    removed = ascending.softmax(-1).cumsum(-1) <= (1 - top_p)
    cut = min(int(removed.sum()), scores.numel() - 1)  # the best token always stays
    threshold = ascending[cut]
    scores = scores.masked_fill(scores < threshold, -math.inf)
    if cut and ascending[cut - 1] == threshold:
        tied = (scores == threshold).nonzero().flatten()
        surviving = int((ascending[cut:] == threshold).sum())
        scores[tied[: tied.numel() - surviving]] = -math.inf
    return scores


def greedy(logits: Tensor) -> list[int]:
    """The argmax of each row of `logits` [n, vocab]: the first of equal ones, NaN above all."""
    if logits.device.type == "cpu":  # numpy's argmax is some twenty times as fast as torch's
        rows: list[int] = logits.detach().float().numpy().argmax(-1).tolist()
        return rows
    return logits.argmax(-1).tolist()


def choose(logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """One token per row of `logits` [n, vocab].

    Row i belongs to `samplers[i]` and decides the token at absolute position `positions[i]` (its
    index in prompt + output). Rows without sampling or processors share one argmax; the others are
    processed one at a time, because batched sums differ in their last bits from single ones and a
    row must not depend on its neighbours.

    Raises LogitsError, which names the rows, if logits are NaN or infinite or nothing may follow.
    """
    chosen = [0] * len(samplers)
    problems: dict[int, str] = {}
    plain = [row for row, sampler in enumerate(samplers) if sampler.is_greedy_plain]
    if plain:
        block = logits if len(plain) == len(samplers) else logits[plain]
        tokens = greedy(block)
        values = block[range(len(plain)), tokens].tolist()
        for row, token, value in zip(plain, tokens, values, strict=True):
            chosen[row] = token
            if not math.isfinite(value):
                problems[row] = _problem(value, samplers[row].params, positions[row])
    alone = set(range(len(samplers))).difference(plain)
    for row in sorted(alone):
        sampler = samplers[row]
        scores = sampler._penalise(logits[row])
        best_value = float(scores.amax())
        if not math.isfinite(best_value):
            problems[row] = _problem(best_value, sampler.params, positions[row])
        elif sampler.params.temperature == 0.0:
            chosen[row] = greedy(scores[None])[0]
        else:
            ids, survivors = sampler._truncate(scores)
            keys = position_keys(sampler._bases, positions[row])
            chosen[row] = gumbel_argmax(survivors, ids, keys)
    if problems:
        raise LogitsError(dict(sorted(problems.items())))
    return chosen


def _problem(best: float, params: SamplingParams, position: int) -> str:
    if best == -math.inf:
        return (
            f"every token is forbidden at position {position}: min_tokens={params.min_tokens} "
            "excludes EOS and stop_token_ids and nothing else is possible; lower min_tokens"
        )
    kind = "NaN" if math.isnan(best) else "infinite"
    return (
        f"logits at position {position} are {kind} (temperature={params.temperature}, "
        f"repetition_penalty={params.repetition_penalty}): use milder values if these are extreme, "
        "else load the target as bfloat16 or float32"
    )


def logprobs(logits: Tensor, tokens: Sequence[int], top_n: int) -> list[TokenLogprob]:
    """Log-probability of each row's token under the model's own distribution.

    `logits` [n, vocab] before any processing; `tokens` the n chosen tokens; `top_n` alternatives
    are listed by falling log-probability, equal ones by token id. A row of `logits` may be given
    as [vocab] with a single token. float32; each row is computed alone, whatever the batch.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result = []
    for row, token in zip(rows, tokens, strict=True):
        scores = row.float().log_softmax(-1)
        top: tuple[tuple[int, float], ...] = ()
        if top_n > 0:
            count = min(top_n, scores.numel())
            ids = (scores >= scores.topk(count).values[-1]).nonzero().flatten()
            ids = ids[scores[ids].sort(descending=True, stable=True).indices[:count]]
            top = tuple(zip(ids.tolist(), scores[ids].tolist(), strict=True))
        result.append(TokenLogprob(token, float(scores[token]), top))
    return result
