"""Round labels against what engines really accept, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import drafting
import pytest
import tiny
import tiny_drafters
import torch
from small_engines import ask, text

from whiflash_agents.engine import EngineSettings, GenerationResult, Request, Target, WhiFlashEngine
from whiflash_agents.engine.drafters.base import Drafter
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.errors import ContextLengthError, RequestError, SettingsError
from whiflash_agents.engine.routing.base import Router
from whiflash_agents.engine.routing.labels import RoundLabeller, RoundLabels
from whiflash_agents.engine.routing.signals import Signals
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.telemetry import RoundRecord

NEURAL = ("eagle3", "dflash", "ddtree")
ARMS = (*NEURAL, "lookup")


def random_drafters() -> dict[str, Drafter]:
    return {**drafting.neural_drafters(), "lookup": LookupDrafter()}


def float32_drafters() -> dict[str, Drafter]:
    neural = drafting.neural_drafters(
        eagle=tiny_drafters.random_eagle3(), block=tiny_drafters.random_dflash()
    )
    return {**neural, "lookup": LookupDrafter()}


def agreeing_drafters() -> dict[str, Drafter]:
    """Arms that differ in how far they see, over networks that know the target."""
    neural = drafting.neural_drafters(
        eagle=tiny_drafters.agreeing_eagle3(), block=tiny_drafters.agreeing_dflash(), depth=4
    )
    return {**neural, "lookup": LookupDrafter(max_tokens=12, shared_tokens=0)}


@cache
def setting(kind: str) -> tuple[Target, Any]:
    if kind == "float64":
        return drafting.target(), random_drafters
    if kind == "float32":
        return tiny.target(), float32_drafters
    return tiny_drafters.markov_target(), agreeing_drafters


class Plan(Router):
    """For each request: `before` until output position `since`, plain from there to `at`, and `arm`
    from then on. Keeps what the engine signalled."""

    name = "plan"
    signals = frozenset({"entropy", "hidden"})

    def __init__(self, arm: str, points: Mapping[str, tuple[int, int]], before: str) -> None:
        self.arms = tuple({arm, before} - {"none"})
        self.arm, self.before, self.points = arm, before, points
        self.seen: dict[int, Signals] = {}

    def route(self, sequences: Sequence[SequenceState]) -> list[str]:
        return [self._one(s) for s in sequences]

    def _one(self, sequence: SequenceState) -> str:
        assert sequence.signals is not None
        self.seen[sequence.num_output] = sequence.signals
        since, at = self.points[sequence.id]
        if sequence.num_output >= at:
            return self.arm
        return "none" if sequence.num_output >= since else self.before


def engine_of(kind: str, router: Router | str) -> WhiFlashEngine:
    target, make = setting(kind)
    settings = EngineSettings(kv_tokens=2048, prefill_chunk=16)
    return WhiFlashEngine(target, router=router, drafters=make(), settings=settings)


def run(kind: str, router: Router | str, request: Request) -> GenerationResult:
    return engine_of(kind, router).generate([request])[0]


def forced(
    kind: str, request: Request, arm: str, points: Sequence[tuple[int, int]], before: str = "none"
) -> list[RoundRecord]:
    """The round at position `at` of each (since, at): see `Plan`."""
    by_id = {f"{since} {at}": (since, at) for since, at in points}
    engine = engine_of(kind, Plan(arm, by_id, before))
    results = engine.generate([replace(request, id=key) for key in by_id])
    return [
        next(r for r in result.stats.rounds if r.position == at)
        for result, (_, at) in zip(results, points, strict=True)
    ]


def label(kind: str, request: Request, output: Sequence[int], **options: Any) -> RoundLabels:
    target, make = setting(kind)
    options = {"prefill_chunk": 7, "lanes": 3} | options
    return RoundLabeller(target, make(), **options).label(request, output)


REQUESTS: Mapping[str, Request] = {
    "greedy": ask("a", text(1, 20), 18),
    "one token of prompt": ask("b", (9,), 14),
    "sampled": ask("c", text(2, 13), 16, temperature=0.8, seed=5),
    "penalised": ask("d", text(3, 9), 16, repetition_penalty=1.3),
    "a text that repeats itself": ask("e", text(4, 6) * 4, 20),
    "longer than a chunk": ask("f", text(5, 40), 12),
}
MARKOV: Mapping[str, Request] = {
    "greedy": ask("a", (3, 9, 12, 7, 4, 5), 30),
    "sampled": ask("b", (14, 6, 3, 10), 30, temperature=1.0, seed=5),
}
CASES = [
    *(("float64", name) for name in REQUESTS),
    *(("float32", name) for name in ("greedy", "sampled")),
    *(("agreeing", name) for name in MARKOV),
]


def request_of(kind: str, name: str) -> Request:
    return (MARKOV if kind == "agreeing" else REQUESTS)[name]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_labels_are_what_engines_with_one_arm_accept_in_each_of_their_rounds(
    kind: str, name: str
) -> None:
    request = request_of(kind, name)
    output = run(kind, "none", request).token_ids
    labels = label(kind, request, output)
    assert labels.arms == ARMS
    assert labels.num_rounds == len(output) - 1
    for arm in ARMS:
        result = run(kind, arm, request)
        assert result.token_ids == output
        column = labels.arms.index(arm)
        for record in result.stats.rounds:
            at = record.position - 1
            got = labels.acceptance[at, column].item(), labels.drafted[at, column].item()
            assert got == (record.emitted, record.drafted), (arm, record.position)


@pytest.mark.parametrize(("kind", "name"), [("float64", "sampled"), ("agreeing", "sampled")])
@pytest.mark.parametrize("arm", NEURAL)
def test_labels_are_what_an_arm_accepts_at_any_position_it_is_first_chosen_at(
    kind: str, name: str, arm: str
) -> None:
    request = request_of(kind, name)
    output = run(kind, "none", request).token_ids
    labels = label(kind, request, output)
    rounds = forced(kind, request, arm, [(0, at) for at in range(1, len(output))])
    assert {r.drafter for r in rounds} == {arm}
    assert labels.acceptance_of([arm])[:, 0].tolist() == [r.emitted for r in rounds]
    assert labels.drafted_of([arm])[:, 0].tolist() == [r.drafted for r in rounds]


def test_labels_of_lookup_follow_its_own_rounds_up_to_the_last_one_before() -> None:
    request = MARKOV["greedy"]
    output = run("agreeing", "none", request).token_ids
    labels = label("agreeing", request, output)
    own = [r.position for r in run("agreeing", "lookup", request).stats.rounds]
    # Its own rounds before the last one that begins no later, then plain ones.
    points = [(max(p for p in own if p <= at), at) for at in range(1, len(output))]
    assert any(since < at for since, at in points)  # else this were but a run of its own
    rounds = forced("agreeing", request, "lookup", points, before="lookup")
    assert labels.acceptance_of(["lookup"])[:, 0].tolist() == [r.emitted for r in rounds]
    assert labels.drafted_of(["lookup"])[:, 0].tolist() == [r.drafted for r in rounds]
    assert len({r.drafted for r in rounds}) > 2  # its draft length did follow its success


@pytest.mark.parametrize("kind", ["float64", "agreeing"])
def test_signals_are_what_a_router_is_shown(kind: str) -> None:
    request = request_of(kind, "greedy")
    plan = Plan("none", {request.id: (0, 0)}, "none")
    output = run(kind, plan, request).token_ids
    labels = label(kind, request, output)
    assert sorted(plan.seen) == list(range(1, len(output)))
    assert labels.hidden.dtype == torch.float32
    assert not labels.hidden.is_inference()  # it is to be learnt from
    for at, signals in plan.seen.items():
        assert signals.hidden is not None
        torch.testing.assert_close(labels.hidden[at - 1], signals.hidden.float())
        assert labels.entropy[at - 1].item() == pytest.approx(signals.entropy, rel=1e-4)
        assert labels.margin[at - 1].item() == pytest.approx(signals.margin, rel=1e-4)


@pytest.mark.parametrize("options", [{"lanes": 1}, {"lanes": 40}, {"prefill_chunk": 512}])
def test_labels_depend_neither_on_lanes_nor_on_chunks(options: dict[str, Any]) -> None:
    request = REQUESTS["longer than a chunk"]
    output = run("float64", "none", request).token_ids
    first, second = label("float64", request, output), label("float64", request, output, **options)
    assert torch.equal(first.acceptance, second.acceptance)
    assert torch.equal(first.drafted, second.drafted)
    torch.testing.assert_close(first.hidden, second.hidden)


def test_one_labeller_labels_text_after_text_as_a_new_one_would() -> None:
    target, make = setting("float64")
    requests = [REQUESTS[n] for n in ("longer than a chunk", "a text that repeats itself")]
    outputs = [run("float64", "none", request).token_ids for request in requests]
    # No room behind the longest text but what drafting needs.
    longest = max(len(r.prompt_ids) + len(o) for r, o in zip(requests, outputs, strict=True))
    labeller = RoundLabeller(target, make(), max_length=longest, lanes=3)
    for request, output in [*zip(requests, outputs, strict=True)] * 2:
        again, fresh = labeller.label(request, output), label("float64", request, output)
        assert torch.equal(again.acceptance, fresh.acceptance)
        assert torch.equal(again.drafted, fresh.drafted)


def test_drafters_without_a_network_are_left_as_they_were() -> None:
    request = ask("a", (5, 6, 7), 10)
    output = run("float64", "none", request).token_ids
    known = tiny.ScriptedDrafter("perfect", {"a": output})  # refuses to be opened twice
    labeller = RoundLabeller(drafting.target(), {"known": known})
    for _ in range(2):
        labels = labeller.label(request, output)
        assert labels.acceptance[:, 0].tolist() == [7, 7, 7, 6, 5, 4, 3, 2, 1]
        assert labels.drafted[:, 0].tolist() == [6, 6, 6, 5, 4, 3, 2, 1, 0]


def test_recorded_turn_feeds_lookup() -> None:
    request = REQUESTS["greedy"]
    output = run("float64", "none", request).token_ids
    known = replace(request, recorded_ids=output)
    labels = label("float64", known, output)
    result = run("float64", "lookup", known)
    assert max(r.emitted for r in result.stats.rounds) > 5
    for record in result.stats.rounds:
        assert labels.acceptance_of(["lookup"])[record.position - 1].item() == record.emitted


def test_a_text_that_a_stop_ended_counts_what_the_round_emitted() -> None:
    request = MARKOV["sampled"]
    whole = run("agreeing", "none", request).token_ids
    stop = max(set(whole), key=whole.index)  # comes last of all
    ended = replace(request, sampling=replace(request.sampling, stop_token_ids=[stop]))
    output = run("agreeing", "none", ended).token_ids
    assert 5 < len(output) < len(whole)
    labels = label("agreeing", ended, output)
    cut = 0
    for arm in ARMS:
        for record in run("agreeing", arm, ended).stats.rounds:
            assert labels.acceptance_of([arm])[record.position - 1].item() == record.emitted
            cut += record.accepted == record.emitted
    assert cut  # the stop stood inside a draft


def test_an_arm_whose_network_ends_counts_as_plain_from_there_on() -> None:
    def short() -> dict[str, Drafter]:
        eagle = tiny_drafters.eagle3(layer=tiny_drafters.layers(max_positions=26)).double()
        block = tiny_drafters.dflash(layer=tiny_drafters.layers(num_layers=2, max_positions=22))
        return drafting.neural_drafters(eagle=eagle, block=block.double())

    request = ask("a", text(1, 12), 20)
    labels = None
    for arm in NEURAL:
        engine = WhiFlashEngine(
            drafting.target(),
            router=arm,
            drafters=short(),
            settings=EngineSettings(kv_tokens=1024, max_draft_nodes=64),
        )
        result = engine.generate([request])[0]
        if labels is None:
            labeller = RoundLabeller(drafting.target(), short(), lanes=4)
            labels = labeller.label(request, result.token_ids)
        drafters = {r.drafter for r in result.stats.rounds}
        assert drafters == {arm, "none"}
        for record in result.stats.rounds:
            assert labels.acceptance_of([arm])[record.position - 1].item() == record.emitted
            assert labels.drafted_of([arm])[record.position - 1].item() == record.drafted


def test_surprises_tell_a_text_that_is_not_the_targets() -> None:
    request = REQUESTS["greedy"]
    output = run("float64", "none", request).token_ids
    assert label("float64", request, output).surprises == 0
    output[4] = (output[4] + 1) % tiny.VOCAB
    assert label("float64", request, output).surprises >= 1


def test_an_output_of_one_token_has_no_rounds() -> None:
    labels = label("float64", ask("a", (5, 6), 1), [7])
    assert labels.num_rounds == 0
    assert labels.hidden.shape == (0, 32)


def test_arms_that_were_not_labelled_are_refused_and_none_is_always_known() -> None:
    labels = label("float64", REQUESTS["greedy"], [7, 8, 9])
    assert labels.acceptance_of(["none", "ddtree"])[:, 0].tolist() == [1, 1]
    assert labels.drafted_of(["none"]).tolist() == [[0], [0]]
    with pytest.raises(SettingsError, match="'ptd'"):
        labels.acceptance_of(["eagle3", "ptd"])


@pytest.mark.parametrize(
    ("request_", "output", "error", "says"),
    [
        (ask("a", (), 4), [5], RequestError, "0 prompt tokens"),
        (ask("a", (5,), 4), [], RequestError, "0 output"),
        (ask("a", (5,), 2), [5, 6, 7], RequestError, "max_tokens=2"),
        (ask("a", (5,), 4), [5, 96], RequestError, "token 96"),
        (ask("a", (5,), 4, temperature=1.0), [5], RequestError, "no seed"),
        (ask("a", text(1, 30), 20), [5] * 20, ContextLengthError, "max_length=40"),
    ],
)
def test_what_cannot_be_labelled_is_refused(
    request_: Request, output: list[int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        label("float64", request_, output, max_length=40)


@pytest.mark.parametrize("name", ["max_length", "max_draft_nodes", "prefill_chunk", "lanes"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        label("float64", REQUESTS["greedy"], [5, 6], **{name: 0})


def test_drafters_of_an_engine_are_refused() -> None:
    drafters = random_drafters()
    WhiFlashEngine(
        drafting.target(),
        router="eagle3",
        drafters=drafters,
        settings=EngineSettings(kv_tokens=1024),
    )
    with pytest.raises(SettingsError, match="one drafter per engine"):
        RoundLabeller(drafting.target(), drafters)
