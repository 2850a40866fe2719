"""The engine: adding, generating, failures, and long runs."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from small_engines import AlternatingRouter, ask, assert_idle, build, plain, run, text
from transformers import AutoModelForCausalLM, LlamaConfig

from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.errors import RequestError, SettingsError, WhiFlashError
from whiflash_agents.engine.request import Request, SamplingParams
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.routing.static import StaticRouter
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.target import Target, TargetBatch, TargetOutput
from whiflash_agents.engine.telemetry import RoundRecord

# Adding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("a", []), "empty prompt"),
        (ask("a", [5, 96]), "prompt token 96 is outside the target's vocabulary of 96"),
        (ask("a", [-1, 5]), "prompt token -1 is outside"),
        (Request("a", [5], SamplingParams(), [3, 96]), "recorded token 96 is outside"),
        (Request("a", [5], SamplingParams(), [-1]), "recorded token -1 is outside"),
        (Request("a", "text"), "must be flat sequences of integers"),  # type: ignore[arg-type]
        (Request("a", None), "must be flat sequences of integers"),  # type: ignore[arg-type]
        (ask("a", [5, 6.0]), "must be flat sequences of integers"),
        (Request("a", [5], SamplingParams(), [[5, 6]]), "must be flat sequences of integers"),
        (ask("a", stop_token_ids=[96]), "stop_token_ids names token 96"),
        (ask("a", logit_bias={96: 1.0}), "logit_bias names token 96"),
    ],
)
def test_an_impossible_request_is_refused_and_leaves_nothing_behind(
    request_: Request, message: str
) -> None:
    engine = build("lookup")
    with pytest.raises(RequestError, match=message):
        engine.add(request_)
    assert_idle(engine)
    assert engine.generate([ask("a")])[0].token_ids == plain(ask("a"))


def test_stop_strings_without_a_decoder_are_refused() -> None:
    engine = WhiFlashEngine(tiny.target(), settings=EngineSettings(kv_tokens=128))
    with pytest.raises(RequestError, match="decode"):
        engine.add(ask("a", stop=["x"]))
    assert_idle(engine)


def test_an_id_in_use_is_refused_and_can_be_used_again_afterwards() -> None:
    engine = build()
    engine.add(ask("a"))
    with pytest.raises(RequestError, match="'a' is already in use"):
        engine.add(ask("a"))
    engine.step()
    with pytest.raises(RequestError, match="'a' is already in use"):
        engine.add(ask("a"))
    assert run(engine)["a"].token_ids == plain(ask("a"))
    engine.add(ask("a", [9, 8]))
    assert run(engine)["a"].token_ids == plain(ask("a", [9, 8]))


def test_the_callers_prompt_is_not_changed() -> None:
    request = ask("a")
    build().generate([request])
    assert request.prompt_ids == [5, 6, 7]


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_token_ids_may_come_as_a_tensor_or_an_array(kind: Any) -> None:
    wanted = plain(ask("a", max_tokens=20))
    request = Request("a", kind([5, 6, 7]), ask("a", max_tokens=20).sampling, kind(wanted))
    result = build("lookup").generate([request])[0]
    assert result.token_ids == wanted
    assert {type(t) for t in result.token_ids} == {int}
    assert result.stats.num_accepted_draft_tokens > 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"prefill_chunk": 0},
        {"max_draft_nodes": 0},
        {"kv_tokens": 63},
        {"kv_tokens": "64"},
        {"max_running": 2.0},
        {"max_running": None},
    ],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(SettingsError, match=f"{name}={value!r}"):
        EngineSettings(**wrong)


def test_a_router_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"router 'eagle9'.*available: lookup, none"):
        build("eagle9")


def test_a_drafter_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"drafter 'eagle9'.*available: none, lookup"):
        build(StaticRouter("eagle9"))


def test_without_kv_tokens_the_arena_holds_all_running_contexts_if_memory_allows() -> None:
    engine = WhiFlashEngine(tiny.target(), settings=EngineSettings(max_running=2))
    assert engine._cache.positions == 2 * (512 + 64)


# Generating --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_tokens", [10**12, 10**17 - 1])
@pytest.mark.parametrize("known", [True, False])
def test_kv_tokens_beyond_the_memory_are_refused_with_the_size_and_the_remedy(
    kv_tokens: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:  # then the allocation itself tells
        monkeypatch.setattr("whiflash_agents.engine.target.device_memory", lambda device: None)
    needed = kv_tokens * tiny.target().plane.bytes_per_position(torch.float32) / 2**30
    with pytest.raises(SettingsError, match=rf"kv_tokens={kv_tokens} needs .*lower") as caught:
        WhiFlashEngine(tiny.target(), settings=EngineSettings(kv_tokens=kv_tokens))
    assert f"{needed:,.1f} GiB" in str(caught.value)


def test_generate_of_nothing_is_nothing() -> None:
    engine = build()
    assert engine.generate([]) == []
    assert_idle(engine)


def test_generate_returns_results_in_the_order_of_the_requests() -> None:
    requests = [ask(str(i), [5 + i], 20 - 3 * i) for i in range(6)]
    results = build(max_running=3).generate(requests)
    assert [r.id for r in results] == [r.id for r in requests]
    assert [r.token_ids for r in results] == [plain(r) for r in requests]


def test_generate_adds_all_requests_or_none() -> None:
    engine = build()
    with pytest.raises(RequestError, match="empty prompt"):
        engine.generate([ask("a"), ask("b"), ask("c", [])])
    assert_idle(engine)
    with pytest.raises(RequestError, match="already in use"):
        engine.generate([ask("a"), ask("a")])
    assert_idle(engine)
    assert engine.generate([ask("a")])[0].token_ids == plain(ask("a"))


def test_generate_leaves_requests_alone_that_were_added_before() -> None:
    engine = build()
    engine.add(ask("added", [9, 8], 30))
    engine.step()
    with pytest.raises(RequestError, match="'added' is already in use"):
        engine.generate([ask("mine"), ask("added")])
    assert engine.generate([ask("mine")])[0].token_ids == plain(ask("mine"))
    assert engine.num_running == 1
    events = engine.step()
    tokens = [t for e in events for t in e.token_ids]
    while engine.has_work:
        tokens += [t for e in engine.step() for t in e.token_ids]
    # The first token came with the first step.
    assert tokens == plain(ask("added", [9, 8], 30))[1:]


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_forward_that_fails_poisons_nothing(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing unwritten may pass for a computed prefix, wherever the run was interrupted."""
    engine = build()
    # Whatever is read before it was written must show.
    for data in engine._cache._arenas:
        data.fill_(torch.nan)
    forward, calls = Target.forward, itertools.count(1)

    def interrupted(self: Target, *args: Any, **kwargs: Any) -> TargetOutput:
        if next(calls) == failing:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    requests = [ask("a", range(3, 43)), ask("b", range(3, 33))]
    monkeypatch.setattr(Target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert_idle(engine)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.finish_reason == "length"
        assert result.token_ids == plain(request)


# Failures ----------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, engine: WhiFlashEngine, key: str, after: int) -> None:
    """The logits of one sequence are NaN once it has `after` tokens of output."""
    forward = Target.forward

    def spoiled(self: Target, batch: TargetBatch, *args: Any, **kwargs: Any) -> TargetOutput:
        output = forward(self, batch, *args, **kwargs)
        sequence = engine._sequences.get(key)
        if sequence is None or sequence.num_output < after:
            return output
        logits, first = output.logits.clone(), 0
        for row in batch.rows:
            if sequence.extent is not None and row.start == sequence.extent.start:
                mine = [
                    i for i, at in enumerate(batch.logit_rows) if first <= at < first + row.count
                ]
                logits[mine] = math.nan
            first += row.count
        return TargetOutput(logits, output.hidden, output.features)

    monkeypatch.setattr(Target, "forward", spoiled)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after", [0, 3])
def test_logits_that_admit_no_token_end_one_request_with_an_error(
    after: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ask(key, [5 + i, 9], 12, temperature=temperature, seed=i)
        for i, key in enumerate(("before", "bad", "behind"))
    ]
    wanted = {r.id: plain(r) for r in requests}
    engine = build("lookup")
    spoil(monkeypatch, engine, "bad", after)
    results = {r.id: r for r in engine.generate(requests)}
    bad = results["bad"]
    assert bad.finish_reason == "error"
    assert "bfloat16 or float32" in (bad.error or "")
    assert bad.token_ids == wanted["bad"][:after]
    assert sum(r.emitted for r in bad.stats.rounds) == max(0, after - 1)
    for key in ("before", "behind"):
        assert results[key].finish_reason == "length"
        assert results[key].error is None
        assert results[key].token_ids == wanted[key]
        assert all(r.emitted for r in results[key].stats.rounds)  # not even delayed
    assert_idle(engine)
    monkeypatch.undo()
    again = engine.generate([requests[1]])[0]
    assert again.cached_tokens == 0  # what led to the error is not built upon
    assert again.token_ids == wanted["bad"]


def test_the_text_of_a_request_that_failed_ends_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was held back as the possible beginning of a stop string is released."""
    held = tiny.text_of(plain(ask("bad", max_tokens=6))[:3])
    engine = build()
    spoil(monkeypatch, engine, "bad", 3)
    events = list(engine.stream(ask("bad", max_tokens=6, stop=[held + "~~"])))
    result = events[-1].result
    assert result is not None
    assert result.finish_reason == "error"
    assert result.text == "".join(e.text or "" for e in events) == held
    assert held == tiny.text_of(result.token_ids)


class BrokenDrafter(tiny.ScriptedDrafter):
    """Breaks one rule of the protocol."""

    def __init__(self, fault: str) -> None:
        super().__init__("broken", {})
        self.fault = fault

    def _draft(self, sequence: SequenceState, limit: DraftLimit) -> DraftTree:
        root = sequence.tokens[-1]
        if self.fault == "nodes":
            tree = DraftTree(root)
            for token in range(limit.nodes + 1):
                tree.add(0, token)
            return tree
        if self.fault == "depth":
            return DraftTree.chain(root, range(limit.depth + 1))
        if self.fault == "token":
            return DraftTree.chain(root, [tiny.VOCAB])
        return DraftTree.chain((root + 1) % tiny.VOCAB, [1])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nodes", r"'broken' proposed 9 nodes of depth 1 for request 'a'; its limit was 8 nodes"),
        ("depth", r"'broken' proposed 5 nodes of depth 5 for request 'a'; .* of depth 4"),
        ("root", r"'broken' rooted its tree at token \d+"),
        ("token", r"'broken' proposed tokens \d+ to 96 for request 'a'"),
    ],
)
def test_a_drafter_that_breaks_its_limits_is_named(fault: str, message: str) -> None:
    engine = build(StaticRouter("broken"), {"broken": BrokenDrafter(fault)}, max_draft_nodes=8)
    engine.add(ask("a", max_tokens=6))
    engine.step()
    with pytest.raises(WhiFlashError, match=message):
        engine.step()


def test_a_router_that_chooses_what_it_did_not_announce_is_named() -> None:
    router = AlternatingRouter("lookup")
    router._cycle = ("lookup", "eagle9")
    engine = build(router)
    with pytest.raises(WhiFlashError, match=r"'alternating' chose 'eagle9'.*\(lookup\)"):
        engine.generate([ask("a")])
    assert_idle(engine)


# Long runs ---------------------------------------------------------------------------------------


def test_nothing_grows_with_the_number_of_requests() -> None:
    gc.collect()
    before = sum(isinstance(o, SequenceState) for o in gc.get_objects())
    drafter = tiny.ScriptedDrafter("wrong", {str(i): [7] * 6 for i in range(200)})
    engine = build(AlternatingRouter("lookup", "wrong"), {"wrong": drafter})
    shared = [3 + i % 50 for i in range(30)]
    for i in range(200):
        engine.add(ask(str(i), [*shared[: i % 31], 5 + i % 90], 1 + i % 6))
        if i % 3 == 0:
            engine.step()
        if i % 7 == 0 and str(i - 1) in engine._sequences:
            engine.abort(str(i - 1))
    assert len(run(engine)) > 0
    assert_idle(engine)
    assert engine._sequences == {}
    assert engine._unclaimed == []
    assert engine._scheduler._awaits == {}
    assert len(engine._scheduler._retained) <= 64
    assert drafter._consumed == {}
    lookup: Any = engine.drafters["lookup"]
    assert lookup._states == {}
    gc.collect()
    assert sum(isinstance(o, SequenceState) for o in gc.get_objects()) == before


@pytest.fixture(scope="module")
def long_model() -> Iterator[Any]:
    """Smaller than the others, with a long context."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2304,
        eos_token_id=None,
        pad_token_id=0,
    )
    net = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.8)
    return net


def test_two_thousand_rounds_do_not_drift(long_model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    wanted = long_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2001, do_sample=False
    )[0, 3:].tolist()
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=2001))
    engine = WhiFlashEngine(Target(long_model), settings=EngineSettings(kv_tokens=2304))
    result = engine.generate([request])[0]
    assert result.token_ids == wanted
    assert len(result.stats.rounds) == 2000


# Routers -----------------------------------------------------------------------------------------


class Observer(Router):
    """Alternates between two arms and writes down what it is told."""

    name = "observer"
    arms = ("lookup",)
    signals = frozenset({"entropy", "hidden"})

    def __init__(self) -> None:
        self.bound: Any = None
        self.seen: dict[str, list[RoundRecord]] = {}
        self.known: list[Any] = []
        self.closed: list[str] = []

    def bind(self, surroundings: Any) -> None:
        self.bound = surroundings

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        self.known += [s.signals for s in sequences]
        return ["lookup" if s.num_output % 2 else "none" for s in sequences]

    def predicted(self, sequence: SequenceState) -> float:
        return 1.5

    def observe(self, sequence: SequenceState, record: RoundRecord) -> None:
        assert sequence.id not in self.closed
        self.seen.setdefault(sequence.id, []).append(record)

    def close(self, sequence: SequenceState) -> None:
        self.closed.append(sequence.id)

    def figures(self) -> dict[str, Any]:
        return {"rounds": sum(map(len, self.seen.values()))}


def test_a_router_sees_every_round_once_and_every_end_after_them() -> None:
    router = Observer()
    engine = build(router)
    requests = [ask(f"{i}", text(i, 6 + i), 9) for i in range(3)]
    results = engine.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert router.seen[request.id] == result.stats.rounds
        assert all(r.predicted == 1.5 and r.round_seconds > 0 for r in result.stats.rounds)
        assert result.token_ids == plain(request)
    assert sorted(router.closed) == ["0", "1", "2"]
    assert engine.totals.router == {"rounds": sum(len(r.stats.rounds) for r in results)}
    assert 0 < engine.totals.route_seconds < engine.totals.step_seconds
    assert {"draft lookup", "verify"} <= engine.totals.costs.keys()
    aborted = ask("gone", text(9, 4), 50)
    engine.add(aborted)
    engine.step()
    engine.abort("gone")
    assert router.closed[-1] == "gone"


def test_signals_are_those_of_the_distribution_that_chose_the_last_token() -> None:
    router = Observer()
    request = ask("a", text(3, 10), 6)
    result = build(router).generate([request])[0]
    net = tiny.model("llama")
    at = [r.position for r in result.stats.rounds]
    for position, signals in zip(at, router.known, strict=True):
        before = torch.tensor([[*request.prompt_ids, *result.token_ids[: position - 1]]])
        with torch.no_grad():
            output = net(before, output_hidden_states=True)
        logits = output.logits[0, -1].double()
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        assert signals.entropy == pytest.approx(float(wanted), abs=1e-4)
        best = logits.topk(2).values
        assert signals.margin == pytest.approx(float(best[0] - best[1]), abs=1e-3)
        torch.testing.assert_close(
            signals.hidden, output.hidden_states[-1][0, -1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("answer", [[], ["none", "none"], [None], "none"])
def test_a_route_of_another_form_is_told(answer: Any) -> None:
    class Wrong(Observer):
        def route(self, sequences: Sequence[SequenceState]) -> Any:
            return answer

    engine = build(Wrong())
    engine.add(ask("a", text(1, 5), 5))
    with pytest.raises(WhiFlashError, match=r"router 'observer' returned .* for 1 sequences"):
        run(engine)


@pytest.mark.parametrize("router", [object(), 7])
def test_what_is_no_router_is_refused(router: Any) -> None:
    with pytest.raises(SettingsError, match=r"no engine\.routing\.base\.Router"):
        build(router)
