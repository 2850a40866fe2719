"""The lookup drafter: what it finds, from which sources, how much it proposes, what it costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from whiflash_agents.engine.draft_tree import DraftTree
from whiflash_agents.engine.drafters.base import DraftLimit
from whiflash_agents.engine.drafters.lookup import LookupDrafter
from whiflash_agents.engine.engine import EngineSettings, WhiFlashEngine
from whiflash_agents.engine.errors import SettingsError
from whiflash_agents.engine.request import Request, SamplingParams
from whiflash_agents.engine.sampling import Sampler
from whiflash_agents.engine.sequence import SequenceState
from whiflash_agents.engine.stopping import StopChecker

FAR = DraftLimit(depth=1000, nodes=1000)


def sequence(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    recorded: Sequence[int] = (),
    key: str = "a",
) -> SequenceState:
    params = SamplingParams()
    sampler = Sampler(
        params,
        vocab_size=10_000,
        prompt_ids=list(prompt),
        eos_token_ids=(),
        seed=0,
        device=torch.device("cpu"),
    )
    return SequenceState(
        request=Request(key, list(prompt), params, list(recorded)),
        sampler=sampler,
        stop=StopChecker(params, eos_token_ids=(), decode=None),
        tokens=[*prompt, *output],
        num_prompt=len(prompt),
        seed=0,
    )


def draft(
    drafter: LookupDrafter, state: SequenceState, limit: DraftLimit = FAR, *, opened: bool = True
) -> DraftTree:
    if not opened:
        drafter.open(state)
    drafter.catch_up([state])
    return drafter.draft([state], [limit])[0]


def drafted(
    drafter: LookupDrafter, state: SequenceState, limit: DraftLimit = FAR, *, opened: bool = True
) -> list[int]:
    tree = draft(drafter, state, limit, opened=opened)
    assert tree.tokens[0] == state.tokens[-1]
    assert tree.is_chain
    return tree.tokens[1:]


def finish(drafter: LookupDrafter, prompt: Sequence[int], output: Sequence[int], key: str) -> None:
    state = sequence(prompt, output, key=key)
    drafter.open(state)
    drafter.close(state)


# Sources -----------------------------------------------------------------------------------------

PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_the_recorded_turn_is_followed_from_the_first_token_on() -> None:
    recorded = list(range(100, 140))
    state = sequence([1, 2, 3], [100], recorded=recorded)
    assert drafted(LookupDrafter(), state, opened=False) == recorded[1:9]


def test_the_recorded_turn_is_taken_up_again_after_a_divergence() -> None:
    recorded = list(range(100, 140))
    drafter = LookupDrafter()
    state = sequence([1, 2, 3], [*range(100, 110)], recorded=recorded)
    assert drafted(drafter, state, opened=False)[0] == 110
    state.tokens += [7, 8]  # something else is said instead of 110 and 111
    assert drafted(drafter, state) == []
    state.tokens += [112]
    assert drafted(drafter, state) == []  # one word is no evidence
    state.tokens += [113]
    assert drafted(drafter, state)[:2] == [114, 115]


def test_the_recorded_turn_outranks_other_sources_that_match_as_well() -> None:
    drafter = LookupDrafter()
    finish(drafter, [1], [*PHRASE, 99], "earlier")
    state = sequence([1, 2, *PHRASE, 88, 3], PHRASE, recorded=[*PHRASE, 77])
    assert drafted(drafter, state, opened=False)[0] == 77


def test_a_longer_match_outranks_a_nearer_source() -> None:
    drafter = LookupDrafter()
    finish(drafter, [1], [*PHRASE, 99], "earlier")
    state = sequence([1, 2, *PHRASE[-3:], 88, 3], PHRASE)
    assert drafted(drafter, state, opened=False)[0] == 99


def test_the_prompt_is_quoted() -> None:
    state = sequence([1, *PHRASE, 2], PHRASE[:4])
    assert drafted(LookupDrafter(), state, opened=False)[:6] == PHRASE[4:]


def test_the_own_output_is_quoted() -> None:
    state = sequence([1, 2], [*PHRASE, 3, 4, *PHRASE[:5]])
    assert drafted(LookupDrafter(), state, opened=False)[:5] == PHRASE[5:]


def test_the_latest_of_several_occurrences_is_followed() -> None:
    state = sequence([1, 5, 6, 70, 2, 5, 6, 80, 3], [5, 6])
    assert drafted(LookupDrafter(), state, opened=False)[0] == 80


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    state = sequence([1, 2, 3], [7, 8, 9] * 6)
    assert drafted(LookupDrafter(), state, opened=False) == [7, 8, 9, 7, 8, 9, 7, 8]
    state = sequence([1, 2, 3], [5] * 12)
    assert drafted(LookupDrafter(), state, opened=False) == [5] * 8


def test_rows_that_finished_earlier_are_quoted_from_their_first_token_on() -> None:
    drafter = LookupDrafter()
    finish(drafter, [1, 2, 3], PHRASE, "earlier")
    state = sequence([9, 9, 2, 3], [PHRASE[0]], key="later")
    assert drafted(drafter, state, opened=False)[:8] == PHRASE[1:9]


def test_the_index_over_finished_rows_can_be_switched_off() -> None:
    drafter = LookupDrafter(shared_tokens=0)
    finish(drafter, [1, 2, 3], PHRASE, "earlier")
    assert drafted(drafter, sequence([9, 9, 2, 3], PHRASE[:3]), opened=False) == []


def test_no_draft_crosses_from_one_finished_row_into_the_next() -> None:
    drafter = LookupDrafter()
    finish(drafter, [1], PHRASE, "first")
    finish(drafter, [50, 51, 52, 53], [54, 55, 56, 57], "second")
    assert drafted(drafter, sequence([9], PHRASE[:-1]), opened=False) == PHRASE[-1:]
    assert drafted(drafter, sequence([9], PHRASE, key="b"), opened=False) == []
    # Nor is anything found across the border: the end of one row and the beginning of the next.
    assert drafted(drafter, sequence([9, PHRASE[-1]], [50], key="c"), opened=False) == []


@pytest.mark.parametrize("rows", ["many", "long"])
def test_memory_for_finished_rows_is_bounded(rows: str) -> None:
    drafter = LookupDrafter(shared_tokens=1000)
    for i in range(40):
        length = 37 if rows == "many" else 700
        finish(drafter, [1, 2, i], [(i * 1000 + j) % 9973 for j in range(length)], f"r{i}")
        held = len(drafter._young) + len(drafter._old)
        entries = sum(len(t) for x in (drafter._young, drafter._old) for t in x._tables.values())
        assert held <= 1000
        assert entries <= 4 * 1000
    assert held >= 500  # the older half goes only when the younger is full
    assert drafted(drafter, sequence([9], [39000 % 9973, 39001 % 9973]), opened=False) != []


def test_nothing_is_kept_of_a_closed_sequence_but_its_output() -> None:
    drafter = LookupDrafter()
    for i in range(50):
        finish(drafter, [i, i + 1], [3, 4], f"r{i}")
    assert drafter._states == {}


# How much is proposed ----------------------------------------------------------------------------


def test_alternatives_are_merged_into_one_tree_best_first() -> None:
    # In the recording 11 12 was followed by 50, in the own text by 40, in an earlier row by 60.
    output, recorded = [11, 12, 40, 41, 9, 11, 12], [20, 11, 12, 50, 51, 52]

    def tree_of(width: int) -> DraftTree:
        drafter = LookupDrafter(width=width)
        finish(drafter, [1], [11, 12, 60, 61, 62], "earlier")
        state = sequence([1], output, recorded=recorded)
        return draft(drafter, state, DraftLimit(depth=2, nodes=5), opened=False)

    assert tree_of(1).tokens[1:] == [50, 51]
    two = tree_of(2)
    assert two.tokens[1:] == [50, 51, 40, 41]
    assert two.parents == [-1, 0, 1, 0, 3]
    three = tree_of(3)
    assert three.tokens[1:] == [50, 51, 40, 41, 60]  # there is room for one more node
    assert three.parents[-1] == 0


def test_alternatives_that_agree_share_their_nodes() -> None:
    # Four words back: 50 51 52. Two words back, and later: 50 51 53.
    prompt = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 50, 51, 53, 8, 1, 2, 3, 4]
    drafter = LookupDrafter(width=4, shared_tokens=0)
    tree = draft(drafter, sequence(prompt), DraftLimit(depth=3, nodes=30), opened=False)
    assert tree.tokens[1:] == [50, 51, 52, 53]
    assert tree.parents[1:] == [0, 1, 2, 2]


def test_weak_evidence_gets_a_short_draft() -> None:
    drafter = LookupDrafter(shared_tokens=0)
    long = list(range(100, 140))
    assert len(drafted(drafter, sequence([1, 5, 6, *long, 5, 6]), opened=False)) == 6
    strong = sequence([1, *PHRASE, *long, *PHRASE], key="b")
    assert len(drafted(drafter, strong, opened=False)) == 8


def test_evidence_is_the_length_of_the_match_in_bits_and_0_without_a_draft() -> None:
    drafter = LookupDrafter()
    state = sequence([*PHRASE, 1, 2, 3])
    drafter.open(state)
    told = []
    for token in (*PHRASE, 99):
        told.append(drafter.evidence(state))
        assert (told[-1] > 0) == bool(drafted(drafter, state))
        state.tokens.append(token)
    # Orders of 2, 4 and 8 are indexed; what matches is then measured to the token.
    assert told == [0, 0, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    assert drafter.evidence(state) == 0


def test_asking_for_evidence_changes_no_draft() -> None:
    asked, silent = LookupDrafter(), LookupDrafter()
    states = [sequence([*PHRASE, 1, 2, *PHRASE[:4]]) for _ in range(2)]
    for drafter, state in zip((asked, silent), states, strict=True):
        drafter.open(state)
    for token in (*PHRASE[4:8], 7, 7, 7, 7, *PHRASE):
        asked.evidence(states[0])
        assert drafted(asked, states[0]) == drafted(silent, states[1])
        for state in states:
            state.tokens.append(token)


def test_drafts_grow_while_they_are_accepted_and_shrink_when_they_are_not() -> None:
    recorded = [(i * 7) % 1009 + 1000 for i in range(400)]
    drafter = LookupDrafter(max_tokens=32, shared_tokens=0)
    state = sequence([1, 2], recorded[:20], recorded=recorded)
    drafter.open(state)
    lengths = []
    for _ in range(4):  # accepted whole, and a bonus token that the recording has as well
        proposed = drafted(drafter, state)
        lengths.append(len(proposed))
        at = state.num_output
        assert proposed == recorded[at : at + len(proposed)]
        state.tokens += recorded[at : at + len(proposed) + 1]
    assert lengths == [8, 16, 32, 32]
    lengths = []
    for at in range(150, 390, 40):  # of each draft only the first token is right
        proposed = drafted(drafter, state)
        lengths.append(len(proposed))
        # ... and then the text returns to the recording, with evidence for a draft of any length
        state.tokens += [proposed[0], 5, *recorded[at : at + 36]]
    assert lengths == [32, 16, 8, 4, 2, 2]


def test_a_draft_that_was_mostly_accepted_changes_nothing() -> None:
    recorded = [(i * 7) % 1009 + 1000 for i in range(400)]
    drafter = LookupDrafter(shared_tokens=0)
    state = sequence([1, 2], recorded[:40], recorded=recorded)
    assert len(drafted(drafter, state, opened=False)) == 8
    state.tokens += [*recorded[40:45], 5, *recorded[60:100]]
    assert len(drafted(drafter, state)) == 8


@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=120),
    recorded=st.lists(st.integers(0, 3), max_size=60),
    depth=st.integers(0, 40),
    nodes=st.integers(0, 40),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
)
def test_no_limit_is_ever_exceeded(
    text: list[int], recorded: list[int], depth: int, nodes: int, width: int, max_tokens: int
) -> None:
    drafter = LookupDrafter(max_tokens=max_tokens, width=width)
    finish(drafter, text[:1], text[1:], "earlier")
    state = sequence(text[:2], text[2:], recorded=recorded)
    tree = draft(drafter, state, DraftLimit(depth=depth, nodes=nodes), opened=False)
    assert tree.tokens[0] == text[-1]
    assert max(tree.depths) <= min(depth, max_tokens)
    assert tree.num_drafted <= nodes
    assert min(tree.tokens) >= 0


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"width": 0}, {"shared_tokens": -1}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(SettingsError, match=f"{name}={value}"):
        LookupDrafter(**wrong)


# Several sequences -------------------------------------------------------------------------------


def test_two_sequences_never_see_each_others_state() -> None:
    drafter = LookupDrafter(width=3)
    mine = sequence([1, 2], PHRASE[:3], key="mine")
    other = sequence([1, 2, *PHRASE], PHRASE[:5], recorded=PHRASE, key="other")
    for state in (other, mine):
        drafter.open(state)
    drafter.catch_up([other, mine])
    assert len(draft(drafter, other)) > 1
    assert len(draft(drafter, mine)) == 1


@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=60), min_size=2, max_size=5),
    data=st.data(),
)
def test_drafts_do_not_depend_on_the_order_of_the_sequences(
    texts: list[list[int]], data: st.DataObject
) -> None:
    def run(order: Sequence[int]) -> dict[int, list[tuple[list[int], list[int]]]]:
        drafter = LookupDrafter(width=2)
        finish(drafter, [1, 2], [1, 2, 3, 1, 2, 0, 1, 1], "earlier")
        states = {
            i: sequence(t[:2], t[2 : len(t) // 2], recorded=t[::-1], key=str(i))
            for i, t in enumerate(texts)
        }
        out: dict[int, list[tuple[list[int], list[int]]]] = {i: [] for i in states}
        for i in order:
            drafter.open(states[i])
        for step in range(6):
            group = [states[i] for i in order]
            drafter.catch_up(group)
            trees = drafter.draft(group, [FAR] * len(group))
            for i, tree in zip(order, trees, strict=True):
                out[i].append((tree.tokens, tree.parents))
                rest = texts[i][len(texts[i]) // 2 :]
                states[i].tokens += rest[step * 3 : step * 3 + 3]
        return out

    order = data.draw(st.permutations(range(len(texts))))
    assert run(order) == run(range(len(texts)))


def test_a_lagging_sequence_catches_up_on_all_it_missed() -> None:
    drafter = LookupDrafter(shared_tokens=0)
    state = sequence([1, 2, 3])
    drafter.open(state)
    assert drafter.backlog(state) == 3
    drafter.catch_up([state])
    assert drafter.backlog(state) == 0
    state.tokens += [*PHRASE, 4, *PHRASE[:5]]
    assert drafter.backlog(state) == 16
    assert drafted(drafter, state)[:5] == PHRASE[5:]
    assert drafter.backlog(state) == 0


# What it costs -----------------------------------------------------------------------------------


def test_adding_and_finding_cost_the_same_whatever_the_length_of_the_text() -> None:
    def seconds(length: int) -> float:
        drafter = LookupDrafter(shared_tokens=0)
        # Few distinct words, so that there is something to find at every step.
        state = sequence([(i * i) % 97 for i in range(length)])
        drafter.open(state)
        drafter.catch_up([state])
        started = time.perf_counter()
        for i in range(1000):
            state.tokens.append((i * i) % 97)
            drafter.catch_up([state])
            drafter.draft([state], [FAR])
        return time.perf_counter() - started

    short = min(seconds(1_000) for _ in range(3))
    long = min(seconds(100_000) for _ in range(3))
    assert long < 5 * short
    assert short < 1.0


# In the engine -----------------------------------------------------------------------------------


PROMPT = [5, 9, 33]


def test_a_replayed_turn_costs_few_rounds_even_after_a_divergence() -> None:
    params = SamplingParams(max_tokens=80, temperature=0.9, seed=3, ignore_eos=True)
    engine = WhiFlashEngine(tiny.target(), settings=EngineSettings(kv_tokens=512))
    answer = engine.generate([Request("a", PROMPT, params)])[0].token_ids

    def rounds(recorded: Sequence[int]) -> list[int]:
        engine = WhiFlashEngine(
            tiny.target(), router="lookup", settings=EngineSettings(kv_tokens=512)
        )
        result = engine.generate([Request("a", PROMPT, params, recorded)])[0]
        assert result.token_ids == answer
        return [r.accepted for r in result.stats.rounds]

    same = rounds(answer)
    assert same[:3] == [8, 16, 32]  # the first round drafts already
    other = (answer[30] + 1) % tiny.VOCAB
    changed = rounds([*answer[:30], other, *answer[31:]])
    assert len(changed) <= len(same) + 6
    assert len(rounds([])) > 2 * len(changed)


def test_a_copy_and_its_original_learn_their_own_rows() -> None:
    def finish(drafter: LookupDrafter, row: list[int]) -> None:
        state = sequence(row[:1], row[1:], key="row")
        drafter.open(state)
        drafter.close(state)

    def proposed(drafter: LookupDrafter, prompt: list[int]) -> list[int]:
        tree = draft(drafter, sequence(prompt, key="asked"), opened=False)
        return tree.tokens[1:3]

    drafter = LookupDrafter()
    finish(drafter, [1, 2, 3, 4])
    other = copy.deepcopy(drafter)
    assert other._young is drafter._young  # large, and the same until one of them learns more
    finish(other, [5, 6, 7, 8])
    assert proposed(other, [5, 6]) == [7, 8]
    assert proposed(drafter, [5, 6]) == []
    finish(drafter, [9, 10, 11, 12])
    assert proposed(drafter, [9, 10]) == [11, 12]
    assert proposed(other, [9, 10]) == []
    assert proposed(other, [1, 2]) == proposed(drafter, [1, 2]) == [3, 4]
