"""Best-first trees: the most probable paths, no more of them than the budget allows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny_drafters
from drafting import Run, dflash_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engines import ask, text

from whiflash_agents.engine.drafters.ddtree import DDTreeDrafter, Pick, best_first
from whiflash_agents.engine.drafters.dflash import DFlashDrafter
from whiflash_agents.engine.errors import SettingsError

Path = tuple[int, ...]

# Multiples of a quarter: sums are exact, and ties frequent.
rows = st.lists(
    st.lists(st.integers(-12, 0).map(lambda n: n / 4), min_size=1, max_size=4).map(
        lambda row: sorted(row, reverse=True)
    ),
    max_size=4,
)


def all_paths(scores: list[list[float]]) -> dict[Path, float]:
    """Every path from the first position on, by its ranks."""
    return {
        ranks: sum(scores[at][rank] for at, rank in enumerate(ranks))
        for depth in range(1, len(scores) + 1)
        for ranks in itertools.product(*(range(len(row)) for row in scores[:depth]))
    }


def picked(picks: list[Pick]) -> list[Path]:
    """The path of every pick; parents are picks found before."""
    found: list[Path] = []
    for at, pick in enumerate(picks):
        assert -1 <= pick.parent < at
        above = () if pick.parent < 0 else found[pick.parent]
        assert pick.depth == len(above) + 1
        found.append((*above, pick.rank))
    return found


@settings(max_examples=300)
@given(rows, st.integers(1, 30))
def test_the_most_probable_paths_are_found_likeliest_first(
    scores: list[list[float]], budget: int
) -> None:
    picks = best_first(scores, budget)
    found = picked(picks)
    everything = all_paths(scores)
    assert len(picks) == min(budget, len(everything))
    assert len(set(found)) == len(found)
    got = [pick.score for pick in picks]
    assert got == [everything[path] for path in found]
    assert got == sorted(everything.values(), reverse=True)[:budget]


@settings(max_examples=100)
@given(rows, st.integers(1, 30))
def test_a_smaller_budget_gives_the_beginning_of_a_larger_one(
    scores: list[list[float]], budget: int
) -> None:
    assert best_first(scores, budget) == best_first(scores, budget + 5)[:budget]


@given(rows, st.integers(1, 30))
def test_likelier_siblings_come_first(scores: list[list[float]], budget: int) -> None:
    seen: set[Path] = set()
    for path in picked(best_first(scores, budget)):
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
        seen.add(path)


def test_a_certain_chain_is_followed_to_its_end() -> None:
    scores = [[-0.1, -5.0], [-0.1, -5.0], [-0.1, -5.0]]
    assert picked(best_first(scores, 3)) == [(0,), (0, 0), (0, 0, 0)]


def test_an_uncertain_first_token_spreads_the_tree() -> None:
    scores = [[-1.0, -1.1, -1.2], [-9.0, -9.1, -9.2]]
    assert picked(best_first(scores, 3)) == [(0,), (1,), (2,)]


def test_ties_neither_lose_nor_repeat_a_path() -> None:
    scores = [[0.0] * 3] * 3
    everything = all_paths(scores)
    assert set(picked(best_first(scores, 99))) == set(everything)
    assert len(best_first(scores, 20)) == 20


def test_impossible_tokens_come_last() -> None:
    inf = float("-inf")
    scores = [[-0.5, inf], [-0.5, inf]]
    assert picked(best_first(scores, 2)) == [(0,), (0, 0)]
    assert len(best_first(scores, 99)) == 6


@pytest.mark.parametrize("scores", [[], [[]], [[], [-1.0]]])
def test_without_tokens_there_is_no_tree(scores: Any) -> None:
    assert best_first(scores, 5) == []


def test_a_position_without_tokens_ends_the_tree() -> None:
    assert picked(best_first([[-1.0], [], [-1.0]], 5)) == [(0,)]


# The drafter --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "limit"), [(1, 64), (6, 64), (40, 64), (40, 9), (9, 1), (200, 128)]
)
def test_trees_stay_within_budget_limits_and_block(nodes: int, limit: int) -> None:
    drafter = DDTreeDrafter(dflash_model(), nodes=nodes)
    run = Run("ddtree", {"ddtree": drafter}, max_draft_nodes=limit)
    run.finish(
        ask("a", text(1, 9), 12), ask("b", text(2, 15), 4), ask("c", [5], 2), ask("d", [6], 3)
    )
    block = dflash_model().config.num_drafted
    for draft in run.drafts:
        budget = min(nodes, limit)
        depth = min(block, draft.limit.depth, budget)
        assert max(map(len, draft.paths), default=0) <= depth
        # 96 tokens a position: only a depth of 0 or 1 has fewer paths than asked for.
        wide = min(nodes, 96)
        assert len(draft.paths) == (0 if depth == 0 else min(budget, wide if depth == 1 else 999))
        assert len(set(draft.paths)) == len(draft.paths)
        assert all(path[:-1] == () or path[:-1] in draft.paths for path in draft.paths)
    assert {d.limit.depth for d in run.drafts} >= {0, 1, 2}


def test_the_likeliest_path_of_a_tree_is_the_chain_of_dflash() -> None:
    runs = {
        "dflash": Run("dflash", {"dflash": DFlashDrafter(dflash_model())}),
        "ddtree": Run("ddtree", {"ddtree": DDTreeDrafter(dflash_model(), nodes=24)}),
    }
    for run in runs.values():
        run.finish(ask("a", text(1, 9), 20))
    chains = {tokens: paths for (_, _, tokens), (_, paths) in runs["dflash"].by_text().items()}
    trees = {tokens: paths for (_, _, tokens), (_, paths) in runs["ddtree"].by_text().items()}
    both = chains.keys() & trees.keys()
    assert len(both) >= 3
    for tokens in both:
        if chains[tokens]:
            assert chains[tokens][0] == trees[tokens][0]


def test_one_node_is_the_first_token_of_the_chain() -> None:
    tree = Run("ddtree", {"ddtree": DDTreeDrafter(dflash_model(), nodes=1)})
    tree.finish(ask("a", text(1, 9), 20))
    chain = Run("dflash", {"dflash": DFlashDrafter(dflash_model())}, max_draft_nodes=1)
    chain.finish(ask("a", text(1, 9), 20))
    assert [d.paths for d in tree.drafts] == [d.paths for d in chain.drafts]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"ddtree: nodes=0; expected an integer of at least 1"):
        DDTreeDrafter(tiny_drafters.dflash(), nodes=0)
