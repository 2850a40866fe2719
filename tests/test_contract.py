"""The contract (drafter-invariance): output depends on target, prompt, parameters and seed alone.

Every case is compared with the plainest run there is: the request alone, `none`, no prefix reuse,
the prompt prefilled at once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafters
import torch
from drafting import ScheduleRouter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whiflash_agents.engine.costs import CostModel, CostTable, Curve
from whiflash_agents.engine.drafters.candidates import Coupling
from whiflash_agents.engine.drafters.ddtree import DDTreeDrafter
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.drafters.eagle3 import Eagle3Drafter
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.request import GenerationResult, Request, SamplingParams
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.routing.cost_aware import CostAwareRouter
from whiflash_agents.engine.routing.entropy import EntropyRouter
from whiflash_agents.engine.routing.guard import Guard
from whiflash_agents.engine.routing.neural import NeuralRouter, RouterHead
from whiflash_agents.engine.routing.neural_acceptance import AcceptanceHead, NeuralAcceptance
from whiflash_agents.engine.routing.static import StaticRouter

ARMS = ["none", "lookup-chain", "lookup-tree", "random", "wrong", "perfect", "alternating"]
NEURAL_ARMS = ["eagle3", "eagle3-chain", "dflash", "ddtree", "neural-alternating"]
ROUTERS = ["entropy", "neural", "cost-aware", "cost-aware-trained"]
CHOICES = ("eagle3", "dflash", "ddtree", "lookup")
ARCHITECTURES = ["llama", "qwen3", "mistral"]


class AlternatingRouter(Router):
    """Another arm every round, by sequence and position."""

    name = "alternating"
    arms = ("lookup", "random", "wrong", "perfect")

    def route(self, sequences: Any) -> list[str]:
        arms = (*self.arms, "none")
        return [arms[(s.num_output + s.arrival) % len(arms)] for s in sequences]


def build(
    arm: str, answers: dict[str, list[int]], target: Any, options: EngineSettings
) -> WhiFlashEngine:
    scripted = {m: tiny.ScriptedDrafter(m, answers) for m in ("random", "wrong", "perfect")}
    lookup = LookupDrafter(width=3 if arm == "lookup-tree" else 1, shared_tokens=512)
    router: Any = AlternatingRouter()
    if arm != "alternating":
        router = StaticRouter("lookup" if arm.startswith("lookup") else arm)
    return WhiFlashEngine(
        target,
        router=router,
        drafters=scripted | {"lookup": lookup},
        settings=options,
        decode=tiny.text_of,
    )


def build_neural(
    arm: str, target: Any, options: EngineSettings, *, agreeing: bool, seed: int = 0
) -> WhiFlashEngine:
    """Neural drafters with random weights, or with weights made to agree with the Markov target."""
    eagle3 = tiny_drafters.agreeing_eagle3() if agreeing else tiny_drafters.random_eagle3()
    model = tiny_drafters.agreeing_dflash() if agreeing else tiny_drafters.random_dflash()
    shape = {"top_k": 1, "total_tokens": 5} if arm == "eagle3-chain" else {"top_k": 3}
    dflash = DFlashDrafter(model)
    router: Any
    if arm == "neural-alternating":
        router = ScheduleRouter((*CHOICES, "none"), seed)
    elif arm in ROUTERS:
        router = real_router(arm, target, seed)
    else:
        router = StaticRouter(arm.removesuffix("-chain"))
    # Costs that make a difference to routes and budgets.
    table = CostTable(Curve([1, 65], [0.01, 0.1]), draft={a: Curve([1], [0.01]) for a in CHOICES})
    return WhiFlashEngine(
        target,
        router=router,
        drafters={
            "eagle3": Eagle3Drafter(eagle3, depth=5, **({"total_tokens": 20} | shape)),
            "dflash": dflash,
            "ddtree": DDTreeDrafter(dflash.context, nodes=20),
            "lookup": LookupDrafter(shared_tokens=512),
        },
        settings=options,
        costs=CostModel(table),
        decode=tiny.text_of,
    )


def real_router(name: str, target: Any, seed: int) -> Router:
    torch.manual_seed(seed)
    if name == "entropy":
        return EntropyRouter(threshold=1.0)
    if name == "neural":
        return NeuralRouter(RouterHead(target.hidden_size), 0.0)
    if name == "cost-aware":
        return Guard(CostAwareRouter(CHOICES, exploration=0.3), window=20, hold=8)
    head = AcceptanceHead(target.hidden_size, CHOICES)
    return Guard(CostAwareRouter(CHOICES, NeuralAcceptance(head)), window=20, hold=8)


def plain(target: Any, request: Request) -> GenerationResult:
    options = EngineSettings(max_running=1, prefill_chunk=512, prefix_reuse=False, kv_tokens=512)
    engine = WhiFlashEngine(target, settings=options, decode=tiny.text_of)
    return engine.generate([request])[0]


def run_joining(
    engine: WhiFlashEngine, requests: list[Request], gaps: list[int]
) -> dict[str, GenerationResult]:
    """Requests join the batch `gaps[i]` steps apart, and leave when they end."""
    results: dict[str, GenerationResult] = {}
    streamed: dict[str, list[int]] = {r.id: [] for r in requests}
    texts: dict[str, str] = dict.fromkeys(streamed, "")
    waiting = list(zip(requests, gaps, strict=True))
    steps = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1] <= 0:
            engine.add(waiting.pop(0)[0])
        if waiting:
            waiting[0] = (waiting[0][0], waiting[0][1] - 1)
        for event in engine.step():
            streamed[event.id] += event.token_ids
            texts[event.id] += event.text or ""
            if event.result is not None:
                results[event.id] = event.result
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    for key, result in results.items():
        assert streamed[key] == result.token_ids
        assert result.text is None or texts[key] == result.text
    return results


def assert_same(got: GenerationResult, wanted: GenerationResult) -> None:
    assert got.token_ids == wanted.token_ids
    assert got.finish_reason == wanted.finish_reason
    assert got.stop_reason == wanted.stop_reason
    assert got.text == wanted.text
    assert (got.logprobs is None) == (wanted.logprobs is None)
    for a, b in zip(got.logprobs or [], wanted.logprobs or [], strict=True):
        assert a.token_id == b.token_id
        assert math.isclose(a.logprob, b.logprob, abs_tol=1e-3)
        assert len(a.top) == len(b.top)
    rounds = got.stats.rounds
    # The prompt's own token is not a round; all others belong to exactly one.
    assert sum(r.emitted for r in rounds) == len(got.token_ids) - (1 if got.token_ids else 0)
    assert all(r.accepted <= r.drafted for r in rounds)


sampling = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 16),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.8]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {5: 2.0, tiny.EOS: 3.0}, {7: -50.0}]),
        "stop": st.sampled_from([[], ["A"], ["7Q", "B"], ["zz"]]),
        "stop_token_ids": st.sampled_from([[], [11, 12, 13, 14]]),
        "ignore_eos": st.booleans(),
        "include_stop": st.booleans(),
        "seed": st.integers(0, 2**40),
        "logprobs": st.booleans(),
        "top_logprobs": st.sampled_from([0, 0, 3]),
        "min_tokens": st.sampled_from([0, 0, 1]),
    }
).map(lambda fields: SamplingParams(**fields))

prompts = st.builds(
    lambda shared, own: [3 + (i * 7) % 60 for i in range(shared)] + own,
    st.sampled_from([0, 0, 20, 75]),
    st.lists(st.integers(3, tiny.VOCAB - 1), min_size=1, max_size=12),
)


def draw_requests(
    data: st.DataObject, target: Any, most: int
) -> tuple[list[Request], dict[str, GenerationResult]]:
    """Up to `most` requests, and what the plainest run gives for each."""
    n = data.draw(st.integers(1, most), label="sequences")
    requests = [
        Request(f"r{i}", data.draw(prompts), data.draw(sampling, label=f"sampling {i}"))
        for i in range(n)
    ]
    wanted = {r.id: plain(target, r) for r in requests}
    for request in requests:
        if data.draw(st.booleans(), label="recorded"):
            request.recorded_ids = wanted[request.id].token_ids
    return requests, wanted


def draw_options(data: st.DataObject, **more: Any) -> EngineSettings:
    return EngineSettings(
        max_running=data.draw(st.integers(1, 7), label="max_running"),
        prefill_chunk=data.draw(st.sampled_from([3, 16, 512]), label="prefill_chunk"),
        prefix_reuse=data.draw(st.booleans(), label="prefix_reuse"),
        kv_tokens=data.draw(st.sampled_from([192, 320, 4096]), label="kv_tokens"),
        max_draft_nodes=data.draw(st.sampled_from([1, 5, 32]), label="max_draft_nodes"),
        **more,
    )


def draw_neural_options(data: st.DataObject) -> EngineSettings:
    return draw_options(
        data,
        catch_up=data.draw(st.sampled_from(["lazy", "lazy", "eager"]), label="catch_up"),
        draft_prefill=data.draw(st.sampled_from(["kv-only", "full"]), label="draft_prefill"),
        max_backlog=data.draw(st.sampled_from([1, 8, 512]), label="max_backlog"),
        verify_budget=data.draw(st.sampled_from(["all", "gain"]), label="verify_budget"),
    )


def check(
    engine: WhiFlashEngine,
    requests: list[Request],
    wanted: dict[str, GenerationResult],
    data: st.DataObject,
) -> None:
    gaps = [data.draw(st.integers(0, 6), label="gap") for _ in requests]
    got = run_joining(engine, requests, gaps)
    for request in requests:
        assert_same(got[request.id], wanted[request.id])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("arm", ARMS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_output_is_the_same_whatever_drafts_and_whoever_else_runs(
    architecture: str, arm: str, data: st.DataObject
) -> None:
    target = tiny.target(architecture)
    requests, wanted = draw_requests(data, target, 7)
    answers = {key: result.token_ids for key, result in wanted.items()}
    check(build(arm, answers, target, draw_options(data)), requests, wanted, data)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("arm", NEURAL_ARMS + ROUTERS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_output_is_the_same_with_neural_drafters(
    architecture: str, arm: str, data: st.DataObject
) -> None:
    target = tiny.target(architecture)
    requests, wanted = draw_requests(data, target, 5)
    options, seed = draw_neural_options(data), data.draw(st.integers(0, 99))
    check(build_neural(arm, target, options, agreeing=False, seed=seed), requests, wanted, data)


@pytest.mark.parametrize("arm", NEURAL_ARMS + ROUTERS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_output_is_the_same_with_neural_drafters_that_agree(arm: str, data: st.DataObject) -> None:
    """Long accepted runs, so that stops fall inside of them and contexts grow by many rows."""
    target = tiny_drafters.markov_target()
    requests, wanted = draw_requests(data, target, 5)
    options, seed = draw_neural_options(data), data.draw(st.integers(0, 99))
    check(build_neural(arm, target, options, agreeing=True, seed=seed), requests, wanted, data)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate_token_for_token(architecture: str) -> None:
    reference = tiny.model(architecture)
    target = tiny.target(architecture)
    for length in (1, 9, 40):
        prompt = [3 + (i * 5) % 80 for i in range(length)]
        ids = torch.tensor([prompt])
        wanted = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False
        )[0, length:].tolist()
        got = plain(target, Request("a", prompt, SamplingParams(max_tokens=60)))
        assert got.token_ids == wanted


def test_drafts_that_agree_are_accepted_and_those_that_do_not_are_not() -> None:
    target = tiny.target("llama")
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    answers = {"a": plain(target, request).token_ids}
    options = EngineSettings(kv_tokens=512)
    perfect = build("perfect", answers, target, options).generate([request])[0]
    wrong = build("wrong", answers, target, options).generate([request])[0]
    # 39 tokens after the prompt's own, seven a round (six drafts and the bonus token)
    assert [r.emitted for r in perfect.stats.rounds] == [7, 7, 7, 7, 7, 4]
    assert perfect.stats.num_accepted_draft_tokens == 39 - 6 + 1 - 1
    assert wrong.stats.num_accepted_draft_tokens == 0
    assert len(wrong.stats.rounds) == 39
    assert perfect.token_ids == wrong.token_ids


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arm", ["none", "perfect"])
def test_sampling_follows_the_targets_distribution_with_and_without_drafting(arm: str) -> None:
    from scipy.stats import chisquare

    target, draws, prompt = tiny.target("qwen3"), 20_000, [4, 9, 13]
    net = tiny.model("qwen3")
    with torch.no_grad():
        first = torch.softmax(net(torch.tensor([prompt])).logits[0, -1].double() / 1.5, -1)
        after = torch.tensor([[*prompt, t] for t in range(tiny.VOCAB)])
        second = torch.softmax(net(after).logits[:, -1].double() / 1.5, -1)
    expected = (first @ second).numpy() * draws
    frequent = expected >= 5
    # The second token is drafted: for each of twelve values in turn, so mostly wrongly.
    answers = {f"s{i}": [0, i % 12 + 3, 5] for i in range(draws)}
    params = {"max_tokens": 2 if arm == "none" else 3, "temperature": 1.5, "ignore_eos": True}
    options = EngineSettings(max_running=100, kv_tokens=100 * 128, max_draft_nodes=4)
    engine = build(arm, answers, target, options)
    requests = [Request(f"s{i}", prompt, SamplingParams(seed=i, **params)) for i in range(draws)]
    results = engine.generate(requests)
    assert (sum(r.stats.num_accepted_draft_tokens for r in results) > 100) == (arm != "none")
    counts = np.bincount([r.token_ids[1] for r in results], minlength=tiny.VOCAB)
    f_obs = [*counts[frequent], counts[~frequent].sum()]
    f_exp = [*expected[frequent], expected[~frequent].sum()]
    assert chisquare(f_obs, f_exp).pvalue > 1e-3


# Drafters that agree ------------------------------------------------------------------------------


def acceptance_length(arm: str, temperature: float, seeds: range) -> float:
    """Mean tokens per round over requests whose output fills whole rounds of six."""
    options = EngineSettings(kv_tokens=4096, max_draft_nodes=32)
    engine = build_neural(arm, tiny_drafters.markov_target(), options, agreeing=True)
    requests = [
        Request(
            f"r{seed}",
            [3 + seed % 12, 7, 3 + (5 * seed) % 12],
            SamplingParams(max_tokens=1 + 6 * 20, temperature=temperature, seed=seed),
        )
        for seed in seeds
    ]
    results = engine.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == plain(tiny_drafters.markov_target(), request).token_ids
    rounds = [r for result in results for r in result.stats.rounds]
    return 1.0 + sum(r.accepted for r in rounds) / len(rounds)


@pytest.mark.parametrize("arm", ["eagle3", "eagle3-chain", "dflash", "ddtree"])
def test_drafters_that_agree_are_accepted_to_the_last_token(arm: str) -> None:
    """Five drafted tokens and the bonus token."""
    assert acceptance_length(arm, 0.0, range(6)) > 5.9


@pytest.mark.parametrize(
    ("arm", "at_least", "gain"),
    [("eagle3", 5.8, 0.3), ("eagle3-chain", 5.3, 1.0), ("dflash", 3.5, 0.3), ("ddtree", 4.5, 0.05)],
)
def test_at_temperature_1_drafts_agree_because_they_carry_the_targets_noise(
    arm: str, at_least: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gain` over noise of another seed. A block's slots do not know what the others drew, so that
    the noise helps less there; a tree has most of the likely tokens anyway."""
    seeds = range(6)
    coupled = acceptance_length(arm, 1.0, seeds)
    of = Coupling.of.__func__  # type: ignore[attr-defined]

    def with_other_noise(cls: Any, sequences: Any, device: Any) -> Coupling:
        coupling = of(cls, sequences, device)
        coupling.seeds += 1_000_003
        return coupling

    monkeypatch.setattr(Coupling, "of", classmethod(with_other_noise))
    apart = acceptance_length(arm, 1.0, seeds)
    assert coupled > at_least
    assert coupled > apart + gain
