"""Choosing tokens: equality with transformers' processors, quality of the noise, the distribution
of draws, and independence of a row from its neighbours."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from whiflash_agents.engine.errors import RequestError
from whiflash_agents.engine.noise import (
    fold_seed,
    gumbel,
    gumbel_argmax,
    position_keys,
    seed_bases,
)
from whiflash_agents.engine.request import SamplingParams
from whiflash_agents.engine.sampling import LogitsError, Sampler, choose, greedy, logprobs

VOCAB = 24
EOS = 3
CPU = "cpu"


def make_sampler(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    vocab_size: int = VOCAB,
    seed: int = 1,
) -> Sampler:
    sampler = Sampler(
        params,
        vocab_size=vocab_size,
        prompt_ids=prompt,
        eos_token_ids=[EOS],
        seed=seed,
        device=CPU,
    )
    for token in output:
        sampler.advance(token)
    return sampler


# --- against transformers ------------------------------------------------------------------------


class CountPenalty(logits_process.LogitsProcessor):
    """OpenAI's presence and frequency penalty, written as in its API reference."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self.params = params
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        output = input_ids[0, self.prompt_length :].tolist()
        for token in set(output):
            scores[0, token] -= (
                output.count(token) * self.params.frequency_penalty + self.params.presence_penalty
            )
        return scores


@functools.cache
def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config)


def scores_of_transformers(
    params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]
) -> Tensor:
    """The scores [vocab] that `generate` would sample from, processors ordered by transformers."""
    config = GenerationConfig(
        do_sample=params.temperature > 0,
        temperature=float(params.temperature) if params.temperature > 0 else 1.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_tokens or None,
        sequence_bias={(t,): float(b) for t, b in params.logit_bias.items()} or None,
    )
    ends = [*params.stop_token_ids] + ([] if params.ignore_eos else [EOS])
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    processors: Any = tiny_model()._get_logits_processor(config, input_ids_seq_length=len(prompt))
    before = (
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
    )
    place = sum(isinstance(processor, before) for processor in processors)
    processors = list(processors)
    processors.insert(place, CountPenalty(params, len(prompt)))
    input_ids = torch.tensor([prompt + output])
    return LogitsProcessorList(processors)(input_ids, logits.float()[None])[0]


tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    min_tokens=st.sampled_from([0, 0, 1, 4]),
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(tokens, st.floats(-8, 8, width=32), max_size=3),
    stop_token_ids=st.lists(tokens, max_size=2),
    ignore_eos=st.booleans(),
)
continuous = st.lists(st.floats(-12, 12, width=32), min_size=VOCAB, max_size=VOCAB)
with_ties = st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=400, deadline=None)
@given(
    params=params_strategy,
    values=continuous | with_ties,
    prompt=st.lists(tokens, min_size=1, max_size=8),
    output=st.lists(tokens, max_size=6),
)
def test_processed_scores_equal_those_of_transformers(
    params: SamplingParams, values: list[float], prompt: list[int], output: list[int]
) -> None:
    logits = torch.tensor(values)
    before = logits.clone()
    wanted = scores_of_transformers(params, logits, prompt, output)
    got = make_sampler(params, prompt, output).process(logits)
    assert torch.equal(logits, before)
    assert got.dtype == torch.float32
    # The same scores survive, as often. Where all of a score survive they are the same tokens too;
    # where a boundary divides equal scores, transformers' unstable sort decides which.
    finite, wanted_finite = got[got > -math.inf], wanted[wanted > -math.inf]
    torch.testing.assert_close(finite.sort().values, wanted_finite.sort().values)
    divided = (got > -math.inf) != (wanted > -math.inf)
    if divided.any():
        penalised = make_sampler(params, prompt, output)._penalise(logits)
        assert penalised[divided].unique().numel() == 1
    torch.testing.assert_close(got[~divided], wanted[~divided])


@settings(max_examples=200, deadline=None)
@given(values=with_ties, top_p=st.sampled_from([0.05, 0.3, 0.6, 0.8, 0.95]))
def test_top_p_keeps_the_set_of_a_stable_sort_when_scores_are_equal(
    values: list[float], top_p: float
) -> None:
    scores = torch.tensor(values)
    ascending, order = scores.sort(stable=True)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[-1] = False
    wanted = torch.ones(VOCAB, dtype=torch.bool)
    wanted[order[removed]] = False
    kept = make_sampler(SamplingParams(temperature=1.0, top_p=top_p)).process(scores) > -math.inf
    assert torch.equal(kept, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_p": 0.95},
        {"top_p": 0.5, "temperature": 2.0},
        {"min_p": 0.05},
        {"top_k": 200, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_survivors_equal_those_of_transformers_in_a_real_vocabulary(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    size = 49_152
    params = SamplingParams(**{"temperature": 0.8, **options})
    logits = torch.randn(size, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype)
    wanted = scores_of_transformers(params, logits, [1], [])
    got = make_sampler(params, vocab_size=size).process(logits)
    assert torch.equal(got.sort().values, wanted.sort().values)
    if dtype == torch.float32:  # bfloat16 has equal scores on both sides of a nucleus
        assert torch.equal(got, wanted)


def test_processing_is_in_float32_whatever_the_logits() -> None:
    logits = torch.tensor([1.0, 1.0 + 1e-12, 0.0], dtype=torch.float64)
    assert greedy(logits[None]) == [0]  # equal in float32: the first wins
    bias = SamplingParams(logit_bias={2: 0.5})
    narrow = make_sampler(bias, vocab_size=3).process(logits.bfloat16())
    assert narrow.dtype == torch.float32


# --- requests that cannot be honoured ------------------------------------------------------------


@pytest.mark.parametrize("token", [VOCAB, -1, "7"])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_outside_the_vocabulary_is_refused_by_name(field: str, token: Any) -> None:
    params = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else [token]})
    with pytest.raises(RequestError, match=rf"{field} names token {token!r}.*0 to {VOCAB - 1}"):
        make_sampler(params)


def test_bias_that_does_not_fit_float32_is_refused() -> None:
    with pytest.raises(RequestError, match=r"logit_bias of token 4 is -1e\+39"):
        make_sampler(SamplingParams(logit_bias={4: -1e39}))


def test_prompt_tokens_beyond_the_logits_are_not_penalised() -> None:
    sampler = make_sampler(SamplingParams(repetition_penalty=2.0), prompt=[1, VOCAB + 5])
    assert sampler.process(torch.ones(VOCAB)).tolist() == [1.0, 0.5] + [1.0] * (VOCAB - 2)


def test_unusable_rows_are_named_and_the_others_stay_usable() -> None:
    everything_ends = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=[0, 1, 2])
    logits = torch.zeros(6, 4)
    logits[1, 2] = math.nan
    logits[2, 0] = math.inf
    logits[3, 1] = math.nan
    params = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
        everything_ends,
        SamplingParams(temperature=1.0),
    ]
    samplers = [make_sampler(p, vocab_size=4) for p in params]
    with pytest.raises(LogitsError) as caught:
        choose(logits, samplers, [7] * 6)
    assert set(caught.value.rows) == {1, 2, 3, 4}
    assert "position 7 are NaN" in caught.value.rows[1]
    assert "infinite" in caught.value.rows[2]
    assert "NaN" in caught.value.rows[3]
    assert "min_tokens=2" in caught.value.rows[4]
    assert len(choose(logits[[0, 5]], [samplers[0], samplers[5]], [7, 7])) == 2


def test_masked_logits_are_never_chosen() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 9] = -50.0
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}):
        assert choose(logits, [make_sampler(SamplingParams(**options))], [0]) == [9]


# --- history -------------------------------------------------------------------------------------


def test_min_tokens_forbids_ends_until_that_many_tokens_were_generated() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 8] = 9.0, 8.0
    sampler = make_sampler(SamplingParams(min_tokens=2, stop_token_ids=[8]))
    chosen = []
    for position in range(3):
        assert sampler.is_greedy_plain == (position == 2)
        chosen += choose(logits, [sampler], [position])
        sampler.advance(chosen[-1])
    assert chosen == [0, 0, EOS]


def test_under_ignore_eos_min_tokens_leaves_eos_alone_but_not_stop_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 8] = 8.0, 9.0
    params = SamplingParams(min_tokens=2, stop_token_ids=[8], ignore_eos=True)
    assert choose(logits, [make_sampler(params)], [0]) == [EOS]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),  # the best token survives them
        ({"temperature": 0.5}, False),
        ({"logit_bias": {1: 0.5}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_plain_means_argmax_of_raw_logits(options: dict[str, Any], plain: bool) -> None:
    assert make_sampler(SamplingParams(**options)).is_greedy_plain is plain


def test_history_of_a_long_output_is_kept_whole() -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, max_tokens=3)
    sampler = make_sampler(params, prompt=[250, 1], vocab_size=300)
    output = [*range(200), *range(0, 200, 2)]  # verification may look past max_tokens
    for token in output:
        sampler.advance(token)
    scores = sampler.process(torch.ones(300))
    assert scores[0].item() == 0.5 - 0.25 * 2
    assert scores[199].item() == 0.5 - 0.25
    assert scores[250].item() == 0.5
    assert scores[299].item() == 1.0


# --- rows ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([VOCAB, 1500, 2049]))
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject, size: int) -> None:
    count = data.draw(st.integers(2, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = torch.randn(count, size, generator=generator).mul(2).to(dtype)
    histories = [data.draw(st.lists(tokens, max_size=5)) for _ in range(count)]
    params = [data.draw(params_strategy | st.just(SamplingParams())) for _ in range(count)]
    samplers = [
        make_sampler(p, [1, 2], history, vocab_size=size, seed=row)
        for row, (p, history) in enumerate(zip(params, histories, strict=True))
    ]
    positions = [data.draw(st.integers(0, 5000)) for _ in range(count)]
    together = choose(logits, samplers, positions)
    alone = [
        choose(logits[row : row + 1], [samplers[row]], [positions[row]])[0] for row in range(count)
    ]
    assert together == alone
    order = data.draw(st.permutations(range(count)))
    shuffled = choose(logits[order], [samplers[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert all(type(token) is int for token in together)


def test_a_draw_is_the_argmax_of_processed_scores_plus_public_noise() -> None:
    generator = torch.Generator().manual_seed(2)
    params = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2)
    for position in range(50):
        logits = torch.randn(1, 2000, generator=generator) * 2
        sampler = make_sampler(params, [5, 6], [7], vocab_size=2000, seed=77)
        noise = gumbel(77, position, torch.arange(2000))
        wanted = int((sampler.process(logits[0]).double() + noise).argmax())
        assert choose(logits, [sampler], [position]) == [wanted]


# --- noise ---------------------------------------------------------------------------------------


def reference_gumbel(seed: int, position: int, token: int) -> float:
    """The noise in plain integers and floats, from its description."""

    def mix(word: int) -> int:
        word ^= word >> 16
        word = word * 0x85EBCA6B % 2**32
        word ^= word >> 13
        word = word * 0xC2B2AE35 % 2**32
        return word ^ word >> 16

    low, high = seed % 2**32, (seed >> 32) % 2**32
    keys = []
    for salt in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344):
        base = mix(mix((low + salt) % 2**32) ^ high)
        keys.append(mix((base + position * 0x9E3779B1) % 2**32))
    first = mix(mix((token + keys[0]) % 2**32) ^ keys[1])
    second = mix(mix((token + keys[2]) % 2**32) ^ keys[3])
    uniform = (first * 2**32 + second + 0.5) / 2**64
    return -math.log(-math.log1p(-uniform))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    token=st.integers(0, 2**31 - 1),
)
def test_noise_follows_its_description(seed: int, position: int, token: int) -> None:
    wanted = reference_gumbel(seed, position, token)
    ids = torch.tensor([token])
    forms = [
        gumbel(seed, position, ids),
        gumbel(seed, torch.tensor([position]), ids),
        gumbel(torch.tensor([fold_seed(seed)]), torch.tensor([position]), ids),
        gumbel(torch.tensor([fold_seed(seed)]), position, ids),
    ]
    assert len({form.item() for form in forms}) == 1
    assert forms[0].item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_noise_of_a_subset_equals_the_same_entries_of_all_bit_for_bit() -> None:
    ids = torch.arange(49_152)
    positions = torch.tensor([[3], [900]])
    everything = gumbel(11, positions, ids)
    assert everything.shape == (2, 49_152)
    assert everything.dtype == torch.float64
    chosen = torch.randperm(49_152, generator=torch.Generator().manual_seed(0))[:997]
    assert torch.equal(gumbel(11, positions, chosen), everything[:, chosen])
    for token in (0, 1, 17, 49_151):
        assert torch.equal(gumbel(11, 900, ids[token : token + 1]), everything[1, token][None])
    seeds = torch.tensor([[fold_seed(11)], [fold_seed(-12)]])
    both = gumbel(seeds, positions, chosen)
    assert torch.equal(both[0], everything[0, chosen])
    assert torch.equal(both[1], gumbel(-12, 900, chosen))


def test_any_python_int_is_a_seed() -> None:
    assert fold_seed(5) == 5
    assert fold_seed(-1) == -1 == fold_seed(2**64 - 1)
    assert fold_seed(2**63) == -(2**63)
    big = [10**40, 10**40 + 1, -(10**40)]
    assert all(-(2**63) <= fold_seed(seed) < 2**63 for seed in big)
    assert len({gumbel(seed, 0, torch.tensor([0])).item() for seed in [*big, 0, 1, -1]}) == 6


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((observed.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def uniforms(noise: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise))


AXES = {
    "token": lambda: gumbel(3, 17, torch.arange(200_000)),
    "position": lambda: gumbel(3, torch.arange(200_000), torch.tensor(17)),
    "seed": lambda: gumbel(torch.arange(200_000), 3, torch.tensor(17)),
    "token stride": lambda: gumbel(0, 0, torch.arange(200_000) * 1024),
    "position and token": lambda: gumbel(8, torch.arange(400)[:, None], torch.arange(500)),
}


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_and_uncorrelated_along(axis: str) -> None:
    noise = AXES[axis]().flatten()
    u = uniforms(noise)
    count = u.numel()
    for bins in (16, 256, 1000):
        observed = torch.histc(u, bins, 0, 1)
        assert chi_square_p(observed, torch.full((bins,), count / bins)) > 1e-3
    centred = (u - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 16, 256, 500):
        correlation = float((centred[:-lag] * centred[lag:]).mean())
        assert abs(correlation) < 4 / math.sqrt(count), lag
    cells = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()  # neighbours, as pairs
    observed = torch.bincount(cells, minlength=256).double()
    assert chi_square_p(observed, torch.full((256,), observed.sum().item() / 256)) > 1e-3


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = gumbel(4, torch.arange(1000)[:, None], torch.arange(1000))
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


@settings(max_examples=150, deadline=None)
@given(
    position=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 20.0, 1e3, 1e6]),
    offset=st.sampled_from([0.0, 1e4, -1e7]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
)
@example(position=0, spread=0.0, offset=0.0, masked=0.0)
def test_finding_contenders_first_gives_the_exact_argmax(
    position: int, spread: float, offset: float, masked: float
) -> None:
    size = 5000
    generator = torch.Generator().manual_seed(position)
    scores = torch.randn(size, generator=generator) * spread + offset
    scores[torch.rand(size, generator=generator) < masked] = -math.inf
    scores[7] = offset
    wanted = int((scores.double() + gumbel(6, position, torch.arange(size))).argmax())
    assert gumbel_argmax(scores, None, position_keys(seed_bases(6), position)) == wanted


def token_with_first_draw(bits: int, keys: Sequence[int]) -> int:
    """The token id (as int32) whose first 32 random bits are `bits`: the hash run backwards."""

    def unmix(word: int) -> int:
        word ^= word >> 16
        word = word * pow(0xC2B2AE35, -1, 2**32) % 2**32
        word ^= word >> 13 ^ word >> 26
        word = word * pow(0x85EBCA6B, -1, 2**32) % 2**32
        return word ^ word >> 16

    token = (unmix(unmix(bits) ^ keys[1] % 2**32) - keys[0]) % 2**32
    return token - 2**32 if token >= 2**31 else token


@pytest.mark.parametrize(
    "bits", [0, 1, 2, 9, 1000, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 10, 2**32 - 70, 2**32 - 1000]
)
@pytest.mark.parametrize("margin", [1e-3, -1e-3])
def test_noise_at_the_ends_of_its_range_is_not_lost_among_contenders(
    bits: int, margin: float
) -> None:
    keys = position_keys(seed_bases(6), 9)
    ids = torch.arange(2000, dtype=torch.int32)
    ids[100] = token_with_first_draw(bits, keys)
    noise = gumbel(6, 9, ids)
    uniform = 1 - math.exp(-math.exp(-noise[100].item()))
    assert uniform == pytest.approx(bits / 2**32, abs=2**-31)
    scores = torch.full((2000,), -1e3)  # two tokens can win, the other one with ordinary noise
    scores[500] = 0.0
    scores[100] = float(noise[500] - noise[100]) + margin
    wanted = 100 if margin > 0 else 500
    assert int((scores.double() + noise).argmax()) == wanted
    assert gumbel_argmax(scores, ids, keys) == int(ids[wanted])


# --- distribution --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()),
)
def test_draws_follow_the_processed_distribution(options: dict[str, Any]) -> None:
    size, draws = 20, 20_000 if len(options) <= 2 else 8_000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(9)) * 1.5
    params = SamplingParams(**options)
    sampler = make_sampler(params, [2, 11], vocab_size=size, seed=123)
    probs = scores_of_transformers(params, logits, [2, 11], []).double().softmax(-1)
    rows = logits.expand(100, size)
    chosen: list[int] = []
    for start in range(0, draws, 100):
        chosen += choose(rows, [sampler] * 100, range(start, start + 100))
    counts = torch.bincount(torch.tensor(chosen), minlength=size).double()
    support = probs > 0
    assert counts[~support].sum() == 0
    common = probs * draws >= 5  # cells too small for a chi-square are merged
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert chi_square_p(observed, expected) > 1e-3


# --- logprobs ------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = logits.float().log_softmax(-1)
    got = logprobs(logits, [4, 0, 23], 5)
    for row, (entry, token) in enumerate(zip(got, [4, 0, 23], strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(wanted[row, token].item(), abs=1e-6)
        assert [value for _, value in entry.top] == pytest.approx(
            wanted[row].topk(5).values.tolist(), abs=1e-6
        )
        assert all(wanted[row, i].item() == pytest.approx(v, abs=1e-6) for i, v in entry.top)
    assert logprobs(logits[1], [0], 5) == [got[1]]


def test_equal_logprobs_are_listed_by_token_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0]])
    (entry,) = logprobs(logits, [4], 3)
    assert [token for token, _ in entry.top] == [1, 2, 3]
    assert logprobs(logits, [4], 0)[0].top == ()
    assert [token for token, _ in logprobs(logits, [4], 100)[0].top] == [1, 2, 3, 4, 0, 5]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", "8", "an integer"),
        ("max_tokens", 8.0, "an integer"),
        ("max_tokens", True, "an integer"),
        ("min_tokens", None, "an integer"),
        ("top_k", "5", "an integer"),
        ("top_logprobs", None, "an integer"),
        ("seed", "4", "an integer or None"),
        ("temperature", "0.5", "a number"),
        ("top_p", None, "a number"),
        ("presence_penalty", [0.5], "a number"),
        ("logprobs", 5, "True or False"),
        ("ignore_eos", "no", "True or False"),
        ("logit_bias", [(4, 1.0)], "a mapping"),
        ("logit_bias", {4: "1"}, "a mapping of token ids to numbers"),
        ("stop", "END", "a list of strings"),
        ("stop", [b"END"], "a list of strings"),
        ("stop", None, "a list of strings"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", "5", "a list of token ids"),
    ],
)
def test_values_of_another_type_are_refused_with_the_field_and_what_it_takes(
    field: str, value: Any, expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r} is not valid: expected {expected}")


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(8), temperature=np.float32(0.5), seed=np.int32(1))
    assert params == SamplingParams(max_tokens=8, temperature=0.5, seed=1)
