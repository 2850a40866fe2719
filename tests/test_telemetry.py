"""Round records and the figures made of them add up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import tiny
from small_engines import AlternatingRouter, ask, build, plain, run

from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.routing.static import StaticRouter
from whiflash_agents.engine.sequence import SequenceState


def test_round_records_add_up_to_the_output() -> None:
    requests = [ask(str(i), [5 + i, 9], 40, temperature=0.8, seed=i) for i in range(4)]
    answers = {r.id: plain(r) for r in requests}
    modes = ("random", "perfect", "none", "wrong")
    drafters = {m: tiny.ScriptedDrafter(m, answers) for m in modes if m != "none"}
    engine = build(AlternatingRouter(*modes), drafters)
    results = engine.generate(requests)
    for result in results:
        rounds = result.stats.rounds
        assert [r.position for r in rounds] == list(
            itertools.accumulate([1, *(r.emitted for r in rounds[:-1])])
        )
        assert sum(r.emitted for r in rounds) == len(result.token_ids) - 1
        assert all(r.emitted in (r.accepted, r.accepted + 1) for r in rounds)
        assert [r.drafter for r in rounds] == [modes[i % 4] for i in range(len(rounds))]
        assert all(r.drafted == 0 for r in rounds if r.drafter == "none")
        assert result.stats.num_switches == len(rounds) - 1
        assert [r.switched for r in rounds] == [False] + [True] * (len(rounds) - 1)

        figures = result.stats.as_dict()
        histogram = figures["acceptance_histogram"]
        assert isinstance(histogram, list)
        assert sum(histogram) == len(rounds) == figures["num_spec_steps"]
        accepted = sum(k * count for k, count in enumerate(histogram))
        assert accepted == figures["num_accepted_draft_tokens"] == sum(r.accepted for r in rounds)
        assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / len(rounds))
        assert histogram[-1] > 0
        by_drafter = figures["by_drafter"]
        assert isinstance(by_drafter, dict)
        assert set(by_drafter) == set(modes)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            assert sum(group[name] for group in by_drafter.values()) == figures[name]
        assert by_drafter["wrong"]["num_accepted_draft_tokens"] == 0
        assert by_drafter["none"]["mean_acceptance_length"] == 1.0
    totals = engine.totals
    assert totals.output_tokens == sum(len(r.token_ids) for r in results)
    assert totals.rounds == sum(len(r.stats.rounds) for r in results)


def test_drafts_behind_a_stop_do_not_count_as_accepted() -> None:
    answer = plain(ask("a", max_tokens=20))
    at = next(i for i in range(3, 20) if answer[i] not in answer[:i])
    request = ask("a", max_tokens=20, stop_token_ids=[answer[at]])
    drafter = tiny.ScriptedDrafter("perfect", {"a": answer})
    engine = build(StaticRouter("perfect"), {"perfect": drafter})
    result = engine.generate([request])[0]
    assert result.token_ids == answer[: at + 1]
    last = result.stats.rounds[-1]
    assert last.drafted > last.accepted == last.emitted > 0


def test_a_drafter_that_was_not_chosen_lags_and_says_by_how_much() -> None:
    request = ask("a", max_tokens=30)
    drafter = tiny.ScriptedDrafter("wrong", {"a": plain(request)})
    engine = build(AlternatingRouter("none", "none", "none", "wrong"), {"wrong": drafter})
    rounds = engine.generate([request])[0].stats.rounds
    backlogs = [r.backlog for r in rounds if r.drafter == "wrong"]
    assert backlogs[0] == 3 + 4  # the prompt, its own token and three rounds
    assert set(backlogs[1:]) == {4}
    assert all(r.backlog == 0 for r in rounds if r.drafter == "none")


class SlowDrafter(tiny.ScriptedDrafter):
    """Takes 2 ms to catch up and 1 ms to draft."""

    def catch_up(self, sequences: Sequence[SequenceState]) -> None:
        time.sleep(0.002)
        super().catch_up(sequences)

    def draft(
        self, sequences: Sequence[SequenceState], limits: Sequence[DraftLimit]
    ) -> list[DraftTree]:
        time.sleep(0.001)
        return super().draft(sequences, limits)


def test_times_of_rounds_add_up_to_the_times_of_steps() -> None:
    requests = [ask(str(i), [5 + i], 15) for i in range(3)]
    drafter = SlowDrafter("wrong", {r.id: plain(r) for r in requests})
    engine = build(AlternatingRouter("none", "wrong"), {"wrong": drafter})
    for request in requests:
        engine.add(request)
    engine.step()  # the prompts: no rounds
    before = engine.totals.step_seconds
    results = run(engine)
    rounds = [r for result in results.values() for r in result.stats.rounds]
    assert all(r.round_seconds > r.catch_up_seconds + r.draft_seconds for r in rounds)
    assert sum(r.round_seconds for r in rounds) == pytest.approx(
        engine.totals.step_seconds - before, rel=1e-6
    )
    assert 0 < engine.totals.forward_seconds < engine.totals.step_seconds
    drafting = sum(r.catch_up_seconds + r.draft_seconds for r in rounds)
    assert engine.totals.draft_seconds == pytest.approx(drafting)
    assert drafting >= 7 * 0.003
    for result in results.values():
        overhead = result.stats.as_dict()["switch_overhead"]
        assert isinstance(overhead, float)
        assert 0 < overhead < 1


def test_switch_overhead_is_a_share_even_when_a_long_prompt_fills_the_step() -> None:
    request = ask("a", max_tokens=12)
    drafter = SlowDrafter("wrong", {"a": plain(request), "long": [7] * 8})
    engine = build(AlternatingRouter("none", "wrong"), {"wrong": drafter}, prefill_chunk=40)
    engine.add(request)
    engine.step()
    engine.add(ask("long", [3 + i % 90 for i in range(450)]))  # beside all of its rounds
    figures = run(engine)["a"].stats.as_dict()
    overhead = figures["switch_overhead"]
    assert isinstance(overhead, float)
    assert 0 < overhead < 1
